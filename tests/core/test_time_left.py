"""The time that is left, learned from what is done."""

from __future__ import annotations

import pytest

from fp4pass.core.time_left import WorkLog

A, B = ("convert", "search", "gptq", "64x64"), ("convert", "search", "gptq", "64x256")
SAVE = ("save", "write")


def test_the_rate_is_that_of_pieces_behind_the_first() -> None:
    log = WorkLog()
    log.expect({A: 40})
    log.add(A, 10, 90.0)
    assert log.left() == (270.0, [])
    log.add(A, 10, 20.0)
    assert log.left() == (40.0, [])


def test_a_kind_goes_by_the_most_similar_one() -> None:
    log = WorkLog()
    log.add(A, 10, 1.0)
    assert log.rate(B) == 0.1
    assert log.rate(("convert", "search", "sse", "64x64")) == 0.1
    assert log.rate(("convert", "run", "observe")) is None
    log.add(B, 10, 5.0)
    assert log.rate(B) == 0.5


def test_stages_without_a_rate_are_named() -> None:
    log = WorkLog()
    log.expect({("calibrate", "batches"): 4})
    log.foresee({A: 1, B: 1, SAVE: 8})
    log.add(("calibrate", "batches"), 1, 2.0)
    assert log.left() == (6.0, ["convert", "save"])
    log.assume({SAVE: 0.5, ("convert", "search"): 3.0})
    assert log.left() == (6.0 + 4.0 + 6.0, [])


def test_what_is_assumed_yields_to_what_is_measured() -> None:
    log = WorkLog()
    log.assume({SAVE: 0.5})
    assert log.rate(SAVE) == 0.5
    log.add(SAVE, 4, 8.0)
    assert log.rate(SAVE) == 2.0


def test_what_was_foreseen_ends_with_the_stage() -> None:
    log = WorkLog()
    log.foresee({A: 100, SAVE: 8})
    log.assume({A: 1.0, SAVE: 1.0})
    log.expect({A: 10})
    assert log.left()[0] == 18.0


@pytest.mark.parametrize("seconds", [5.0, None])
def test_more_than_was_planned_is_not_taken_off_other_work(seconds: float | None) -> None:
    log = WorkLog()
    log.assume({B: 1.0})
    log.expect({A: 1, B: 2})
    log.add(A, 30, seconds)
    assert log.left() == (2.0, [])


def test_what_a_run_before_has_found_says_nothing_of_others() -> None:
    log = WorkLog()
    log.expect({A: 3})
    log.add(A, 1, None)
    assert log.left() == (0.0, ["convert"])
    log.add(A, 1, 4.0)
    assert log.left() == (4.0, [])


def test_a_few_pieces_of_other_kinds_give_no_estimate() -> None:
    log = WorkLog()
    log.expect({A: 10, B: 100})
    log.add(A, 5, 5.0)
    assert log.left() == (105.0, ["convert"])
    # A tenth of the work is enough for a guess, and so is one piece of each kind.
    log.add(A, 5, 6.0)
    assert log.left() == (pytest.approx(100 * 1.2), ["convert"])
    log.add(B, 10, 8.0)
    assert log.left() == (pytest.approx(72.0), [])
    early = WorkLog()
    early.expect({A: 10, B: 20})
    early.add(A, 10, 10.0)
    assert early.left() == (20.0, [])
