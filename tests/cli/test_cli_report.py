"""fp4pass report: what it writes for folders, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import EVAL, run, run_json
from small_models import TINY

for package in ("transformers", "datasets", "yaml", "jinja2"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")


TEXT = ("--data", EVAL, "--samples", 3, "--seq-len", 64)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(*args: object) -> str:
    result = run("report", *args, code=2)
    assert not result.stdout
    return result.stderr


def test_a_page_of_a_folder(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "r.html"
    result = run("report", made / "mixed", "-o", page)
    assert result.stdout == (
        f"{page}: 22 layers at 4.42 bits, 3.65 MB, 50% of 7.35 MB before\nbeside it: r.json\n"
    )
    assert not result.stderr
    assert files(page.parent) == ["r.html", "r.json"]
    data = json.loads(page.with_suffix(".json").read_text())
    assert data["source"] == "mixed" and data["evaluations"] == []
    assert run_json("report", made / "mixed", "-o", page, "--overwrite") == data
    assert f"{page}, {page.with_suffix('.json')}" in refused(made / "mixed", "-o", page)


@pytest.mark.slow
def test_texts_are_measured_as_eval_does(made: Path, tmp_path: Path) -> None:
    options = ("--reference", TINY, *TEXT)
    found = run_json("eval", made / "inputs", *options)
    data = run_json("report", made / "inputs", "-o", tmp_path / "r.html", *options)
    assert data["evaluations"] == [{**row, "text": EVAL.name} for row in found["texts"]]
    assert data["unknown"] == []
    assert files(tmp_path) == ["r.html", "r.json"]


def test_every_mistake_is_one_line_and_written_nowhere(made: Path, tmp_path: Path) -> None:
    page: tuple[object, ...] = ("-o", tmp_path / "r.html")
    mixed: Any = made / "mixed"
    cases: list[tuple[tuple[object, ...], str]] = [
        ((TINY, *page), "is not quantized: it has neither fp4pass.json nor"),
        ((mixed, "-o", tmp_path), "expected a name that ends in .html"),
        ((mixed, *page, "--reference", mixed), "is quantized already: expected a float model"),
        ((mixed, *page, "--data", "no.txt"), "no.txt does not exist"),
        ((tmp_path / "none", *page), "none is not a folder"),
        ((mixed, *page, "--batch-size", 0), "--batch-size: expected at least 1, got 0"),
    ]
    for args, message in cases:
        text = refused(*args)
        assert message in text and text.count("\n") == 1, (args, text)
    assert files(tmp_path) == []
