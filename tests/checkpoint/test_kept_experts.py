"""Experts of FP8 folders that a rule keeps: their codes and scales, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fp8_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp4pass
from fp4pass.checkpoint import open_checkpoint
from fp4pass.checkpoint.float_models import load_float
from fp4pass.record.rows import Report

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The folder has no tokenizer"),
    pytest.mark.filterwarnings("ignore:transformers cannot load this folder"),
]

KINDS = {
    "finegrained": "fp8_block",
    "mo-tensor": "fp8_tensor",
    "ct-row": "fp8",
    "ct-mxfp8": "mxfp8",
}


def rules(fmt: str) -> Any:
    return [("*.experts.*", {"fmt": fmt, "weight_only": False})]


def experts(folder: Path) -> Iterator[tuple[str, Mapping[str, Tensor | None]]]:
    reader = open_checkpoint(folder)
    for name in reader.layers:
        if ".experts." in name:
            yield name, reader.parts(name)


def assert_kept(source: Path, target: Path, report: Any) -> None:
    """Assert that experts are as they were; a scale of a tensor may be that of each row."""
    rows = [row for row in report.converted if ".experts." in row.name]
    assert rows and all("of the source" in row.note and row.weight_error == 0 for row in rows)
    before, after = dict(experts(source)), dict(experts(target))
    assert before.keys() == after.keys()
    for name, parts in before.items():
        for part, tensor in parts.items():
            other = after[name][part]
            if tensor is None or other is None:
                assert tensor is other is None
            else:
                assert torch.equal(tensor.expand_as(other), other)


def quantized(source: Path, target: Path, kept: str, streamed: bool) -> Report:
    """Write the folder of a source whose experts stay in a format; what the report says."""
    given: Any = {"rules": rules(kept), "progress": False}
    if streamed:
        return fp4pass.quantize_checkpoint(source, target, "nvfp4a16", "sse", **given)
    model = load_float(str(source), "auto", "cpu")
    fp4pass.convert(model, "nvfp4a16", "sse", **given)
    fp4pass.save(model, target, progress=False)
    return fp4pass.report(model)


@pytest.mark.quick(4)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_experts(kind: str, streamed: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "fp8", tmp_path / "q"
    fp8_folders.make(fp8_folders.mixture_model(), source, kind)
    report = quantized(source, target, KINDS[kind], streamed)
    assert_kept(source, target, report)
    assert open_checkpoint(target).layers["model.layers.0.self_attn.q_proj"].fmt.name == "nvfp4"


def test_the_model_is_that_of_load(tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.mixture_model(), tmp_path / "fp8", "mo-tensor")
    model = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    fp4pass.convert(model, "fp8_tensor", "naive", progress=False)
    loaded = fp4pass.load(tmp_path / "fp8", progress=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_scales_of_inputs_of_each_expert(tmp_path: Path) -> None:
    source = tmp_path / "fp8"
    fp8_folders.make(fp8_folders.mixture_model(), source, "mo-tensor")
    tensors = load_file(source / "model.safetensors")
    owner = "model.layers.0.mlp.experts"
    for piece in ("gate_proj", "up_proj"):
        tensors[f"{owner}.2.{piece}.input_scale"] *= 2
        # Calibration never reached this one.
        tensors[f"{owner}.3.{piece}.input_scale"] *= float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model = load_float(str(source), "auto", "cpu")
    fp4pass.convert(model, "nvfp4a16", "sse", rules=rules("fp8_tensor"), progress=False)
    scales = model.get_submodule(owner).gate_up_proj.input_global_scale
    one = 3.0 / 448
    assert torch.equal(scales, torch.tensor([one, one, 2 * one, 2 * one]))


def test_what_a_stack_cannot_hold_is_quantized_again_and_says_so(tmp_path: Path) -> None:
    model = fp8_folders.mixture_model(moe_intermediate_size=64)
    fp8_folders.make(model, tmp_path / "fp8", "finegrained")
    model = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    fp4pass.convert(model, "nvfp4a16", "sse", rules=rules("fp8_block"), progress=False)
    rows = {row.name: row for row in fp4pass.report(model).converted}
    owner = "model.layers.0.mlp.experts"
    assert rows[f"{owner}.gate_up_proj"].note.startswith(
        "quantized again, not kept as in the source: expected experts that are quantized alike"
    )
    assert rows[f"{owner}.down_proj"].note == "codes and scales are those of the source"
