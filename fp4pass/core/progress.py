"""Show one progress bar for a whole call on stderr: a stage, its count, the time left.

The outermost stage that counts owns the bar; stages inside of it are silent.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm.std import tqdm

Item = TypeVar("Item")

# Seconds in which nothing is shown, and between two lines where no line can be written over.
_DELAY, _INTERVAL = 2.0, 60.0


class _Bar(tqdm):
    """A bar without a thread, whose time left is that of the mean."""

    monitor_interval = 0


class _Lines(_Bar):
    """A bar as lines of a log."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if msg is None:
            print(self, file=sys.stderr, flush=True)
        return True


class Progress:
    """A stage of a call, as "convert"."""

    def __init__(self, what: str, show: bool, parent: Progress | None = None) -> None:
        self.what, self.parent = what, parent
        self.shows: bool = show and (parent is None or parent.shows)
        self.bar: Any = None
        self._done: float = 0

    def expect(self, total: float | None, unit: str) -> None:
        """Begin to count; total: how many units there are, None for an unknown number."""
        self.close()
        outer = self.parent
        while outer is not None and outer.bar is None:
            outer = outer.parent
        if outer is not None or not self.shows or sys.stderr is None or not _is_first():
            return
        options: dict[str, Any] = {"total": total, "desc": self.what, "unit": f" {unit}"}
        options |= {"smoothing": 0, "miniters": 0, "leave": False}
        if unit == "bytes":
            options |= {"unit": "B", "unit_scale": True}
        self._done = 0
        if sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"):
            self.bar = _Bar(delay=_DELAY, dynamic_ncols=True, **options)
        else:
            line = "{desc}: {n_fmt}{unit}, {elapsed} passed"
            if total is not None:
                line = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed} passed, {remaining} left"
            times = {"delay": _INTERVAL, "mininterval": _INTERVAL}
            self.bar = _Lines(file=io.StringIO(), bar_format=line, **times, **options)

    def begin(self, place: str) -> None:
        """Say where the work is, as "layer 3/32"."""
        if self.bar is not None:
            text = ", ".join(filter(None, (self.what, place)))
            self.bar.set_description_str(text, refresh=False)
            self.bar.update(0)

    def step(self, units: float = 1) -> None:
        """Count units as done."""
        self._done += units
        if self.bar is not None:
            self.bar.update(round(self._done) - self.bar.n)

    def each(self, items: Iterable[Item], unit: str, total: int | None = None) -> Iterator[Item]:
        """Yield the items, and count them."""
        self.expect(len(items) if total is None and isinstance(items, Sized) else total, unit)
        for item in items:
            yield item
            self.step()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None


_CURRENT: ContextVar[Progress | None] = ContextVar("_CURRENT", default=None)


def current() -> Progress:
    """Return the stage that runs; one that nobody sees outside of any."""
    return _CURRENT.get() or Progress("", False)


@contextmanager
def shown(what: str, show: bool = True) -> Iterator[Progress]:
    """Run a stage of a call, or the whole one ("" if it only has stages), and show its counts."""
    stage = Progress(what, show, _CURRENT.get())
    token = _CURRENT.set(stage)
    try:
        yield stage
    finally:
        _CURRENT.reset(token)
        stage.close()


def track(
    items: Iterable[Item], description: str, unit: str = "batches", show: bool = True
) -> Iterator[Item]:
    """Yield the items of a loop, and show how many are done."""
    stage = Progress(description, show, _CURRENT.get())
    try:
        yield from stage.each(items, unit)
    finally:
        stage.close()


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
