"""The names of tensors in a folder: those that `save_pretrained` of the float model gives."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from safetensors import safe_open
from small_models import assert_same_bits

import fp4pass
from fp4pass._compat.transformers_experts import parts_of
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.checkpoint.layouts import matches
from fp4pass.nn.experts import QuantizedExpertStack

transformers = pytest.importorskip("transformers")

SUFFIX = re.compile(r"\.(weight_packed|weight_scale|weight_global_scale|input_global_scale)$")

# One of each way to rename; the others are slow.
QUICK = ("qwen3_vl_moe", "exaone_moe")
ALL = [*mixtures.MODELS, *mixtures.MORE]
SLOW = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in ALL
]
# Its folders have rows for experts that only give back their input, which are none.
IDENTITIES = ("longcat_flash",)
# What one tensor of a folder is made of, or several: transformers reads it under either name.
MERGED = {"ernie4_5_vl_moe": re.compile(r"\.gate\.|\.moe_statics\.")}


def build(name: str) -> Any:
    if name in mixtures.MORE:
        return mixtures.build_more(name)
    return mixtures.build(name, torch.bfloat16)


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def save(model: Any, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        # That transformers cannot load it.
        warnings.simplefilter("ignore")
        fp4pass.save(model, folder, **options)


def expected_names(model: Any, folder: Path) -> set[str]:
    """The names in the float model's folder; a stack that engines read in pieces, in pieces."""
    found = names_in(folder)
    for path, owner in model.named_modules():
        for key, stack in owner.named_children():
            whole = f"{path}.{key}"
            if isinstance(stack, QuantizedExpertStack) and whole in found:
                found.discard(whole)
                pieces = parts_of(owner, key)
                experts = range(len(stack.weight_packed))
                found |= {f"{path}.{e}.{piece}.weight" for e in experts for piece in pieces}
    return found


@pytest.mark.parametrize("name", SLOW)
def test_names_are_those_of_the_float_models_folder(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "float")
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    save(model, tmp_path / "q")
    reader = open_checkpoint(tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(loaded, model)
    assert fp4pass.report(loaded) == fp4pass.report(model)
    transcode(tmp_path / "q", tmp_path / "dense", "bf16")
    if name not in IDENTITIES and reader.layout.name == "compressed-tensors":
        ours = {SUFFIX.sub(".weight", each) for each in names_in(tmp_path / "q")}
        dense, theirs = names_in(tmp_path / "dense"), names_in(tmp_path / "float")
        expected = expected_names(model, tmp_path / "float")
        if name in MERGED:
            ours, dense, theirs, expected = (
                {each for each in names if not MERGED[name].search(each)}
                for names in (ours, dense, theirs, expected)
            )
        assert ours == expected and dense == theirs
        (tmp_path / "q" / "fp4pass.json").unlink()
        # By its names and config.json alone.
        foreign = fp4pass.load(tmp_path / "q")
        assert foreign.state_dict().keys() == model.state_dict().keys()


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "save_pretrained"])
def test_ignore_has_the_names_of_the_folder_and_of_the_model(layout: str, tmp_path: Path) -> None:
    model = mixtures.build_more("gemma3")
    rules = [("*.layers.0.mlp.*", None)]
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True, rules=rules)
    if layout == "save_pretrained":
        model.save_pretrained(tmp_path / "q")
    else:
        save(model, tmp_path / "q", layout=layout)
    reader = open_checkpoint(tmp_path / "q")
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    ignored = reader.layout.ignored(declared)
    assert ignored is not None
    assert "language_model.model.layers.0.mlp.up_proj" in reader.dense_layers()
    # Tied, so that it is not in the folder.
    assert {"lm_head", "language_model.lm_head"} <= set(ignored)
    for name in ("language_model.model", "model.language_model"):
        assert matches(f"{name}.layers.0.mlp.up_proj", ignored)
        assert not matches(f"{name}.layers.1.mlp.up_proj", ignored)
