"""fp4pass quantize --budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp4pass.cli.budget import Asked
from fp4pass.errors import OptionError

pytest.importorskip("typer")

EIGHT = "mxfp8_e4m3a16"
READ: dict[str, Any] = {"schemes": None, "options": {}, "by_layers": "", "processes": 1}


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("5.0bits", {"bits": 5.0}), ("0.02kl", {"kl": 0.02}), ("1e-3kl", {"kl": 1e-3})],
)
def test_a_budget_has_a_unit(budget: str, limit: dict[str, float]) -> None:
    asked = Asked.read(budget, **READ)
    assert asked is not None and asked.limit == limit
    assert Asked.read(None, **READ) is None


WRONG: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "no unit": ("5.0", {}, "--budget: expected a number as in 5.0bits or 0.02kl, got 5.0"),
    "no number": ("bits", {}, "expected a number as in 5.0bits"),
    "schemes alone": (None, {"schemes": "nvfp4a16,bf16"}, "--schemes is for --budget"),
    "a scheme": ("5bits", {"options": {"fmt": "nvfp4"}}, "--budget decides --scheme"),
    "a stream": ("5bits", {"by_layers": "--stream"}, "--budget does not go with --stream"),
    "processes": ("5bits", {"processes": 2}, "--budget runs in one process, not 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    budget, more, message = WRONG[name]
    with pytest.raises(OptionError, match=message):
        Asked.read(budget, **{**READ, **more})


def test_a_folder_of_two_schemes_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from fp4pass.cli import main

    tiny = Path(__file__).parents[2] / "examples" / "tiny_lm"
    text = tmp_path / "text.txt"
    text.write_text((tiny / "calib.txt").read_text("utf-8")[:6000], "utf-8")
    out = tmp_path / "out"
    command = ["quantize", str(tiny), "-o", str(out), "--budget", "5.0bits", "--calib", str(text)]
    command += ["--seq-len", "32", "--samples", "8", "--schemes", f"nvfp4a16,{EIGHT}", "--json"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    allocation = found["allocation"]
    assert allocation["budget"] == {"bits": 5.0} and allocation["chosen"]["bits"] <= 5.0
    assert {line["label"] for line in found["summary"]} == {"nvfp4a16", EIGHT}
    recipe = json.loads((out / "fp4pass.json").read_text("utf-8"))["recipe"]
    assert recipe["method"]["name"] == "sse" and len(recipe["rules"]) >= 2
