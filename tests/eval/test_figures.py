"""The pictures of the pages hold the numbers of the results: panels are compared, not pixels."""

from __future__ import annotations

import json
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

    monkeypatch.setattr(script("figures"), "write_png", keep)
    return found


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_dots_are_values_and_whiskers_their_intervals(script: Any, drawn: dict[str, Any]) -> None:
    found = script("results_page").load(RESULTS)["tiny-lm"]
    script("figures").draw_results(found, Path(), "tiny-lm")
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
    grid = drawn["results-tiny-lm-layers.png"]
    first = grid[0][0].series[0]
    errors = {row["layer"]: row for row in found["layers"]["rows"] if row["method"] == first.label}
    name = f"model.layers.{first.x[2]}.{grid[0][0].title}"
    same = [row for row in found["layers"]["rows"] if row["layer"] == name]
    same = [row for row in same if (row["format"], row["block"]) == ("nvfp4", 16)]
    (row,) = (row for row in same if row["method"] == first.label)
    assert name in errors and first.y[2] == 100 * row["output_error"]


def test_hollow_steps_are_those_that_do_not_help(script: Any, drawn: dict[str, Any]) -> None:
    page, found = script("steps_page"), read("steps/doclm-qwen3-17m")

    def outcome(row: Any, text: str) -> str:
        return page.outcome(row, text, "kl")

    script("figures").draw_steps(found, Path(), "lm", outcome)
    (nvfp4, _), _ = drawn["steps-lm.png"]
    rows = {row["method"]: row for row in page.chosen(found, "nvfp4", True)}
    assert nvfp4.categories == list(rows)
    hollow: dict[str, set[str]] = {text: set() for text in found["texts"]}
    for series, text in zip(
        nvfp4.series, (t for t in found["texts"] for _ in range(2)), strict=True
    ):
        for x, y in zip(series.x, series.y, strict=True):
            method = nvfp4.categories[round(y)]
            assert x == rows[method]["texts"][text]["kl"]["value"]
            if series.hollow:
                hollow[text].add(method)
    for text, methods in hollow.items():
        assert methods == {m for m, r in rows.items() if outcome(r, text) not in ("better", "")}
    assert any(hollow.values())
    errors, *kl = drawn["steps-lm-sweep.png"][0]
    swept = [row for row in found["rows"] if "sweep" in row]
    assert sum(len(series.x) for series in errors.series) == 2 * len(swept)
    assert {y for series in errors.series for y in series.y} == {
        100 * row[key] for row in swept for key in ("output_error", "calibrated_error")
    }
    for text, panel in zip(found["texts"], kl, strict=True):
        values = {row["texts"][text]["kl"]["value"] for row in swept}
        assert {y for series in panel.series for y in series.y} == values


def test_errors_of_layers_and_offsets_of_scales(script: Any, drawn: dict[str, Any]) -> None:
    result = read("layers-tiny-lm")
    script("figures").draw_layer_errors(result, Path("layers.png"))
    panels = [panel for line in drawn["layers.png"] for panel in line if panel]
    rows = [row for row in result["rows"] if row["format"] == "nvfp4" and row["method"] == "sse"]
    for panel, key in zip(panels, ("output_error", "w4a4_error"), strict=False):
        wanted = []
        for block in (32, 16):
            errors = [row[key] for row in rows if row["block"] == block]
            wanted.append(100 * sum(errors) / len(errors))
        assert any(series.y == pytest.approx(wanted) for series in panel.series if len(series.y))
    (offsets,) = (panel for panel in panels if panel.title == "nvfp4, blocks of 16")
    assert all(sum(bars.lengths) == pytest.approx(100) for bars in offsets.series)
    blocks = [row["offsets"] for row in rows if row["block"] == 16]
    zero = sum(each.get("0", 0) for each in blocks) / sum(sum(each.values()) for each in blocks)
    assert any(100 * zero == pytest.approx(share) for share in offsets.series[0].lengths)
