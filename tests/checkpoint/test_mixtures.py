"""Mixtures of experts in folders: a linear of each expert, or stacks as they are."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import MODELS, UNREAD, build, logits, twin
from safetensors.torch import load_file
from small_models import assert_same_bits

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

CANNOT = "transformers cannot load this folder by itself"

# What lies on disk in place of the second stack of expert 1; others stay stacks.
SPLIT = {
    "qwen3_moe": "model.layers.0.mlp.experts.1.down_proj",
    "mixtral": "model.layers.0.block_sparse_moe.experts.1.w2",
    "olmoe": "model.layers.0.mlp.experts.1.down_proj",
    "deepseek_v3": "model.layers.1.mlp.experts.1.down_proj",
    "qwen2_moe": "model.layers.0.mlp.experts.1.down_proj",
    "nemotron_h": "backbone.layers.0.mixer.experts.1.down_proj",
    "longcat_flash": "model.layers.0.mlp.experts.1.down_proj",
    "llama4_text": "model.layers.0.feed_forward.experts.1.down_proj",
    # In one piece in folders of the float model.
    "gemma4": "model.layers.0.experts.1.down_proj",
}


def converted(name: str, fmt: str = "nvfp4", weight_only: bool = True) -> Any:
    model = build(name, torch.bfloat16)
    if not weight_only:
        fp4pass.prepare(model, "naive", rules=UNREAD.get(name, ()))
        logits(model)
    return fp4pass.convert(model, fmt, "naive", weight_only=weight_only)


def save(model: Any, folder: Path, **options: Any) -> list[str]:
    """Save, and return what it warned of, but that there is no tokenizer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp4pass.save(model, folder, **options)
    found = [str(each.message) for each in caught]
    return [each for each in found if "has no tokenizer" not in each]


@pytest.mark.quick(7)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "fp4pass"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_comes_back(name: str, layout: str, tmp_path: Path) -> None:
    model = converted(name, weight_only=False)
    try:
        save(model, tmp_path / "q", layout=layout)
    except CheckpointError as error:
        # Stacks have no place there, and no other layout is written in its place.
        assert layout == "modelopt" and name not in SPLIT and "stacked experts" in str(error)
        return
    reader = open_checkpoint(tmp_path / "q")
    if layout == "fp4pass" or name not in SPLIT:
        assert reader.layout.name == "fp4pass" and not reader.stacks
    else:
        assert reader.layout.name == layout and SPLIT[name] in reader.layers
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)
    assert fp4pass.report(fp4pass.load(tmp_path / "q")) == fp4pass.report(model)
    if reader.stacks:
        (tmp_path / "q" / "fp4pass.json").unlink()
        loaded = fp4pass.load(tmp_path / "q")
        for each in (loaded, model):
            # Transformers keeps these in float32 when it loads a model.
            for key, buffer in each.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.data = buffer.float()
        assert_same_bits(loaded, model)
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("name", ["granitemoe"])
def test_save_says_that_only_we_read_stacks(name: str, tmp_path: Path) -> None:
    (warning,) = save(converted(name), tmp_path / "q")
    assert "compressed-tensors has no place for stacks of experts (" in warning
    assert "Only fp4pass.load reads this folder" in warning
    # Where it was asked for, nothing needs to be said.
    assert not save(converted(name), tmp_path / "own", layout="fp4pass")


def test_what_engines_ask_of_experts(tmp_path: Path) -> None:
    model = converted("qwen3_moe", weight_only=False)
    save(model, tmp_path / "q")
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(declared["ignore"])
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    path = "model.layers.0.mlp.experts"
    for expert in range(5):
        gate, up = (
            tensors[f"{path}.{expert}.{part}.weight_global_scale"]
            for part in ("gate_proj", "up_proj")
        )
        assert gate == up and gate.shape == (1,)
    for part in ("gate_proj", "up_proj", "down_proj"):
        inputs = {float(tensors[f"{path}.{e}.{part}.input_global_scale"]) for e in range(5)}
        assert len(inputs) == 1


def test_transformers_reads_mxfp4(tmp_path: Path) -> None:
    for name in ("qwen3_moe", "mixtral"):
        model = converted(name, "mxfp4")
        assert not save(model, tmp_path / name)
        stock = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.bfloat16, experts_implementation="eager"
        )
        assert torch.equal(logits(stock.eval()), logits(model))


# Of the others the folder of the float model is no more than their config says.
@pytest.mark.quick(3)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"longcat_flash"}))
def test_transformers_reads_dense_folders(name: str, tmp_path: Path) -> None:
    model = converted(name)
    save(model, tmp_path / "q")
    transcode(tmp_path / "q", tmp_path / "d", "bf16")
    dense = type(model).from_pretrained(
        tmp_path / "d", dtype=torch.bfloat16, experts_implementation="eager"
    )
    reference = twin(build(name, torch.bfloat16), model)
    assert torch.equal(logits(dense.eval()), logits(reference))


def test_transformers_drops_the_global_scales_of_nvfp4(tmp_path: Path) -> None:
    """Once this fails, transformers has mended it: then `save` need not warn any more."""
    model = converted("qwen3_moe")
    (warning,) = save(model, tmp_path / "q")
    assert CANNOT in warning and "48371" in warning
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, experts_implementation="eager"
    )
    theirs = stock.model.layers[0].mlp.experts.down_proj.float()
    assert not torch.allclose(theirs, model.model.layers[0].mlp.experts.down_proj.weight.float())
    assert theirs.abs().max() > 100
    with pytest.raises(CheckpointError, match=r"fp4pass\.save\(model, dir\)"):
        model.save_pretrained(tmp_path / "r")
