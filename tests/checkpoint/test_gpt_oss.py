"""The experts of gpt-oss, as they lie on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from native import gpt_oss
from safetensors.torch import load_file
from small_models import assert_same_bits, bits, change, language_model, logits

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@pytest.fixture(scope="module")
def packed_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss") / "packed"
    gpt_oss(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*MXFP4")
def test_the_experts_of_gpt_oss(packed_experts: Path, tmp_path: Path) -> None:
    stored = load_file(packed_experts / "model.safetensors")
    reader = open_checkpoint(packed_experts)
    assert len(reader.layers) == 4
    for name, layer in reader.layers.items():
        parts = reader.parts(name)
        assert layer.shape[0] == 3 and layer.fmt.key == "mxfp4"
        assert torch.equal(parts["weight_packed"], stored[f"{name}_blocks"].flatten(-2))
        assert torch.equal(parts["weight_scale"], stored[f"{name}_scales"])
    transcode(packed_experts, tmp_path / "dense", "bf16")
    dense = language_model(tmp_path / "dense")
    # On a CPU transformers dequantizes what it loads.
    stock = language_model(packed_experts)
    assert_same_bits(dense, stock)
    assert torch.equal(logits(dense), logits(stock))


@pytest.mark.filterwarnings("ignore:.*MXFP4")
def test_packed_experts_are_loaded_and_written_again(packed_experts: Path, tmp_path: Path) -> None:
    model = fp4pass.load(packed_experts)
    rows = fp4pass.report(model).converted
    assert [row.name.rpartition(".")[2] for row in rows] == ["gate_up_proj", "down_proj"] * 2
    assert rows[0].shape == (3, 192, 64)
    stock = language_model(packed_experts)
    stock.set_experts_implementation("eager")
    assert torch.equal(logits(model), logits(stock))
    fp4pass.save(model, tmp_path / "q", layout="gpt-oss")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (packed_experts, tmp_path / "q")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)
    with pytest.raises(CheckpointError, match=r"experts\.\w+: .* no place for stacked experts"):
        transcode(packed_experts, tmp_path / "r", "compressed-tensors")
    with pytest.raises(CheckpointError, match=r"Save what fp4pass\.load makes of it, with layout"):
        transcode(packed_experts, tmp_path / "r", "fp4pass")
    transcode(tmp_path / "q", tmp_path / "own", "fp4pass")
    assert_same_bits(fp4pass.load(tmp_path / "own"), model)
    transcode(tmp_path / "own", tmp_path / "back", "gpt-oss")
    assert_same_bits(fp4pass.load(tmp_path / "back"), model)
    reader = open_checkpoint(packed_experts)
    assert reader.layout.name == "gpt-oss"
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in reader.plain()


DENSE = [("*.self_attn.*", None)]


@pytest.mark.filterwarnings("ignore:.*MXFP4")
def test_transformers_loads_what_save_writes(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "float", packed=False)
    model = language_model(tmp_path / "float")
    fp4pass.convert(model, "mxfp4", "naive", weight_only=True, rules=DENSE)
    fp4pass.save(model, tmp_path / "q", layout="gpt-oss")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.1.mlp.router"} <= set(config["modules_to_not_convert"])
    stock = language_model(tmp_path / "q")
    stock.set_experts_implementation("eager")
    assert torch.equal(logits(stock), logits(model))
    (tmp_path / "q" / "fp4pass.json").unlink()
    assert_same_bits(fp4pass.load(tmp_path / "q"), model)


def test_damaged_experts_are_named(packed_experts: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    for part, edit, message in (
        ("_scales", lambda t: t[:, :-1].clone(), r"expected U8 \[3, 64, 3\]"),
        ("_scales", lambda t: torch.full_like(t, 255), "NaN or a negative"),
        ("_scales", lambda t: None, "no .*down_proj_scales"),
        ("_blocks", lambda t: t[..., :8].clone(), r"expected U8 \[3, 64, 3, 16\]"),
    ):
        shutil.copytree(packed_experts, tmp_path / "d")
        change(tmp_path / "d", name + part, edit)
        with pytest.raises(CheckpointError, match=message):
            fp4pass.load(tmp_path / "d")
        shutil.rmtree(tmp_path / "d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"self_attn\.q_proj: .*no place for anything but experts"),
        ({"rules": DENSE, "weight_only": False}, "anything but experts .* with inputs in float"),
        ({"rules": DENSE, "fmt": "nvfp4"}, "no place for nvfp4"),
    ],
    ids=str,
)
def test_what_the_layout_cannot_hold(options: Any, message: str, tmp_path: Path) -> None:
    model = gpt_oss(tmp_path / "float", packed=False)
    fp4pass.convert(model, **{"fmt": "mxfp4", "method": "naive", "weight_only": True} | options)
    with pytest.raises(CheckpointError, match=message):
        fp4pass.save(model, tmp_path / "q", layout="gpt-oss")
    assert not (tmp_path / "q").exists()
