"""FP8 folders as float models: quantized, streamed, and kept as they are where a rule says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import assert_same_bits

import fp4pass
from fp4pass.checkpoint import open_checkpoint
from fp4pass.checkpoint.float_models import load_float, open_float_source
from fp4pass.errors import CheckpointError, UnreadError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The folder has no tokenizer"),
    pytest.mark.filterwarnings("ignore:transformers cannot load this folder"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", ["finegrained", "ct-mxfp8", "mo-tensor"])
def test_it_is_weight_times_scale(kind: str, later: bool, tmp_path: Path) -> None:
    dense = fp8_folders.make(fp8_folders.dense_model(), tmp_path / "q", kind)
    model = load_float(str(tmp_path / "q"), torch.float32, "cpu", merge_later=later)
    assert getattr(model.config, "quantization_config", None) is None
    for name, weight in dense.items():
        module = model.get_submodule(name)
        if later:
            assert module.weight.is_meta
            found = module._hf_hook.weights_map["weight"]
        else:
            found = module.weight
        assert torch.equal(found, weight)
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("kind", fp8_folders.OTHER_BLOCKS)
def test_other_blocks_are_not_read(kind: str, tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.dense_model(), tmp_path / "fp8", kind)
    for read in (fp4pass.load, lambda folder: load_float(str(folder), "auto", "cpu")):
        with pytest.raises(UnreadError, match=r"_proj: .*Load the folder with the library"):
            read(tmp_path / "fp8")


@pytest.mark.parametrize("mixture", [False, True])
def test_what_is_quantized_and_streamed_is_that_of_the_dense_model(
    mixture: bool, tmp_path: Path
) -> None:
    model = fp8_folders.mixture_model() if mixture else fp8_folders.dense_model()
    fp8_folders.make(model, tmp_path / "fp8", "finegrained")
    dense = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    expected = fp4pass.convert(dense, "nvfp4a16", "sse", progress=False)
    fp4pass.quantize_checkpoint(tmp_path / "fp8", tmp_path / "q", "nvfp4a16", "sse", progress=False)
    assert_same_bits(fp4pass.load(tmp_path / "q", progress=False), expected)


@pytest.mark.parametrize(
    ("kind", "fmt"), [("finegrained", "fp8_block"), ("mo-tensor", "fp8_tensor")]
)
def test_a_rule_keeps_layers_as_they_are(kind: str, fmt: str, tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.dense_model(), tmp_path / "fp8", kind)
    before = open_checkpoint(tmp_path / "fp8")
    rules: Any = [("*self_attn*", {"fmt": fmt, "weight_only": False})]
    model = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    fp4pass.convert(model, "nvfp4a16", "sse", rules=rules, progress=False)
    rows = {row.name: row for row in fp4pass.report(model).converted}
    fp4pass.save(model, tmp_path / "q", progress=False)
    after = open_checkpoint(tmp_path / "q")
    assert after.layout.name == "compressed-tensors"
    for name in after.layers:
        if "self_attn" not in name:
            assert after.layers[name].scheme == "nvfp4a16"
            continue
        assert "of the source" in rows[name].note and rows[name].weight_error == 0
        assert after.layers[name].scheme == before.layers[name].scheme
        old, new = before.parts(name), after.parts(name)
        for part, tensor in old.items():
            assert (tensor is None and new[part] is None) or torch.equal(tensor, new[part])


def test_a_weight_that_was_changed_is_quantized_anew(tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.dense_model(), tmp_path / "fp8", "finegrained")
    model = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    fp4pass.convert(model, "fp8_block", "sse", progress=False)
    rows = {row.name: row for row in fp4pass.report(model).converted}
    assert not rows["model.layers.0.self_attn.q_proj"].note
    assert rows["model.layers.1.self_attn.q_proj"].note


def test_four_bits_are_no_float_source(tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.dense_model(), tmp_path / "mixed", "ct-mixed")
    assert open_float_source(str(tmp_path / "mixed")) is None
    with pytest.raises(CheckpointError, match="quantized already: expected a float model"):
        load_float(str(tmp_path / "mixed"), "auto", "cpu")


def test_tensors_beyond_the_model_are_named(tmp_path: Path) -> None:
    fp8_folders.make(fp8_folders.dense_model(), tmp_path / "fp8", "finegrained")
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.eh_proj"
    tensors[f"{name}.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].clone()
    tensors[f"{name}.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    model = load_float(str(tmp_path / "fp8"), "auto", "cpu")
    fp4pass.convert(model, "nvfp4a16", "naive", progress=False)
    rows = {row.name: row.skip_reason for row in fp4pass.report(model).skipped}
    assert rows[f"{name}.weight"].endswith("has no place for it: not copied")
    assert not any("scale" in each for each in rows)
