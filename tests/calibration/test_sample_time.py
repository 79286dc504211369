"""The time of sampling is that of the batches that are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import language_model

from fp4pass.calibration import sample_time
from fp4pass.calibration.sample_time import sampling_seconds
from fp4pass.calibration.turns import Script

pytest.importorskip("transformers")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five windows of a text and three of a chat, at most two at once; a step takes its rows."""
    found = [(Script((0,), frozenset()), 5), (Script((0,), frozenset()), 3)]
    monkeypatch.setattr(sample_time, "scripts_of", lambda *args: found)
    monkeypatch.setattr(sample_time, "rows_at_once", lambda *args: 2)


@pytest.mark.usefixtures("scripts")
def test_each_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def step(model: Any, rows: int, length: int, device: torch.device) -> float:
        asked.append((rows, length))
        return float(rows)

    monkeypatch.setattr(sample_time, "_step_seconds", step)
    # Three batches of two, and two of two.
    assert sampling_seconds(language_model(), None, 8 * 16, 16) == (3 + 2) * 16 * 2.0
    assert asked == [(2, 8), (2, 8)]


@pytest.mark.usefixtures("scripts")
def test_steps_are_run_or_the_time_is_not_known() -> None:
    model = language_model()
    assert (sampling_seconds(model, None, 8 * 16, 16) or 0.0) > 0.0
    model.forward = None
    assert sampling_seconds(model, None, 8 * 16, 16) is None
