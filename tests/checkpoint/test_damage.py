"""Damaged folders are errors that name what is wrong, and leave the model as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    TINY,
    Packed,
    Saved,
    assert_same_bits,
    change,
    change_json,
    language_model,
    mlp,
    packed_model,
)
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.checkpoint.layouts import LAYOUTS, PackedLayer
from fp4pass.checkpoint.source_files import checksum_of
from fp4pass.errors import CheckpointError, OptionError
from fp4pass.record.config import LinearConfig


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("2.weight_scale")
    save_file(tensors, folder / "model.safetensors")


def reshape_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["0.bias"] = tensors["0.bias"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def cut_json(folder: Path) -> None:
    path = folder / "fp4pass.json"
    path.write_text(path.read_text()[:200])


def newer_layout(folder: Path) -> None:
    path = folder / "fp4pass.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9}))


def change_own(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "fp4pass.json", change)


DAMAGE = [
    (change_own(lambda own: own["layers"]["0"].update(format="nvfp4:32")), "its checksum"),
    (change_own(lambda own: own["layers"]["0"].update(weight_only=False)), "its checksum "),
    (change_own(lambda own: own["report"].clear()), "its checksum is"),
    (change_own(lambda own: own.pop("sha256")), "its checksum is not"),
    (flip_a_bit, "checksum"),
    (truncate, "cut off"),
    (drop_a_tensor, "missing.*2.weight_scale"),
    (reshape_a_tensor, "0.bias"),
    (cut_json, "damaged"),
    (newer_layout, "version 3, .*got 9"),
    (lambda folder: (folder / "model.safetensors").unlink(), "missing or cut off"),
    (lambda folder: (folder / "fp4pass.json").unlink(), "not read 2 of its quantized layers"),
    (shutil.rmtree, "not a folder"),
]


@pytest.mark.core
@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[m for _, m in DAMAGE])
def test_damage_is_an_error_and_leaves_the_model_alone(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    damage(tmp_path / "q")
    skeleton = mlp(seed=3)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q", model=skeleton)
    assert_same_bits(skeleton, mlp(seed=3))


WRONG = [
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU()), "2: "),
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)), "32, 96"),
    (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), "2.bias"),
    (nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32)), "0.bias"),
]


@pytest.mark.core
@pytest.mark.parametrize(("skeleton", "message"), WRONG, ids=[m for _, m in WRONG])
def test_a_model_of_another_architecture_is_refused(
    tmp_path: Path, skeleton: nn.Module, message: str
) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q", model=skeleton)
    assert isinstance(skeleton[0], nn.Linear)


@pytest.mark.core
def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    path = tmp_path / "q" / "fp4pass.json"
    own = json.loads(path.read_text()) | {"layout": "gguf"}
    own.pop("sha256")
    path.write_text(json.dumps(own | {"sha256": checksum_of(own)}))
    with pytest.raises(CheckpointError, match=r"layout: .*got 'gguf'"):
        fp4pass.load(tmp_path / "q", model=mlp())


def test_formatting_is_no_damage(tmp_path: Path) -> None:
    model = packed_model(mlp())
    fp4pass.save(model, tmp_path / "q")
    change_own(lambda own: None)(tmp_path / "q")
    assert_same_bits(model, fp4pass.load(tmp_path / "q", model=mlp(seed=1)))


def test_a_device_that_is_not_there_leaves_the_model_alone(tmp_path: Path) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    model = mlp(1)
    with pytest.raises(OptionError, match=r"device_map=cuda:99 cannot be used"):
        fp4pass.load(tmp_path / "q", model=model, device_map="cuda:99")
    assert_same_bits(model, mlp(1))


def test_a_module_that_transformers_does_not_know_needs_a_skeleton(tmp_path: Path) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    with pytest.raises(CheckpointError, match="model=model"):
        fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match="converted already"):
        fp4pass.load(tmp_path / "q", model=packed_model(mlp()))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", 1e-5, "rms_norm_eps: expected 1e-06, got 1e-05"),
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}, "rope_parameters: exp"),
        ("tie_word_embeddings", None, "tie_word_embeddings: expected true, got null"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config: expected"),
        ("num_hidden_layers", 10**6, "num_hidden_layers: expected 4, got 1000000"),
        ("transformers_version", "5.99.0", ""),
    ],
)
def test_another_config_is_another_model(
    tmp_path: Path, saved: Saved, packed: Packed, key: str, value: Any, message: str
) -> None:
    shutil.copytree(saved(), tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    if not message:
        assert_same_bits(fp4pass.load(tmp_path / "q"), packed())
        return
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match=message):
        transcode(tmp_path / "q", tmp_path / "dense", "bf16")
    # Where the config makes nothing, it may say anything.
    assert_same_bits(fp4pass.load(tmp_path / "q", model=language_model()), packed())


def test_no_code_of_a_folder_is_run(
    foreign_copy: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign_copy()
    facts = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    change_json(folder / "config.json", lambda config: config.update(facts))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda text: "y")
    with pytest.raises(CheckpointError, match="contains custom code"):
        fp4pass.load(folder)
    assert not (tmp_path / "ran").exists()


def nan_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] = 0x7F
    return scale


def negative_scale(scale: Tensor) -> Tensor:
    scale.view(torch.uint8)[3, 1] |= 0x80
    return scale


def overflow(weight: Tensor) -> Tensor:
    weight[7, 5] = torch.inf
    return weight


LAYER = "model.layers.1.mlp.down_proj"


FOREIGN_DAMAGE = {
    "a NaN scale": (f"{LAYER}.weight_scale", nan_scale, "holds NaN or a negative scale"),
    "a negative scale": (f"{LAYER}.weight_scale", negative_scale, "holds NaN or a negative"),
    "no scale": (f"{LAYER}.weight_scale", lambda t: None, "no .*weight_scale beside it"),
    "no global scale": (f"{LAYER}.weight_global_scale", lambda t: None, "has no .*global_scale"),
    "no input scale": (f"{LAYER}.input_global_scale", lambda t: None, "input_global_scale is miss"),
    "zero": (f"{LAYER}.weight_global_scale", torch.zeros_like, "a positive finite number"),
    "infinity": (f"{LAYER}.input_global_scale", lambda t: t / 0, "a positive finite number"),
    "a negative divisor": (f"{LAYER}.weight_global_scale", torch.neg, "a positive finite number"),
    "1e-45": (f"{LAYER}.weight_global_scale", lambda t: 0 * t + 1e-45, "a finite reciprocal, got"),
    "NaN in a norm": ("model.norm.weight", lambda t: 0 * t / 0, "norm.weight: expected finite num"),
    "infinity in a row": ("model.embed_tokens.weight", overflow, "embed_tokens.weight: expected f"),
    "a packed norm": (
        "model.norm.weight",
        lambda t: torch.zeros(128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        r"does not read 1 .*\(model.norm has weight F4\)",
    ),
    "larger blocks": (f"{LAYER}.weight_scale", lambda t: t[:, ::2].clone(), "blocks of 16, as the"),
    "a shape": (f"{LAYER}.weight_scale", lambda t: t[:-1].clone(), r"expected F8_E4M3 \[256, 48\]"),
    "a dtype": (f"{LAYER}.weight_global_scale", lambda t: t.half(), "F32"),
    "a norm": ("model.norm.weight", lambda t: None, "lacks .*model.norm.weight"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("what", FOREIGN_DAMAGE)
def test_what_does_not_fit_is_an_error_that_names_it(foreign_copy: Saved, what: str) -> None:
    name, edit, message = FOREIGN_DAMAGE[what]
    folder = foreign_copy(weight_only=False)
    change(folder, name, edit)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(folder)


def test_infinity_in_a_bias_is_refused_and_in_a_mask_is_not(tmp_path: Path) -> None:
    model = mlp()
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    fp4pass.save(packed_model(model), tmp_path / "q")
    (tmp_path / "q" / "fp4pass.json").unlink()
    layer = PackedLayer(LinearConfig(weight_only=True), "float32", False, (96, 64))
    declared = LAYOUTS["compressed-tensors"].config({"0": layer}, ())
    config = {"quantization_config": declared, "dtype": "float32"}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    skeleton = mlp(1)
    skeleton.register_buffer("mask", torch.zeros(3))
    assert_same_bits(fp4pass.load(tmp_path / "q", model=skeleton), model)
    change(tmp_path / "q", "0.bias", lambda bias: bias.fill_(torch.inf))
    with pytest.raises(CheckpointError, match=r"0\.bias: expected finite numbers"):
        fp4pass.load(tmp_path / "q", model=mlp(1))


def test_other_methods_are_named(foreign_copy: Saved, saved: Saved, tmp_path: Path) -> None:
    path = foreign_copy() / "config.json"
    config = json.loads(path.read_text())

    def declare(**facts: Any) -> None:
        path.write_text(json.dumps(config | {"quantization_config": facts}))

    declare(quant_method="gptq")
    with pytest.raises(CheckpointError, match=r"quant_method: .*got 'gptq'"):
        fp4pass.load(tmp_path / "q")
    facts = config["quantization_config"]
    group = facts["config_groups"]["group_0"]
    declare(**facts | {"config_groups": {"g": group | {"format": "pack-quantized"}}})
    with pytest.raises(CheckpointError, match="got format 'pack-quantized'"):
        fp4pass.load(tmp_path / "q")
    declare(**facts | {"config_groups": {"g": group | {"targets": ["re:.*q_proj"]}}})
    with pytest.raises(CheckpointError, match="no config_groups"):
        fp4pass.load(tmp_path / "q")
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": 16}
    declare(**facts | {"config_groups": {"g": group | {"input_activations": eight_bits}}})
    with pytest.raises(CheckpointError, match=r"expected inputs in the format .*'num_bits': 8"):
        fp4pass.load(tmp_path / "q")
    declare(**facts | {"config_groups": {"g": group | {"weights": eight_bits}}})
    with pytest.raises(CheckpointError, match="symmetric floats of its kind"):
        fp4pass.load(tmp_path / "q")
    with pytest.raises(CheckpointError, match="not quantized"):
        fp4pass.load(TINY)
    with pytest.raises(OptionError, match="bf16"):
        transcode(tmp_path / "q", tmp_path / "r", "gguf")
    with pytest.raises(CheckpointError, match="not empty"):
        transcode(saved(), tmp_path / "q", "bf16")
