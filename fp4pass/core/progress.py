"""One progress bar for a whole call, on stderr: what is done now, how much of it, the time left.

The outermost call owns the bar; calls inside it report to it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import torch.distributed as dist
from tqdm.std import tqdm

from .time_left import Kind, WorkLog

Item = TypeVar("Item")

# Seconds between two drawings of a bar.
_REDRAW = 0.1

# Characters of a line where nobody knows.
_WIDTH = 79

_BAR = "{desc} |{bar:20}|"


@dataclass(frozen=True)
class Screen:
    """The place that bars are drawn at.

    Attributes:
        stream: to write to; None for stderr.
        is_terminal: whether a line can be written over; None to ask the stream.
        clock: returns seconds.
        delay: seconds in which a call shows nothing.
        interval: seconds between two lines where no line can be written over.
    """

    stream: TextIO | None = None
    is_terminal: bool | None = None
    clock: Callable[[], float] = time.monotonic
    delay: float = 2.0
    interval: float = 60.0


_SCREEN: ContextVar[Screen] = ContextVar("_SCREEN", default=Screen())  # noqa: B039, it is frozen


class Progress:
    """One stage of a call, as "convert", on the bar of the whole call."""

    def __init__(self, what: str, bar: _Bar, parent: Progress | None, show: bool) -> None:
        self.what, self._bar = what, bar
        # The stage that the bar names while this one runs.
        self._is_visible: bool = show and (parent is None or parent._is_visible)
        self._shown: Progress = self if parent is None or self._is_visible else parent._shown
        self.place = ""
        self._counts: dict[str, tuple[float, float | None]] = {}

    def expect(
        self,
        costs: Mapping[Kind, float],
        totals: Mapping[str, float | None] | None = None,
        seconds: Mapping[Kind, float] | None = None,
    ) -> None:
        """Say what this stage has to do.

        Args:
            costs: units of work by kind, in any unit that kinds which begin alike share.
            totals: what is counted on the screen, as {"weights": 56}; None for an unknown number.
            seconds: of a unit of a kind, as long as none is measured.
        """
        self._bar.log.assume(self._named(seconds or {}))
        self._bar.log.expect(self._named(costs))
        self._counts |= {name: (0.0, total) for name, total in (totals or {}).items()}

    def foresee(
        self, costs: Mapping[Kind, float], seconds: Mapping[Kind, float] | None = None
    ) -> None:
        """Say what later stages have to do, until they do: kinds begin with their names."""
        self._bar.log.assume(seconds or {})
        self._bar.log.foresee(costs)

    def begin(self, place: str) -> None:
        """Say where the work is, as "layer 3/32"."""
        self.place = place
        self._bar.draw(self._shown)

    def step(
        self,
        kind: Kind,
        units: float = 1.0,
        counts: Mapping[str, float] | None = None,
        is_typical: bool = True,
    ) -> None:
        """Say that a piece is done, which took all the time since the one before.

        Args:
            kind: of the work.
            units: of its cost.
            counts: what is to be added to those of `expect`.
            is_typical: whether others of its kind take as long; else only its units count.
        """
        self._bar.add((self.what, *kind), units, is_typical)
        for name, count in (counts or {}).items():
            done, total = self._counts.get(name, (0.0, None))
            self._counts[name] = (done + count, total)
        self._bar.draw(self._shown)

    def each(self, items: Iterable[Item], unit: str, total: float | None = None) -> Iterator[Item]:
        """Yield the items, which cost the same, and count them."""
        if total is None and isinstance(items, Sized):
            total = len(items)
        self.expect({} if total is None else {(unit,): total}, {unit: total})
        for item in items:
            yield item
            self.step((unit,), counts={unit: 1})

    @property
    def left(self) -> float | None:
        """The seconds that are left of the whole call; None as long as they are not known."""
        seconds, unknown = self._bar.log.left()
        return None if unknown or not self._bar.log.is_planned else seconds

    @property
    def estimate(self) -> float | None:
        """The seconds of the whole call from its begin; None as long as they are not known."""
        return None if self.left is None else self._bar.passed + self.left

    def _named(self, kinds: Mapping[Kind, float]) -> dict[Kind, float]:
        return {(self.what, *kind): each for kind, each in kinds.items()}

    def _text(self, is_line: bool) -> str:
        """Return what is shown; `is_line`: of a log, with the time that has passed."""
        log, passed = self._bar.log, f"{_time(self._bar.passed)} passed"
        counts = [_count(name, *each) for name, each in self._counts.items()]
        seconds, unknown = log.left()
        times = [passed] if is_line else []
        if not log.is_planned or self.what in unknown:
            times = [passed]
        else:
            times.append(f"{_time(seconds)} left")
            times += [f"then {' and '.join(unknown)}"] if unknown else []
        return f"{self.what}: {', '.join(filter(None, (self.place, *counts, *times)))}"


class _Line(tqdm):
    # No thread: only what happens is drawn.
    monitor_interval = 0


class _Bar:
    """The bar of a whole call, on a terminal, or a line a minute elsewhere."""

    def __init__(self, screen: Screen, show: bool) -> None:
        self.log, self._screen = WorkLog(), screen
        self._stream = sys.stderr if screen.stream is None else screen.stream
        self._shows = show and self._stream is not None and _is_first()
        self._begin = self._last = screen.clock()
        rewrites = screen.is_terminal
        self._rewrites = _rewrites(self._stream) if rewrites is None else rewrites
        self._next = self._begin + (screen.delay if self._rewrites else screen.interval)
        self._line: Any = None

    @property
    def passed(self) -> float:
        return self._screen.clock() - self._begin

    def add(self, kind: Kind, units: float, is_typical: bool) -> None:
        now = self._screen.clock()
        self.log.add(kind, units, now - self._last if is_typical else None)
        self._last = now

    def skip(self) -> None:
        """Have the time since the last piece be that of none."""
        self._last = self._screen.clock()

    def draw(self, stage: Progress) -> None:
        if not self._shows or not stage.what or self._screen.clock() < self._next:
            return
        if self._rewrites:
            self._draw_line(stage)
        else:
            print(stage._text(True), file=self._stream, flush=True)
        wait = _REDRAW if self._rewrites else self._screen.interval
        self._next = self._screen.clock() + wait

    def _draw_line(self, stage: Progress) -> None:
        text, left = stage._text(False), stage.left
        passed = self.passed
        whole = passed + (left or 0.0)
        done, form = passed / whole if whole else 0.0, "{desc}" if left is None else _BAR
        if self._line is None:
            options: dict[str, Any] = {"file": self._stream, "leave": False, "total": 1.0}
            # Of a terminal that does not know its size tqdm would take none to be there.
            options |= {"ncols": _columns(self._stream), "nrows": 2}
            self._line = _Line(initial=done, desc=text, bar_format=form, **options)
            return
        self._line.bar_format, self._line.n = form, done
        self._line.ncols = _columns(self._stream)
        self._line.set_description_str(text)

    def clear(self) -> None:
        """Leave an empty line until something is drawn."""
        self.skip()
        if self._line is not None:
            self._line.clear()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


_CURRENT: ContextVar[Progress | None] = ContextVar("_CURRENT", default=None)


def current() -> Progress:
    """Return the stage of the call that runs; one that nobody sees outside of any."""
    return _CURRENT.get() or Progress("", _Bar(_SCREEN.get(), False), None, True)


@contextmanager
def shown(what: str, show: bool = True) -> Iterator[Progress]:
    """Run a stage of a call, or the whole one, and show it.

    Args:
        what: in a word, as "convert"; "" for what has no work but that of the calls inside.
        show: whether it is shown; inside of a call that is not shown it never is.
    """
    parent = _CURRENT.get()
    stage = _stage(what, parent, show)
    token = _CURRENT.set(stage)
    try:
        yield stage
    finally:
        _CURRENT.reset(token)
        _end(stage, parent)


def track(
    items: Iterable[Item],
    description: str,
    total: float | None = None,
    unit: str = "batches",
    show: bool = True,
) -> Iterator[Item]:
    """Yield the items of a loop, and show how many are done.

    Args:
        items: of the loop.
        description: what is done with them, in a word, as "sample".
        total: their number; by default that of a list or the like, else it is not known.
        unit: what they are, as counted on the screen.
        show: as for `shown`.
    """
    parent = _CURRENT.get()
    stage = _stage(description, parent, show)
    try:
        yield from stage.each(items, unit, total)
    finally:
        _end(stage, parent)


def _stage(what: str, parent: Progress | None, show: bool) -> Progress:
    bar = _Bar(_SCREEN.get(), show) if parent is None else parent._bar
    bar.skip()
    return Progress(what, bar, parent, show)


def _end(stage: Progress, parent: Progress | None) -> None:
    # A line printed between two stages needs an empty one.
    if parent is None:
        stage._bar.close()
    else:
        stage._bar.clear()


@contextmanager
def on_screen(screen: Screen) -> Iterator[None]:
    """Have the calls in the body use another screen."""
    token = _SCREEN.set(screen)
    try:
        yield
    finally:
        _SCREEN.reset(token)


@contextmanager
def above_bar() -> Iterator[None]:
    """Take the bar off the terminal while the body prints, and draw it again."""
    with tqdm.external_write_mode(file=sys.stderr):
        yield


def _is_first() -> bool:
    """Return whether this is the process that speaks for all."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")


def _rewrites(stream: Any) -> bool:
    """Return whether a line of a stream can be written over: on terminals and in notebooks."""
    if stream is None:
        return False
    return type(stream).__module__.startswith("ipykernel") or stream.isatty()


def _columns(stream: Any) -> int:
    """Return the width of a line, also for terminals that do not know theirs."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns - 1 if columns > 1 else _WIDTH


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _count(name: str, done: float, total: float | None) -> str:
    """Return a count, as "12/56 weights" or "1.2/3.4 GB"."""
    if name == "bytes" and total is not None:
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        return f"{done / size:.1f}/{total / size:.1f} {unit}"
    return f"{done:.0f} {name}" if total is None else f"{done:.0f}/{total:.0f} {name}"
