"""The plugin of vLLM: the folders that it takes, its products, and what leaves vLLM as it was."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import converted
from torch import Tensor, nn

import fp4pass
from fp4pass.integrations import vllm as plugin

ROOT = Path(__file__).parents[2]

pytest.importorskip("transformers")


def declared(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return dict(found["quantization_config"])


@pytest.mark.parametrize(
    ("scheme", "layout", "wanted"),
    [
        ("nvfp4a16", "compressed-tensors", "compressed-tensors"),
        ("mxfp4a16", "compressed-tensors", "compressed-tensors"),
        ("nvfp4a16", "modelopt", "modelopt_fp4"),
        ("mxfp4a16", "quark", "quark"),
        ("nvfp4", "compressed-tensors", ""),
        ("mxfp4", "compressed-tensors", ""),
        ("nvfp4", "modelopt", ""),
        ("mxfp4", "quark", ""),
        ("fp8", "compressed-tensors", ""),
        ("fp8", "modelopt", ""),
        ("fp8_block", "finegrained-fp8", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
def test_folders_with_weights_in_4_bits_alone_are_taken(
    scheme: str, layout: str, wanted: str, tmp_path: Path
) -> None:
    model = converted(scheme.removesuffix("a16"), scheme.endswith("a16"))
    fp4pass.save(model, tmp_path / "q", layout=layout)  # type: ignore[arg-type]
    assert plugin._own_config(declared(tmp_path / "q")) == wanted


def test_a_folder_of_several_schemes_is_taken_for_those_in_4_bits(tmp_path: Path) -> None:
    for layout, wanted in (("compressed-tensors",) * 2, ("modelopt", "modelopt_mixed")):
        rules = [("*self_attn*", {"fmt": "fp8", "weight_only": False})]
        fp4pass.save(converted("nvfp4", True, rules=rules), tmp_path / layout, layout=layout)
        assert plugin._own_config(declared(tmp_path / layout)) == wanted
    # ModelOpt says it so, too.
    inner = {"quant_algo": "NVFP4", "config_groups": {"a": {"input_activations": None}}}
    assert plugin._own_config({"quant_method": "modelopt", **inner}) == "modelopt_fp4"
    assert plugin._own_config({"quant_method": "modelopt", "quantization": inner}) == "modelopt_fp4"
    for other in ({}, {"quant_method": "awq"}, {"quant_method": "modelopt", "quant_algo": "FP8"}):
        assert plugin._own_config(other) == ""


class OfVllm:
    """A linear method with the parameters of vLLM's for compressed-tensors."""

    def create_weights(self, layer: Any, parts: list[Any], rows: list[int]) -> None:
        layer.logical_widths = rows
        for name, place in (("weight", 0), ("weight_scale", 1), ("weight_global_scale", 2)):
            tensors = [each[place] for each in parts]
            if tensors[0] is not None:
                made = nn.Parameter(torch.cat(tensors), requires_grad=False)
                layer.register_parameter(name, made)
        # A kernel that packs weights again.
        layer.scheme = SimpleNamespace(
            kernel=SimpleNamespace(process_weights_after_loading=lambda layer: layer.weight.zero_())
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "weight_global_scale"):
            layer.weight_global_scale.data = layer.weight_global_scale.data.max()
        layer.scheme.kernel.process_weights_after_loading(layer)


@pytest.mark.parametrize("scales", ["equal", "different"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4a16"])
def test_joined_layers_multiply_as_each_of_them_does(scheme: str, bias: bool, scales: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, rows, bias).bfloat16() for rows in (32, 16, 16)]
    if scales == "different":
        layers[1].weight.data *= 100
    layers = [fp4pass.convert(nn.Sequential(each), scheme, "naive")[0] for each in layers]
    weights: list[Any] = [each.packed_weight for each in layers]
    numbers = {None if each.global_scale is None else each.global_scale.item() for each in weights}
    assert len(numbers) == (1 if scheme == "mxfp4a16" else 1 + (scales == "different"))
    method, layer = plugin._with(plugin._Method, OfVllm(), Counter(taken=1, linear=2)), nn.Module()
    method.create_weights(layer, weights, [32, 16, 16])
    pointer = layer.weight.data_ptr()
    method.process_weights_after_loading(layer)
    assert layer.weight.data_ptr() == pointer, "one copy of the weights"
    assert all(type(each) is nn.Parameter for each in layer.parameters())
    both = torch.cat([each.bias for each in layers]) if bias else None

    def forward(x: Tensor) -> Tensor:
        result: Tensor = method.apply(layer, x, both)
        return result

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((1, 64), (5, 64), (2, 3, 64)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        with torch.no_grad():
            wanted = torch.cat([each(x) for each in layers], -1)
            assert torch.equal(forward(x), wanted)
            assert torch.equal(compiled(x), wanted)


def test_objects_of_vllm_keep_their_classes_and_are_copied() -> None:
    config = plugin._with(plugin._Config, OfVllm(), Counter(linear=3))
    config.itself = config
    for each in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert isinstance(each, OfVllm) and type(each) is type(config)
        assert type(each).__name__ == "OfVllm" and each.fp4pass == Counter(linear=3)


def fake_vllm(
    patch: pytest.MonkeyPatch, version: str = "0.33.0", capability: int | None = 90
) -> list[str]:
    """Put a vLLM into sys.modules, and return the names that are registered with it."""
    names: list[str] = []
    gpu = SimpleNamespace(to_int=lambda: capability)
    platform = SimpleNamespace(
        is_cuda=lambda: capability is not None, get_device_capability=lambda: gpu
    )
    quantization = ModuleType("quantization")
    vars(quantization).update(
        QUANTIZATION_METHODS=names,
        register_quantization_config=lambda name: lambda kind: names.append(name),
    )
    for path, content in {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {"quantization": quantization},
        "vllm.model_executor.layers.quantization": {},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": object},
    }.items():
        module = ModuleType(path)
        vars(module).update(content)
        patch.setitem(sys.modules, path, module)
    return names


@pytest.mark.parametrize(
    ("vllm", "switch", "wanted", "words"),
    [
        ({}, "", ["fp4pass"], ""),
        ({"capability": 89}, "", ["fp4pass"], ""),
        ({"version": "0.33.4"}, "", ["fp4pass"], ""),
        ({}, "0", [], ""),
        ({"capability": None}, "", [], ""),
        ({"capability": 80}, "1", [], ""),
        ({"capability": 100}, "", [], ""),
        ({"capability": 120}, "1", ["fp4pass"], ""),
        ({"version": "0.34.0"}, "", [], "is for vLLM 0.33, and leaves 0.34.0 as it is"),
        ({"version": "dev"}, "", [], "its plugin is off (InvalidVersion"),
    ],
)
def test_it_registers_where_it_applies(
    vllm: dict[str, Any],
    switch: str,
    wanted: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = fake_vllm(monkeypatch, **vllm)
    monkeypatch.setenv("FP4PASS_VLLM", switch)
    with caplog.at_level(logging.DEBUG):
        plugin.register()
    assert names == wanted
    assert len(caplog.messages) == bool(words) and all(words in each for each in caplog.messages)
    plugin.register()
    assert names == wanted, "a second call changes nothing"


def test_the_loading_code_of_vllm_gives_the_same() -> None:
    """eval/engines/vllm_plugin.py, which needs vLLM, found no difference."""
    found = json.loads((ROOT / "eval" / "results" / "vllm-plugin.json").read_text("utf-8"))
    taken = [row for row in found["rows"] if "multiplied" in row]
    assert {row["layout"] for row in taken} >= {"compressed-tensors", "modelopt", "quark"}
    assert sum("two processes" in row["case"] for row in taken) >= 4
    for row in taken:
        assert [row[key] for key in ("parameters", "outputs", "compiled")] == ["equal"] * 3, row
    for row in found["rows"]:
        assert ("multiplied" in row) == ("a16" in row["case"]), row


def test_the_rows_are_those_of_this_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "eval.engines.vllm_plugin", "--json", str(path)]
    subprocess.run([*command, "--only", "nvfp4a16 qwen2"], cwd=ROOT, check=True)
    kept = json.loads((ROOT / "eval" / "results" / "vllm-plugin.json").read_text("utf-8"))["rows"]
    found = json.loads(path.read_text())["rows"]
    assert len(found) == 4 and all(row in kept for row in found)
