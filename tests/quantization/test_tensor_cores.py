"""The note on quantized inputs where there are no FP4 tensor cores: said once, and only there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from small_models import mlp
from tensor_cores import NOTE, without_tensor_cores  # noqa: F401, a fixture

import fp4pass
from fp4pass import LinearConfig
from fp4pass.core.machine import has_fp4_tensor_cores
from fp4pass.record.rows import tensor_core_note


def set_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capabilities[index])


def test_blackwell_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_fp4_tensor_cores()
    for capability, has in {(8, 0): False, (9, 0): False, (10, 0): True, (12, 0): True}.items():
        set_gpus(monkeypatch, capability)
        assert has_fp4_tensor_cores() is has_fp4_tensor_cores(0) is has
        assert bool(tensor_core_note([LinearConfig("nvfp4")])) is not has
    set_gpus(monkeypatch, (9, 0), (12, 0))
    assert has_fp4_tensor_cores() and not has_fp4_tensor_cores(0)
    set_gpus(monkeypatch)
    assert not has_fp4_tensor_cores()


def test_what_is_said() -> None:
    configs = [LinearConfig(name) for name in ("nvfp4", "mxfp4a16", "nvfp4")]
    assert tensor_core_note(configs) == NOTE
    both = tensor_core_note([*configs, LinearConfig("mxfp4", block=16)], "the machine")
    assert both.startswith("Schemes nvfp4, mxfp4:16 also quantize inputs, for FP4 tensor cores")
    assert "which the machine lacks" in both
    assert both.endswith("schemes nvfp4a16, mxfp4a16:16 are faster and more accurate.")
    # No tensor core multiplies these.
    others = [LinearConfig(name, "sse") for name in ("int8", "nvint4", "nvfp4_ue4m4")]
    assert tensor_core_note(others) == "" == tensor_core_note([])


@pytest.mark.parametrize(("scheme", "said"), [("nvfp4", [NOTE]), ("nvfp4a16", [])])
def test_convert_says_it_once(
    scheme: str, said: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = fp4pass.prepare(mlp(), fmt=scheme)
    model(torch.randn(40, 64))
    assert caplog.records == []
    fp4pass.convert(model)
    found = [each for each in caplog.records if each.name.startswith("fp4pass")]
    assert [each.getMessage() for each in found] == said
    assert all(each.levelno == logging.WARNING for each in found)
    report = fp4pass.report(model)
    assert list(report.notes) == said == report.to_dict()["notes"]
    assert (f"notes:\n  {NOTE}" in str(report)) == bool(said)
    # A file keeps what is true on any machine, and loading says nothing.
    fp4pass.save(model, tmp_path / "q")
    assert "notes" not in (tmp_path / "q" / "fp4pass.json").read_text()
    caplog.clear()
    # Nor does another conversion.
    fp4pass.convert(mlp(), scheme, "sse")
    loaded = fp4pass.load(tmp_path / "q", model=mlp())
    assert caplog.records == [] and list(fp4pass.report(loaded).notes) == said
