"""Rotated weights for others: what compressed-tensors rotates, fp4pass reads and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from small_models import assert_same_bits, converted, language_model, linears, logits, tokens

import fp4pass
from fp4pass.checkpoint import open_checkpoint, transcode
from fp4pass.errors import CheckpointError

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

LAYOUT = "compressed-tensors-hadamard"


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without fp4pass.json, of weights in nvfp4 rotated by 64, some of them dense."""
    folder = tmp_path_factory.mktemp("rotated") / "q"
    fp4pass.save(converted(rotation=64, rules=[("*.o_proj", None)]), folder, layout=LAYOUT)
    (folder / "fp4pass.json").unlink()
    return folder


def transforms_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]["transform_config"]


def stock_model(folder: Path) -> Any:
    """What stock transformers loads, with inputs that compressed-tensors rotates."""
    model, config = language_model(folder), transforms_of(folder)
    for group in config["config_groups"].values():
        # What is applied to weights lies in the files.
        group["apply"] = [each for each in group["apply"] if each["location"] == "input"]
    foreign.apply_transforms(model, config)
    # It unpacks weights at the first call.
    logits(model)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize(("fmt", "rotation"), [("nvfp4", 64), ("mxfp4", 64), ("mxfp4", 32)])
def test_compressed_tensors_rotates_as_we_do(tmp_path: Path, fmt: str, rotation: int) -> None:
    rules = [("*.o_proj", None), ("*.down_proj", {"rotation": 0})]
    model = converted(fmt, rotation=rotation, rules=rules if rotation == 64 else ())
    fp4pass.save(model, tmp_path / "q", layout=LAYOUT)
    ours, theirs = logits(model), logits(stock_model(tmp_path / "q"))
    if rotation == 64:
        assert torch.equal(theirs, ours)
    else:
        # The root of 32 is no power of two: they divide by it, we multiply by its reciprocal.
        error = (theirs - ours).float().norm() / ours.float().norm()
        assert 0 < error < 2**-8
    (tmp_path / "q" / "fp4pass.json").unlink()
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(loaded, model)
    assert torch.equal(logits(loaded), ours)


def test_rotated_weights_of_compressed_tensors(tmp_path: Path) -> None:
    dense = foreign.compressed_tensors(
        language_model(), tmp_path / "q", "NVFP4A16", tokens(), rotation=64
    )
    assert transforms_of(tmp_path / "q")["config_groups"]["rotated"]["head_dim"] == 64
    model = fp4pass.load(tmp_path / "q")
    assert set(linears(model)) == set(dense)
    for name, linear in linears(model).items():
        assert linear.config.rotation == 64
        # What it keeps is rotated.
        assert torch.equal(linear.stored_weight(torch.bfloat16), dense[name]), name
    assert torch.equal(logits(model), logits(stock_model(tmp_path / "q")))


def test_the_default_layout_is_still_our_own(rotated: Path, tmp_path: Path) -> None:
    model = fp4pass.load(rotated)
    fp4pass.save(model, tmp_path / "own")
    assert open_checkpoint(tmp_path / "own").layout.name == "fp4pass"
    transcode(tmp_path / "own", tmp_path / "again", LAYOUT)
    assert transforms_of(tmp_path / "again") == transforms_of(rotated)
    (tmp_path / "again" / "fp4pass.json").unlink()
    names = sorted(path.name for path in rotated.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        found, expected = (folder / name for folder in (tmp_path / "again", rotated))
        assert found.read_bytes() == expected.read_bytes(), name


REFUSED = {
    "the output": ({"location": "output"}, {}, r"got \('output'"),
    "a permutation": ({}, {"randomize": True}, "randomized hadamard"),
    "blocks of 16": ({}, {"head_dim": 16}, r"got .*, 16\)"),
    "a dense head": ({"ignore": ["re:.*o_proj"]}, {}, "of lm_head"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_transforms_are_refused(rotated: Path, tmp_path: Path, what: str) -> None:
    place, group, message = REFUSED[what]
    shutil.copytree(rotated, tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())
    (found,) = config["quantization_config"]["transform_config"]["config_groups"].values()
    found |= group
    found["apply"][0] |= place
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        fp4pass.load(tmp_path / "q")
