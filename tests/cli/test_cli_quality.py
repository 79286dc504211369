"""quantize --quality: recipes with a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import CALIB, run
from small_models import TINY

from fp4pass.quantization.quality import QUALITIES
from fp4pass.quantization.recipe import Recipe

SHORT = ("--calib", CALIB, "--samples", 1, "--seq-len", 32)


def test_a_quality_is_its_recipe_and_is_stored(tmp_path: Path) -> None:
    result = run("quantize", TINY, "-o", tmp_path / "out", *SHORT, "--quality", "fast")
    assert "quality fast: sse, 3,145,728 weights, 32 tokens; about " in result.stderr
    found = json.loads((tmp_path / "out" / "fp4pass.json").read_text())["recipe"]
    assert found["quality"] == "fast" and found["method"]["name"] == "sse"
    assert Recipe.read(tmp_path / "out" / "fp4pass.json").config.method_name == "sse"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "best"])
def test_better_qualities_calibrate_by_layers(tmp_path: Path, name: str) -> None:
    run("quantize", TINY, "-o", tmp_path / "out", *SHORT, "--quality", name)
    found = json.loads((tmp_path / "out" / "fp4pass.json").read_text())["recipe"]
    assert found["quality"] == name and found["calibration"]["sequential"]
    assert Recipe.from_dict(found).config.method == QUALITIES[name].options["method"]


@pytest.mark.parametrize(
    "args, message",
    [
        ((*SHORT, "--quality", "good", "--method", "sse"), "good chooses --method itself"),
        (
            (*SHORT, "--quality", "best", "--activation-scales", "naive"),
            "best chooses --activation-scales itself",
        ),
        ((*SHORT, "--quality", "fast", "--rules", CALIB), "Leave out --rules or --quality"),
        ((*SHORT, "--quality", "fast", "--stream"), "Leave out --stream or --quality"),
        (("--quality", "best"), "--quality best needs text to calibrate on"),
        ((*SHORT, "--quality", "good", "--device", "auto"), "not auto"),
    ],
    ids=str,
)
def test_what_conflicts_is_an_error(tmp_path: Path, args: tuple[object, ...], message: str) -> None:
    result = run("quantize", TINY, "-o", tmp_path / "out", *args, code=2)
    assert message in result.stderr and not (tmp_path / "out").exists()
