"""The page of results: from the JSON alone, and up to date."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"

# A number that is a word of its own: not the 4 of nvfp4 or the 2 of WikiText-2.
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d[\d,]*(?:\.\d+)*(?![\w-])")


@pytest.fixture(scope="module")
def page(script: Any) -> Any:
    """eval/pages/results.py."""
    return script("pages.results")


@pytest.fixture(scope="module")
def counting(script: Any) -> Any:
    """eval/pages/verdicts.py."""
    return script("pages.verdicts")


@pytest.fixture(scope="module")
def cells(script: Any) -> Any:
    """eval/pages/tables.py."""
    return script("pages.tables")


@pytest.fixture(scope="module")
def explorer(script: Any) -> Any:
    """eval/pages/explorer.py."""
    return script("pages.explorer")


def moved(value: Any) -> Any:
    """Other numbers everywhere, and nothing else."""
    if isinstance(value, dict):
        return {key: moved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return 3 * value + 1


def strings(value: Any) -> Iterator[str]:
    """All strings of a JSON, those that name something included."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    if isinstance(value, str):
        yield value


def test_page_is_up_to_date(page: Any) -> None:
    found = page.page(page.load(RESULTS))
    assert (ROOT / "docs" / "results.md").read_text("utf-8") == found, (
        "docs/results.md is not that of eval/results. Run python -m eval.pages.results."
    )


def test_links_lead_somewhere() -> None:
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    headings = {line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in {heading.lower() for heading in headings}, link
            continue
        assert (ROOT / "docs" / link).exists(), link


def test_no_number_is_typed(page: Any, counting: Any) -> None:
    """If all numbers of the JSON move, all numbers of the page do."""
    results = page.load(RESULTS)
    introduction = page.INTRODUCTION.read_text("utf-8")
    pages = [
        page.page(each).removeprefix(introduction).splitlines()
        for each in (results, {k: moved(v) for k, v in results.items()})
    ]
    assert len(pages[0]) == len(pages[1])
    named = set(NUMBER.findall(" ".join(strings(results))))
    # Rows that are counted stay as many: test_verdicts.
    counted = set(itertools.chain(*(counting.verdicts(v).splitlines() for v in results.values())))
    seen = 0
    for line, other in zip(*pages, strict=True):
        if line in counted and line.startswith("| `"):
            continue
        for number, of_other in zip(NUMBER.findall(line), NUMBER.findall(other), strict=True):
            seen += 1
            assert number != of_other or number in named, f"{number} in {line}"
    assert seen > 40


def test_the_table_has_every_row_and_number(page: Any, explorer: Any) -> None:
    """Each measure of each conversion and text, and nothing that is not in the JSON."""
    results = page.load(RESULTS)
    table = json.loads(json.dumps(explorer.explorer(results)))
    assert [model["stem"] for model in table["models"]] == list(results)
    rows = iter(table["rows"])
    pairs = [
        (found, row, text)
        for found in results.values()
        for row in found["rows"]
        for text in row["texts"]
    ]
    for found, row, text in pairs:
        here, shown = row["texts"][text], next(rows)
        assert shown["model"] == found["model"]
        assert shown["text"] == found["texts"][text]["file"]
        assert (shown["format"], shown["block"]) == (row["format"], row["block"])
        assert shown["method"] == row["method"] and shown["bits"] == row["bits"]
        assert (shown["inputs"] == "float") == row["weight_only"]
        for measure in ("kl", "perplexity", "top1"):
            assert shown[measure] == [here[measure][e] for e in ("value", "low", "high")]
        if "naive" in here["against"]:
            change = here["against"]["naive"]["kl"]
            assert shown["kl_to_naive"][0] == change["value"]
            assert shown["kl_to_naive"][3] == change["significant"]
    assert next(rows, None) is None
    other = explorer.explorer({stem: moved(found) for stem, found in results.items()})
    for row, changed in zip(table["rows"], other["rows"], strict=True):
        for key, number in row.items():
            if isinstance(number, float | list):
                assert number != changed[key], key


def test_the_page_asks_for_what_the_table_has(explorer: Any) -> None:
    """The columns of docs/assets/explorer.js are keys of rows."""
    script = (ROOT / "docs" / "assets" / "explorer.js").read_text("utf-8")
    wanted = set(re.findall(r'^\s+\["(\w+)", "', script, re.M)) | {"bits"}
    table = explorer.explorer(explorer.load(RESULTS))
    assert len(wanted) > 9 and wanted <= set().union(*table["rows"])


# ---- made up results --------------------------------------------------------------------------


# What the results are about, but for their command, texts, original and rows.
ABOUT: dict[str, Any] = {
    "machine": "an abacus",
    "versions": {"python": "9.8"},
    "model": "nobody",
    "parameters": 1234567,
    "dtype": "float32",
    "window": 77,
    "calibration": {"file": "calib.txt", "windows": 5, "tokens": 385},
    "output_error_tokens": 154,
    "confidence": 0.875,
}


def value(middle: float, **more: Any) -> dict[str, Any]:
    """A number and its interval."""
    return {"value": middle, "low": middle - 0.25, "high": middle + 0.25, **more}


def made_up(**texts: Any) -> dict[str, Any]:
    """Two methods, one of them really better on one text only."""
    about = {
        "command": "python -m eval.quality.models --made-up",
        **ABOUT,
        "texts": texts,
        "original": {},
    }
    rows = []
    for weight_only, method in itertools.product((True, False), ("naive", "better")):
        row: dict[str, Any] = {
            "format": "nvfp4",
            "block": 16,
            "weight_only": weight_only,
            "method": method,
            "convert_seconds": 2.5,
            "bits": 4.5,
            "weight_error": 0.125,
            "output_error": 0.0625,
            "layer_error": 0.1875,
            "texts": {},
        }
        rows.append(row)
    return {**about, "rows": rows}


def language_results() -> dict[str, Any]:
    text = {"windows": 3, "windows_of_the_file": 9, "tokens": 228, "unit": "document", "units": 2}
    found = made_up(one={"file": "one.txt", **text}, two={"file": "two.txt", **text})
    measures = {"perplexity": value(11.5), "bits_per_byte": value(1.5)}
    found["original"] = {"one": measures, "two": measures}
    for row in found["rows"]:
        for name, real in (("one", True), ("two", False)):
            against = {
                "kl": value(-0.5, significant=real),
                "perplexity_ratio": value(0.5, significant=real),
            }
            row["texts"][name] = {
                **measures,
                "kl": value(0.625),
                "top1": value(0.75),
                "change": {"perplexity_ratio": value(1.25, significant=True)},
                "against": {"naive": against} if row["method"] == "better" else {},
            }
    return found


def write(folder: Path, **results: Any) -> Path:
    folder.mkdir()
    for name, found in results.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(found))
    return folder


def test_made_up_results(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"lm": language_results()}
    # Of other scripts.
    folder = write(tmp_path / "in", **results, kernels={"rows": []}, more={"rows": [{"us": 3}]})
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["results.py", "--results", str(folder), "--docs", str(out)])
    page.main()
    assert {path.name for path in out.iterdir()} == {"results.md", "results-lm.png"}
    text = (out / "results.md").read_text("utf-8")
    assert "eval.quality.models --made-up" in text and "an abacus; python 9.8." in text
    assert "1,234,567 parameters" in text and "88% confidence" in text
    assert "| `better` | `naive` | KL | 2 | 0 | 2 |  |" in text
