"""The bar of a call: what it shows, where and when; calls inside it have no bar of their own."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from fp4pass.core.progress import above_bar, current, shown, track


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.now = is_terminal, 1000.0

    def isatty(self) -> bool:
        return self.is_terminal


def on_screen(monkeypatch: pytest.MonkeyPatch, is_terminal: bool = True) -> Screen:
    """Return a new stderr with the clock that tqdm reads."""
    made = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr("tqdm.std.time", lambda: made.now)
    return made


@pytest.mark.core
def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch, is_terminal=False)
    for _ in track(range(8), "check", unit="layers"):
        screen.now += 25
    assert screen.getvalue().splitlines() == [
        "check: 3/8 layers, 01:15 passed, 02:05 left",
        "check: 6/8 layers, 02:30 passed, 00:50 left",
    ]


def test_a_terminal_gets_one_line_that_goes_away_and_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    before = threading.active_count()
    with shown("convert") as bar:
        bar.expect(4, "weights")
        for i in range(2):
            bar.begin(f"layer {i + 1}/2")
            screen.now += 3
            bar.step()
            assert threading.active_count() == before
        with above_bar():
            print("news", file=sys.stderr)
    above, below = screen.getvalue().split("news\n")
    assert "convert, layer 1/2:  25%" in above and "| 1/4 [00:03<00:09," in above
    assert above.endswith("\r") and "\n" not in above + below
    assert below.endswith("\r") and not below.split("\r")[-2].strip()


def test_short_calls_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    for _ in track(range(19), "check"):
        screen.now += 0.1
    assert screen.getvalue() == ""


def test_bytes_and_unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch, is_terminal=False)
    with shown("save") as bar:
        bar.expect(4e9, "bytes")
        screen.now += 60
        bar.step(1.2e9)
    for _ in track(iter("a"), "sample", unit="texts"):
        screen.now += 61
    assert screen.getvalue().splitlines() == [
        "save: 1.20G/4.00GB, 01:00 passed, 02:20 left",
        "sample: 1 texts, 01:01 passed",
    ]


def test_the_outermost_stage_that_counts_has_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch, is_terminal=False)
    with shown(""):
        for what in ("calibrate", "convert"):
            with shown(what) as bar:
                for _ in bar.each(range(1), "weights"):
                    for _ in track(range(2), "inner"):
                        screen.now += 60
                    assert current() is bar
    assert [line[:9] for line in screen.getvalue().splitlines()] == ["calibrate", "convert: "]


@pytest.mark.parametrize("silent", ["progress=False", "another process", "no stderr"])
def test_what_is_not_shown(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    monkeypatch.setenv("RANK", "1" if silent == "another process" else "0")
    if silent == "no stderr":
        monkeypatch.setattr(sys, "stderr", None)
    with shown("outer", silent != "progress=False"), shown("inner") as bar:
        for _ in bar.each(range(3), "batches"):
            screen.now += 100
    assert screen.getvalue() == ""


def test_interrupting_leaves_a_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with pytest.raises(KeyboardInterrupt), shown("convert") as bar:
        bar.expect(4, "weights")
        screen.now += 5
        bar.step()
        raise KeyboardInterrupt
    assert screen.getvalue().endswith("\r") and current().what == ""
