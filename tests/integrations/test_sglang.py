"""The plugin of SGLang: its hooks, and what leaves SGLang as it was."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fp4pass
from fp4pass.integrations import sglang as plugin
from fp4pass.integrations import vllm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("group", "module"), [("sglang.srt.plugins", plugin), ("vllm.general_plugins", vllm)]
)
def test_engines_are_said_to_have_a_plugin(group: str, module: ModuleType) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'\[project.entry-points."{group}"\]\n(\w+) = "(.+)"\n', text)
    assert found is not None and found[1] == "fp4pass"
    assert importlib.metadata.EntryPoint(found[1], found[2], group).load() is module.register


@pytest.mark.parametrize(
    ("version", "switch", "count", "words"),
    [
        ("0.5.23", "", 4, ""),
        ("0.5.23", "0", 0, ""),
        ("0.5.24", "", 0, "is for SGLang 0.5.23, and leaves 0.5.24 as it is"),
        (None, "", 0, "its plugin is off ("),
    ],
)
def test_it_hooks_the_version_that_it_knows(
    version: str | None,
    switch: str,
    count: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    targets: list[str] = []

    class Registry:
        @classmethod
        def register(cls, target: str, hook: Any, kind: str) -> None:
            assert kind == "around"
            targets.append(target)

    hooks = {"HookRegistry": Registry, "HookType": SimpleNamespace(AROUND="around")}
    if version is not None:
        for path, content in {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": hooks,
            "sglang.version": {"__version__": version},
        }.items():
            module = ModuleType(path)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, path, module)
    else:
        # As if it were not installed.
        monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("FP4PASS_SGLANG", switch)
    with caplog.at_level(logging.DEBUG):
        plugin.register()
    assert len(caplog.messages) == bool(words) and all(words in each for each in caplog.messages)
    assert len(targets) == count
    plugin.register()
    assert len(targets) == count, "a second call changes nothing"


def loaded(layer: Any) -> nn.Module:
    """A layer with the parameters of SGLang for ModelOpt."""
    weight, made = layer.packed_weight, nn.Module()
    tensors = {"weight": weight.packed, "weight_scale": weight.scale.view(torch.float8_e4m3fn)}
    tensors |= {"weight_scale_2": 1 / weight.global_scale, "input_scale": torch.ones(1)}
    for name, tensor in tensors.items():
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return made


def test_layers_on_other_devices_stay_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(64, 32).bfloat16()
    ours = fp4pass.convert(nn.Sequential(dense), "nvfp4a16", "naive", progress=False)[0]
    x, calls = torch.randn(3, 64, dtype=torch.bfloat16), []

    def original(*args: Any) -> str:
        calls.append(args)
        return "by SGLang"

    layer = loaded(ours)
    assert plugin._process(original, "method", layer) == "by SGLang"
    assert plugin._apply(original, "method", layer, x) == "by SGLang"
    assert calls == [("method", layer), ("method", layer, x, None)]
    assert layer.weight.dtype == torch.uint8 and hasattr(layer, "weight_scale_2")
    monkeypatch.setattr(plugin, "_serves", lambda device: True)
    assert plugin._process(original, "method", layer) is None
    with torch.no_grad():
        assert torch.equal(plugin._apply(original, "method", layer, x, ours.bias), ours(x))
    assert len(calls) == 2 and not hasattr(layer, "input_scale")


@pytest.mark.parametrize(
    ("capability", "switch", "wanted"),
    [
        ((8, 9), "", True),
        ((9, 0), "", True),
        ((8, 0), "1", False),
        ((10, 0), "", False),
        ((12, 0), "1", True),
    ],
)
def test_gpus_that_it_serves(
    capability: tuple[int, int], switch: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("FP4PASS_SGLANG", switch)
    assert plugin._serves.__wrapped__(torch.device("cuda", 0)) is wanted
    assert plugin._serves.__wrapped__(torch.device("cpu")) is False


def test_the_loading_code_of_sglang_gives_the_same() -> None:
    """eval/engines/sglang_plugin.py, which needs SGLang, found no difference."""
    rows = json.loads((ROOT / "eval" / "results" / "sglang-plugin.json").read_text("utf-8"))["rows"]
    assert {row["layout"] for row in rows} == {"compressed-tensors", "modelopt"}
    for row in rows:
        assert [row[key] for key in ("parameters", "outputs", "compiled")] == ["equal"] * 3, row
        assert not row["multiplied"].startswith("0")
