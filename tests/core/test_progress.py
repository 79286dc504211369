"""The bar of a call: what it shows, where and when; calls inside it have no bar of their own."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import tqdm.std
from screens import watched

from fp4pass.core import progress
from fp4pass.core.progress import Screen, above_bar, current, on_screen, shown, track


def test_a_log_gets_a_line_a_minute() -> None:
    with watched() as seen:
        for _ in track(range(8), "check", unit="layers"):
            seen.now += 25
    assert seen.lines == [
        "check: 3/8 layers, 1:15 passed, 2:05 left",
        "check: 6/8 layers, 2:30 passed, 0:50 left",
    ]


def test_a_log_gets_nothing_in_the_first_minute() -> None:
    with watched() as seen:
        for _ in track(range(11), "check"):
            seen.now += 5
    assert seen.text == ""


def test_a_terminal_gets_one_line_that_goes_away() -> None:
    with watched(is_terminal=True) as seen:
        for _ in track(iter("ab"), "check", 4, "layers"):
            seen.now += 2
        assert seen.drawn == ["check: 1/4 layers, 0:06 left", "check: 2/4 layers, 0:04 left"]
    last = seen.text.split("\r")
    assert last[-1] == "" and last[-2].strip() == "" and last[-2]


def test_short_calls_show_nothing() -> None:
    with watched(is_terminal=True, delay=2.0) as seen:
        for _ in track(range(19), "check"):
            seen.now += 0.1
    assert seen.text == ""
    assert Screen().delay == 2.0


def test_without_a_number_of_items_the_time_that_passed_is_shown() -> None:
    with watched(is_terminal=True) as seen:
        for _ in track(iter("ab"), "sample", unit="texts"):
            seen.now += 61
    assert seen.drawn == ["sample: 1 texts, 1:01 passed", "sample: 2 texts, 2:02 passed"]


def test_hours_and_gigabytes() -> None:
    with watched(is_terminal=True) as seen, shown("save") as bar:
        bar.expect({("write",): 4e9}, {"bytes": 4e9})
        seen.now += 3600
        bar.step(("write",), 1.2e9, {"bytes": 1.2e9})
    assert seen.drawn == ["save: 1.2/4.0 GB, 2:20:00 left"]


def test_a_terminal_is_drawn_at_most_ten_times_a_second() -> None:
    with watched(is_terminal=True) as seen:
        for _ in track(range(1000), "check"):
            seen.now += 0.002
    assert 15 <= len(seen.drawn) <= 21


def test_calls_inside_report_to_the_outer_bar() -> None:
    with watched(is_terminal=True) as seen, shown("quantize") as outer:
        outer.foresee({("convert", "search"): 2.0})
        with shown("calibrate") as bar:
            for _ in bar.each(range(2), "batches"):
                seen.now += 1
        with shown("convert") as bar:
            bar.begin("layer 1/2")
            bar.expect({("search",): 2.0}, {"weights": 2})
            for place in ("layer 1/2", "layer 2/2"):
                bar.begin(place)
                seen.now += 3
                bar.step(("search",), counts={"weights": 1})
                for _ in track(range(1), "inner"):
                    pass
    assert seen.drawn == [
        "calibrate: 1/2 batches, 0:01 left, then convert",
        "calibrate: 2/2 batches, 0:00 left, then convert",
        "convert: layer 1/2, 1/2 weights, 0:03 left",
        "convert: layer 2/2, 2/2 weights, 0:00 left",
    ]


def test_the_bar_counts_the_whole_call() -> None:
    with watched(is_terminal=True) as seen, shown("quantize") as outer:
        outer.foresee({("save", "write"): 10.0}, {("save", "write"): 1.0})
        with shown("convert") as bar:
            bar.expect({("search",): 2.0})
            seen.now += 5
            bar.step(("search",))
            assert (outer.left, outer.estimate) == (15.0, 20.0)
    # A quarter of 20 characters.
    assert "|#####               |" in seen.text


def test_there_is_no_estimate_before_something_is_known() -> None:
    with watched(), shown("convert") as bar:
        assert bar.estimate is None
        bar.expect({("search",): 2.0})
        assert bar.estimate is None
    with watched(), shown("convert") as bar:
        bar.expect({("search",): 2.0}, seconds={("search",): 4.0})
        assert bar.estimate == 8.0


@pytest.mark.parametrize("show", [(False, True), (False, False)])
def test_what_is_not_shown_hides_what_is_inside(show: tuple[bool, bool]) -> None:
    with watched(is_terminal=True) as seen, shown("outer", show[0]), shown("inner", show[1]) as bar:
        seen.now += 5
        bar.step(("x",))
    assert seen.text == ""


def test_a_hidden_call_inside_leaves_the_outer_text() -> None:
    with watched(is_terminal=True) as seen, shown("outer") as outer, shown("inner", False) as bar:
        seen.now += 5
        bar.step(("x",))
        assert outer is not current()
    assert seen.drawn == ["outer: 0:05 passed"]


def test_interrupting_leaves_a_clean_line() -> None:
    with watched(is_terminal=True) as seen:
        with pytest.raises(KeyboardInterrupt), shown("convert") as bar:
            seen.now += 5
            bar.step(("x",))
            raise KeyboardInterrupt
        assert seen.text.endswith("\r") and not seen.text.split("\r")[-2].strip()
        assert current().what == ""


def test_other_processes_than_the_first_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with watched() as seen:
        for _ in track(range(3), "check"):
            seen.now += 100
    assert seen.text == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo terminals")
@pytest.mark.parametrize(("columns", "width"), [(0, 79), (30, 29)])
def test_a_line_fits_the_terminal_or_one_of_unknown_width(
    columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl
    import os
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    clock = count(step=9).__next__
    with os.fdopen(theirs, "w") as stream, on_screen(Screen(clock=clock)):
        monkeypatch.setattr(sys, "stderr", stream)
        for _ in track(range(3), "a rather long word"):
            pass
        text = os.read(ours, 10000).decode()
    os.close(ours)
    drawn = [each for each in text.split("\r") if each.strip()]
    assert drawn[0].startswith("a rather long word: 1/3 batch")
    assert max(map(len, drawn)) == min(
        width, len("a rather long word: 1/3 batches, 0:54 left ") + 22
    )


def test_news_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(is_terminal=True) as seen, shown("convert") as bar:
        monkeypatch.setattr(sys, "stderr", seen.stream)
        seen.now += 5
        bar.step(("x",))
        with above_bar():
            print("news", file=sys.stderr)
    before, after = seen.text.split("news\n")
    assert before.endswith("\r") and "convert: 0:05 passed" in after


def test_a_program_without_stderr_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    now = iter(range(0, 10000, 100))
    with on_screen(Screen(clock=lambda: float(next(now)))):
        assert list(track("ab", "check")) == ["a", "b"]


def test_the_screen_of_a_notebook_is_written_over() -> None:
    kind = type("OutStream", (), {"__module__": "ipykernel.iostream", "isatty": lambda self: False})
    assert progress._rewrites(kind())
    assert not progress._rewrites(io.StringIO())


def test_bars_are_plain_text_without_a_thread() -> None:
    assert issubclass(progress._Line, tqdm.std.tqdm)
    before = threading.active_count()
    with watched(is_terminal=True) as seen:
        for _ in track(range(2), "check"):
            seen.now += 5
            assert threading.active_count() == before


def test_uneven_work_is_estimated_from_its_first_tenth() -> None:
    """Ten layers of three shapes, whose time grows faster than their size."""
    shapes: list[tuple[str, float]] = [("a", 1.0), ("b", 2.7), ("c", 2.7), ("d", 9.0)] * 30
    law: Callable[[float], float] = lambda size: size**1.5  # noqa: E731
    whole = sum(law(size) for _, size in shapes)
    costs: dict[tuple[str, ...], float] = {}
    for name, size in shapes:
        costs[("search", name)] = costs.get(("search", name), 0.0) + size
    errors: dict[float, Any] = {}
    with watched() as seen, shown("convert") as bar:
        bar.expect(costs)
        for i, (name, size) in enumerate(shapes):
            # The first one warms up.
            seen.now += law(size) + (20.0 if i == 0 else 0.0)
            bar.step(("search", name), size)
            errors[seen.now / whole] = bar.estimate
    tenth = next(value for share, value in errors.items() if share >= 0.1)
    assert tenth == pytest.approx(whole + 20.0, rel=0.05)
