"""Mixtures of other libraries: the numbers of each expert and half are kept to the bit."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from mixtures import build, logits, twin
from safetensors.torch import load_file, save_file
from small_models import assert_same_bits, bits, change_json
from torch import Tensor

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

FIRST = "model.layers.0.mlp.experts"
INPUTS = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}
WEIGHTS = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
LAYOUTS = list(INPUTS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W4A4 folders of both layouts without fp4pass.json, whose experts share their numbers."""
    model = build("qwen3_moe", torch.bfloat16)
    fp4pass.prepare(model, "naive")
    logits(model)
    fp4pass.convert(model, "nvfp4", "naive")
    folder = tmp_path_factory.mktemp("mixtures")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layout in LAYOUTS:
            fp4pass.save(model, folder / layout, layout=layout)
            (folder / layout / "fp4pass.json").unlink()
    return folder


def edited(source: Path, folder: Path, edit: Any) -> dict[str, Tensor]:
    """A copy of a folder with edited tensors of its experts; what becomes None goes."""
    shutil.copytree(source, folder)
    found = load_file(folder / "model.safetensors")
    tensors = {n: edit(n, t) if ".experts." in n else t for n, t in found.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return kept


def place(name: str) -> tuple[int, str]:
    """The expert of a tensor, and which projection of it."""
    found = re.search(r"experts\.(\d+)\.(\w+)_proj", name)
    assert found is not None
    return int(found[1]), found[2]


def saved_again(model: Any, folder: Path, layout: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp4pass.save(model, folder, layout=layout)
    return load_file(folder / "model.safetensors")


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(bits(ours[name]), bits(tensor)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_each_expert_and_half_are_kept(
    sources: Path, tmp_path: Path, layout: str
) -> None:
    def edit(name: str, tensor: Tensor) -> Tensor:
        expert, kind = place(name)
        if name.endswith(INPUTS[layout]):
            return tensor * (1 + 0.3 * expert + (kind == "down"))
        if name.endswith(WEIGHTS[layout]):
            return tensor * (1 + 0.1 * expert + 0.37 * (kind == "up"))
        return tensor

    theirs = edited(sources / layout, tmp_path / "theirs", edit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fp4pass.load(tmp_path / "theirs")
    stack = model.get_submodule(f"{FIRST}.gate_up_proj")
    assert stack.weight_global_scale.shape == (5, 2) and stack.input_global_scale.shape == (5,)
    assert model.get_submodule(f"{FIRST}.down_proj").weight_global_scale.shape == (5,)
    # The weights are those that the folder stands for, tensor by tensor.
    transcode(tmp_path / "theirs", tmp_path / "dense", "bf16")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for expert in range(5):
        halves = [dense[f"{FIRST}.{expert}.{each}_proj.weight"] for each in ("gate", "up")]
        assert torch.equal(stack.weight[expert], torch.cat(halves))
    assert_equal(saved_again(model, tmp_path / "again", layout), theirs)
    fp4pass.save(model, tmp_path / "own", layout="fp4pass")
    own = fp4pass.load(tmp_path / "own")
    assert_same_bits(own, model)
    assert torch.equal(logits(own), logits(model))
    parts = open_checkpoint(tmp_path / "own")
    assert torch.equal(parts.dense(f"{FIRST}.gate_up_proj", torch.bfloat16), stack.weight)


def test_experts_compute_with_their_own_numbers(sources: Path, tmp_path: Path) -> None:
    """Of weights only: the model with the dequantized weights gives the same logits."""

    def edit(name: str, tensor: Tensor) -> Tensor | None:
        expert, kind = place(name)
        if name.endswith("weight_global_scale"):
            return tensor * (1 + 0.1 * expert + 0.37 * (kind == "up"))
        return None if name.endswith("input_global_scale") else tensor

    edited(sources / "compressed-tensors", tmp_path / "q", edit)
    floats(tmp_path / "q")
    model = fp4pass.load(tmp_path / "q")
    assert torch.equal(logits(model), logits(twin(build("qwen3_moe", torch.bfloat16), model)))


def floats(folder: Path) -> None:
    """Have all inputs stay in float."""

    def edit(config: Any) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"] = None

    change_json(folder / "config.json", edit)


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [None, 0.0, float("inf")], ids=str)
def test_experts_that_no_calibration_reached_get_the_largest_scale(
    sources: Path, tmp_path: Path, layout: str, number: float | None
) -> None:
    def edit(name: str, tensor: Tensor) -> Tensor | None:
        expert, _ = place(name)
        if not name.endswith(INPUTS[layout]):
            return tensor
        if expert == 3:
            return None if number is None else torch.full_like(tensor, number)
        return tensor * (1 + expert)

    theirs = edited(sources / layout, tmp_path / "theirs", edit)
    with pytest.warns(UserWarning, match=r"^6 linear layers of experts have no usable scale"):
        model = fp4pass.load(tmp_path / "theirs")
    scales = model.get_submodule(f"{FIRST}.down_proj").input_global_scale
    assert scales[3] == (scales.max() if layout == "modelopt" else scales.min())
    again = saved_again(model, tmp_path / "again", layout)
    stays = {name for name in theirs if not (INPUTS[layout] in name and "experts.3." in name)}
    assert all(torch.equal(bits(again[name]), bits(theirs[name])) for name in stays)
    # A dense model needs none; engines do.
    transcode(tmp_path / "theirs", tmp_path / "dense", "bf16")
    assert "experts.3." in run("verify", tmp_path / "theirs", code=1).stderr
    if number is None:
        with pytest.raises(CheckpointError, match=r"is missing.*--to bf16"):
            transcode(tmp_path / "theirs", tmp_path / "packed", "modelopt")


def test_a_stack_without_any_scale_of_inputs_gets_them_at_each_call(
    sources: Path, tmp_path: Path
) -> None:
    def edit(name: str, tensor: Tensor) -> Tensor | None:
        is_of_down = "down_proj" in name and "layers.0." in name
        return None if is_of_down and name.endswith("input_scale") else tensor

    edited(sources / "modelopt", tmp_path / "q", edit)
    with pytest.warns(UserWarning, match=r"linear layers of experts have no usable scale"):
        model = fp4pass.load(tmp_path / "q")
    assert model.get_submodule(f"{FIRST}.down_proj").input_global_scale is None
    assert logits(model).isfinite().all()


def test_a_dense_layer_without_a_scale_of_inputs_is_refused(sources: Path, tmp_path: Path) -> None:
    shutil.copytree(sources / "modelopt", tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.input_scale"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"q_proj.input_scale is missing.*--to bf16"):
        fp4pass.load(tmp_path / "q")
    transcode(tmp_path / "q", tmp_path / "dense", "bf16")


def test_powers_of_two_among_other_multipliers_are_read(sources: Path, tmp_path: Path) -> None:
    """ModelOpt's are amax / 2688, which some experts have a power of two of by chance."""
    third = {"gate": 1 / 3, "up": 1 / 3, "down": 1.0}

    def edit(name: str, tensor: Tensor) -> Tensor:
        expert, kind = place(name)
        return tensor * third[kind] if expert == 1 and name.endswith("weight_scale_2") else tensor

    theirs = edited(sources / "modelopt", tmp_path / "theirs", edit)
    model = fp4pass.load(tmp_path / "theirs")
    assert_equal(saved_again(model, tmp_path / "again", "modelopt"), theirs)


def test_two_scales_of_one_input_are_refused(sources: Path, tmp_path: Path) -> None:
    def edit(name: str, tensor: Tensor) -> Tensor:
        is_one = place(name) == (2, "up") and name.endswith("input_scale")
        return tensor * 2 if is_one else tensor

    edited(sources / "modelopt", tmp_path / "q", edit)
    with pytest.raises(CheckpointError, match=r"gate and up.*two for expert 2.*--to bf16"):
        fp4pass.load(tmp_path / "q")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ["moe_intermediate_size", "hidden_size"])
def test_sizes_that_are_not_those_of_the_experts_are_named(
    sources: Path, tmp_path: Path, layout: str, size: str
) -> None:
    shutil.copytree(sources / layout, tmp_path / "q")
    change_json(tmp_path / "q" / "config.json", lambda config: config.update({size: 96}))
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj: expected a weight of \("):
        fp4pass.load(tmp_path / "q")


# Of other types than what stands there.
