"""What convert, calibrate, save, load and evaluate count on the one bar that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY, language_model, tokens

import fp4pass
from fp4pass.core.progress import Progress
from fp4pass.evaluation import evaluate


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What each shown stage expects and has done, and the places that it names."""
    found: dict[str, list[Any]] = {}
    real_expect, real_step, real_begin = Progress.expect, Progress.step, Progress.begin

    def expect(self: Progress, total: float | None, unit: str, done: int = 0) -> None:
        if self.shows:
            found[self.what] = [total, unit, done, []]
        real_expect(self, total, unit, done)

    def step(self: Progress, units: float = 1) -> None:
        if self.what in found:
            found[self.what][2] += units
        real_step(self, units)

    def begin(self: Progress, place: str) -> None:
        if self.what in found and place not in found[self.what][3]:
            found[self.what][3].append(place)
        real_begin(self, place)

    monkeypatch.setattr(Progress, "expect", expect)
    monkeypatch.setattr(Progress, "step", step)
    monkeypatch.setattr(Progress, "begin", begin)
    return found


LAYERS = [f"layer {i}/4" for i in range(1, 5)]


@pytest.mark.parametrize("by", ["whole", "sequential", "stream"])
def test_each_call_counts_all_of_its_work(
    by: str, tmp_path: Path, counted: dict[str, list[Any]]
) -> None:
    model = language_model()
    ids = tokens(2, 32)
    fp4pass.prepare(model, sequential=by == "sequential")
    fp4pass.calibrate(model, [ids, ids, ids])
    fp4pass.convert(model, "nvfp4a16", stream=tmp_path / "s" if by == "stream" else None)
    fp4pass.save(model, tmp_path / "out")
    fp4pass.load(tmp_path / "out", model=language_model())
    evaluate(model, None, ids, batch_size=1)
    assert counted.pop("calibrate") == [3, "batches", 3, []]
    places = [] if by == "whole" else LAYERS
    assert counted.pop("convert") == [28, "weights", 28, places]
    assert counted.pop("evaluate") == [2, "batches", 2, []]
    assert list(counted) == ["save", "load"]
    for total, _, done, _ in counted.values():
        assert 0 < done <= total


def test_finished_layers_count(tmp_path: Path, counted: dict[str, list[Any]]) -> None:
    for _ in range(2):
        fp4pass.convert(language_model(), "nvfp4a16", "sse", stream=tmp_path / "s")
        assert counted["convert"] == [28, "weights", 28, LAYERS]


def test_one_call_has_stages_and_progress_false_none(
    tmp_path: Path, counted: dict[str, list[Any]]
) -> None:
    options: dict[str, Any] = {"fmt": "nvfp4a16", "device": "cpu", "method": "hessian"}
    fp4pass.quantize_checkpoint(TINY, tmp_path / "a", data=[tokens(2, 32)], **options)
    assert list(counted) == ["calibrate", "convert", "save"]
    counted.clear()
    torch.manual_seed(0)
    fp4pass.quantize_checkpoint(
        TINY, tmp_path / "b", data=[tokens(2, 32)], progress=False, **options
    )
    assert not counted
