"""The pictures of the pages hold the numbers of the results: panels are compared, not pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).parents[2] / "eval" / "results"


@pytest.fixture
def drawn(script: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The panels of each picture, by its name."""
    found: dict[str, Any] = {}

    def keep(grid: Any, path: Path, **options: Any) -> None:
        found[path.name] = grid

    monkeypatch.setattr(script("pages.figures"), "write_png", keep)
    return found


def test_dots_are_values_and_whiskers_their_intervals(script: Any, drawn: dict[str, Any]) -> None:
    found = script("pages.explorer").load(RESULTS)["tiny-lm"]
    script("pages.figures").draw_results(found, Path(), "tiny-lm")
    seen = 0
    for weight_only, line in zip((True, False), drawn["results-tiny-lm.png"], strict=True):
        for text, panel in zip(found["texts"], line, strict=True):
            assert panel.title.endswith(found["texts"][text]["file"])
            rows = [row for row in found["rows"] if row["weight_only"] == weight_only]
            for series in panel.series:
                mine = [row for row in rows if row["method"] == series.label]
                values = [row["texts"][text]["kl"] for row in mine]
                assert series.x == [value["value"] for value in values]
                assert series.x_ends == [(value["low"], value["high"]) for value in values]
                for row, y in zip(mine, series.y, strict=True):
                    name = f"{row['format']}:{row['block']}"
                    assert abs(panel.categories.index(name) - y) <= 0.31
                    seen += 1
    assert seen == 2 * len(found["rows"])
