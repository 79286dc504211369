"""What is wrong with the structure of a folder shows without the model that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import Saved, change, change_json

from fp4pass.doctor import check_folder

ATTENTION = "model.layers.1.self_attn"
MLP = "model.layers.1.mlp"


def found(folder: Path) -> dict[str, str]:
    """The findings of the packed layers; these models have no tokenizer."""
    kinds = ("tokenizer-missing", "config-model")
    findings = [x for x in check_folder(folder, progress=False).findings if x.kind not in kinds]
    return {each.where: str(each).removeprefix(f"{each.where}: ") for each in findings}


@pytest.mark.quick(1)
@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_nothing_is_wrong_with_what_save_writes(
    foreign_copy: Saved, saved: Saved, layout: str, weight_only: bool
) -> None:
    assert found(saved(weight_only=weight_only, layout=layout)) == {}
    assert found(foreign_copy(weight_only=weight_only, layout=layout)) == {}


TENSORS = {
    "a divisor": (f"{ATTENTION}.k_proj.weight_global_scale", ATTENTION, "weight_global_scale"),
    "a scale of inputs": (f"{MLP}.up_proj.input_global_scale", MLP, "input_global_scale"),
    "o_proj is not fused": (f"{ATTENTION}.o_proj.input_global_scale", "", ""),
}


@pytest.mark.parametrize("what", TENSORS)
def test_layers_that_engines_fuse_have_one_global_scale(foreign_copy: Saved, what: str) -> None:
    name, where, message = TENSORS[what]
    folder = foreign_copy(weight_only=False)
    change(folder, name, lambda tensor: tensor * 2)
    wrong = found(folder)
    assert list(wrong) == ([where] if where else [])
    assert all(
        f"and {message} " in each and "expected one for all" in each for each in wrong.values()
    )


def test_attention_to_something_else_has_scales_of_its_own(foreign_copy: Saved) -> None:
    """There k and v read another input than q."""
    folder = foreign_copy(weight_only=False)
    name = f"{ATTENTION}.q_proj.input_global_scale"
    change(folder, name, lambda tensor: tensor * 2)
    assert list(found(folder)) == [ATTENTION]
    change_json(folder / "config.json", lambda config: config.update(architectures=["Detector"]))
    assert found(folder) == {}


def test_a_dense_part_of_what_engines_fuse_is_named(foreign_copy: Saved) -> None:
    folder = foreign_copy()
    tensors = load_file(folder / "model.safetensors")
    for part in ("packed", "scale", "global_scale"):
        tensors.pop(f"{MLP}.up_proj.weight_{part}")
    tensors[f"{MLP}.up_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, folder / "model.safetensors")
    assert "gate_proj nvfp4a16" in found(folder)[MLP]
    assert found(folder)[MLP].endswith("up_proj dense")


NUMBERS = {
    "model.norm.weight": "expected finite numbers",
    f"{MLP}.up_proj.weight_global_scale": "a positive finite number",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite(foreign_copy: Saved, name: str) -> None:
    folder = foreign_copy()
    change(folder, name, lambda tensor: tensor / 0)
    assert found(folder)[name].startswith("model.safetensors: ")
    assert NUMBERS[name] in found(folder)[name]


@pytest.mark.parametrize(
    ("layout", "file", "pattern"),
    [
        ("compressed-tensors", "config.json", "re:.*up_proj"),
        ("compressed-tensors", "config.json", f"{MLP}.up_proj"),
        ("modelopt", "config.json", "*.up_proj"),
        ("modelopt", "hf_quant_config.json", "model.layers.1.*"),
    ],
)
def test_no_packed_layer_is_among_those_that_stay_dense(
    foreign_copy: Saved, layout: str, file: str, pattern: str
) -> None:
    folder = foreign_copy(layout=layout)

    def ignore(config: Any) -> None:
        config.get("quantization_config", {}).get("ignore", []).append(pattern)
        config.get("quantization", {}).get("exclude_modules", []).append(pattern)

    change_json(folder / file, ignore)
    assert f"{file}: expected a dense layer, as " in found(folder)[f"{MLP}.up_proj"]
