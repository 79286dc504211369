"""docs/peers.md and the table of caches say what is in eval/results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page(script: Callable[[str], ModuleType]) -> Any:
    return script("pages.peers")


def test_the_page_is_up_to_date(page: Any) -> None:
    found = page.load(ROOT / "eval" / "results" / "peers-quality")
    assert found, "there are no results"
    assert (ROOT / "docs" / "peers.md").read_text() == page.page(found)


def row(library: str, run: str, name: str, kl: float, change: float | None) -> dict[str, Any]:
    value = {"value": kl, "low": kl / 2, "high": kl * 2}
    measured: dict[str, Any] = {"kl": value, "perplexity": value}
    if change is not None:
        ends = {"low": change, "high": change, "significant": True}
        measured["change"] = {"kl": {"value": change, **ends}}
    kinds = {"W4A16": {"eval": measured}, "W4A4": {"eval": measured}}
    cost = {"cpu_seconds": 3.0, "peak_mb": 100.0}
    return {"format": "nvfp4", "library": library, "run": run, "name": name, **kinds, **cost}


def test_a_better_peer_and_what_was_not_run_are_named(page: Any) -> None:
    rows = [
        row("fp4pass", "nvfp4 gptq", "gptq", 0.2, None),
        row("auto-round", "NVFP4 50", "50 iterations", 0.1, -0.1),
        row("llmcompressor", "NVFP4A16 rtn default", "RTN", 0.4, 0.2),
    ]
    better = "\n".join(page.better(rows, "nvfp4"))
    assert "auto-round, 50 iterations: eval, weights only" in better
    assert "RTN" not in better
    assert "No other library" in "\n".join(page.better(rows[::2], "nvfp4"))
    left = "\n".join(page.not_run({"rows": rows}))
    assert "1000 iterations, 4-bit inputs" in left and "llmcompressor in nvfp4: RTN, " in left
    assert "RTN;" not in left and "mxfp4" not in left
    lines = "\n".join(page.of_format(rows, "nvfp4", "eval.txt", "eval")).splitlines()
    names = [line.split(" | ")[1] for line in lines if line.startswith("| ")][-3:]
    assert names == ["50 iterations", "gptq", "RTN"]
