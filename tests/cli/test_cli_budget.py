"""fp4pass quantize --budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import CALIBRATED, run, run_json
from small_models import TINY, tokens

from fp4pass.errors import OptionError

for package in ("transformers", "typer", "rich", "yaml"):
    pytest.importorskip(package)

command: Any = pytest.importorskip("fp4pass.cli.quantize")

pytestmark = pytest.mark.usefixtures("offline")

EIGHT = "mxfp8a16"
READ: dict[str, Any] = {"schemes": None, "options": {}, "by_layers": "", "processes": 1}


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("5.0bits", {"bits": 5.0}), ("0.02kl", {"kl": 0.02}), ("1e-3kl", {"kl": 1e-3})],
)
def test_a_budget_has_a_unit(budget: str, limit: dict[str, float]) -> None:
    assert command._read_budget(budget, **READ) == limit
    assert command._read_budget(None, **READ) is None


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
        command._read_budget(budget, **{**READ, **more})


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Two layers are enough; they say the method, too."""
    path = tmp_path / "rules.json"
    skipped = [{f"model.layers.{i}.*": None} for i in (2, 3)]
    path.write_text(json.dumps({"method": {"name": "naive"}, "rules": skipped}))
    return path


def test_a_folder_of_two_schemes_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--budget", "5.0bits", "--schemes", f"nvfp4a16,{EIGHT}", *CALIBRATED[:2])
    found = run_json("quantize", TINY, "-o", out, *options, "--samples", 8, "--seq-len", 32)
    allocation = found["allocation"]
    assert allocation["budget"] == {"bits": 5.0} and allocation["chosen"]["bits"] <= 5.0
    assert {line["label"] for line in found["summary"]} == {"nvfp4a16", EIGHT}
    recipe = json.loads((out / "fp4pass.json").read_text("utf-8"))["recipe"]
    assert recipe["method"]["name"] == "sse" and len(recipe["rules"]) >= 2


def test_without_data_the_model_writes_its_own(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fp4pass.calibration.to_batches.sample", lambda *args, **options: tokens(8, 32)
    )
    out = tmp_path / "out"
    options = ("--budget", "0.1kl", "--schemes", "nvfp4a16,bf16", "--rules", rules)
    result = run("quantize", TINY, "-o", out, *options)
    assert result.stdout.startswith("kl=0.1: 4.5")
    recipe = json.loads((out / "fp4pass.json").read_text("utf-8"))["recipe"]
    assert recipe["method"]["name"] == "naive"
    assert recipe["rules"][-2:] == [["model.layers.2.*", None], ["model.layers.3.*", None]]
