"""The pages of architectures have what the results have, and these what the readers' page says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    found = json.loads((ROOT / "eval" / "results" / "architectures.json").read_text("utf-8"))
    return {row["kind"]: row for row in found["rows"] if row.get("formats")}


@pytest.fixture(scope="module")
def made(script: Callable[[str], ModuleType]) -> dict[str, str]:
    return script("pages.architectures").pages()


def test_the_counts_are_those_of_the_page_of_readers(rows: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "readers.md").read_text("utf-8")
    heads = ("equal", "equal: dequantized", "own layout", "said", "raises")
    for case in ("nvfp4", "mxfp4", "nvfp4, experts mxfp4"):
        outcomes = [
            row["formats"][case]["outcome"] for row in rows.values() if case in row["formats"]
        ]
        counts = [sum(each.startswith(head) for each in outcomes) for head in heads]
        line = [case, len(outcomes), *counts]
        assert f"\n| {' | '.join(map(str, line))} |\n" in page, line


def test_the_page_of_readers_names_the_types_that_it_warns_of(rows: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "readers.md").read_text("utf-8")
    heads = {"equal: dequantized": "| transformers loads them dense, by `dequantize` |"}
    found = {each["outcome"] for row in rows.values() for each in row["formats"].values()}
    for said in (each for each in found if each.startswith("said: it ")):
        heads[said] = f"| `save` warns that transformers {said.removeprefix('said: it ')} |"
    for outcome, head in heads.items():
        (line,) = (each for each in page.splitlines() if each.startswith(head))
        kinds = {
            kind
            for kind, row in rows.items()
            if any(each["outcome"] == outcome for each in row["formats"].values())
        }
        assert set(re.findall("`(.+?)`", line.removeprefix(head))) == kinds, outcome


def test_every_type_has_a_page_and_a_line(rows: dict[str, Any], made: dict[str, str]) -> None:
    assert made.keys() == {"architectures.md", *(f"architectures/{kind}.md" for kind in rows)}
    linked = re.findall(
        r"^\| \[`(.+?)`\]\(architectures/\1\.md\) \|", made["architectures.md"], re.MULTILINE
    )
    assert sorted(linked) == sorted(rows)


def test_a_page_has_all_that_was_found(rows: dict[str, Any], made: dict[str, str]) -> None:
    for kind, row in rows.items():
        page = made[f"architectures/{kind}.md"]
        assert "fp4pass quantize MODEL" in page or row["command"] in page
        for name, count in row["packed"].items():
            assert f"| `{name}` | {count} |" in page
        for name, count, _ in row["skipped"]:
            assert f"| `{name}` | {count} | " in page
        lines = [line for line in page.split("## Who reads")[1].splitlines() if "a16`" in line]
        assert len(lines) == len(row["formats"]), kind
        for line, each in zip(lines, row["formats"].values(), strict=True):
            reads = Counter(each["readers"])
            assert ("yes: every" in line or "yes, as a float" in line) == reads["transformers"], (
                kind
            )
            assert line.count("its loader reads") == reads["vLLM"] + reads["SGLang"], kind
