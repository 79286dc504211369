"""What convert, calibrate, save, load and evaluate count on the one bar that they have."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from small_models import TINY, language_model, tokens

import fp4pass
from fp4pass.evaluation import evaluate

LINE = re.compile(r"^(\w+)(?:, (.+?))?: ([\d.]+)\w?/([\d.]+)\w?(B| \w+), ", re.M)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The last count of each stage that is shown, and its places: each step takes a minute."""
    monkeypatch.setattr("tqdm.std.time", itertools.count(0.0, 61.0).__next__)

    def read() -> dict[str, tuple[str, list[str]]]:
        found: dict[str, tuple[str, list[str]]] = {}
        for what, place, done, total, unit in LINE.findall(capsys.readouterr().err):
            places = found.get(what, ("", []))[1]
            found[what] = f"{done}/{total}{unit}", [*dict.fromkeys([*places, place])]
        return found

    return read


LAYERS = [f"layer {i}/4" for i in range(1, 5)]


@pytest.mark.parametrize("by", ["whole", "sequential", "stream"])
def test_each_call_counts_all_of_its_work(by: str, tmp_path: Path, stages: Any) -> None:
    model, ids = language_model(), tokens(2, 32)
    fp4pass.prepare(model, sequential=by == "sequential")
    fp4pass.calibrate(model, [ids, ids, ids])
    fp4pass.convert(model, "nvfp4a16", stream=tmp_path / "s" if by == "stream" else None)
    fp4pass.save(model, tmp_path / "out")
    fp4pass.load(tmp_path / "out", model=language_model())
    evaluate(model, None, ids, batch_size=1)
    found = stages()
    assert list(found) == ["calibrate", "convert", "save", "load", "evaluate"]
    assert found["calibrate"][0] == "3/3 batches" and found["evaluate"][0] == "2/2 batches"
    assert found["convert"] == ("28/28 weights", [""] if by == "whole" else LAYERS)
    done, _, total = found["save"][0].partition("/")
    assert total.startswith(done)


def test_finished_layers_count(tmp_path: Path, stages: Any) -> None:
    for _ in range(2):
        fp4pass.convert(language_model(), "nvfp4a16", "sse", stream=tmp_path / "s")
        assert stages()["convert"] == ("28/28 weights", LAYERS)


def test_one_call_has_stages_and_progress_false_none(tmp_path: Path, stages: Any) -> None:
    options: dict[str, Any] = {"fmt": "nvfp4a16", "device": "cpu", "data": [tokens(2, 32)]}
    fp4pass.quantize_checkpoint(TINY, tmp_path / "a", **options)
    assert list(stages()) == ["calibrate", "convert", "save"]
    fp4pass.quantize_checkpoint(TINY, tmp_path / "b", progress=False, **options)
    assert not stages()
