"""A clock that stands still but for work that says what it takes, and the screen of a bar."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fp4pass.core.progress import Screen, on_screen


class Watched:
    """A screen, and the clock of what runs on it."""

    def __init__(self, is_terminal: bool, delay: float = 0.0) -> None:
        self.now, self.asked = 0.0, 0
        self.stream = io.StringIO()
        self.screen = Screen(self.stream, is_terminal, self.clock, delay)

    def clock(self) -> float:
        self.asked += 1
        return self.now

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[str]:
        """What a log has."""
        return self.text.splitlines()

    @property
    def drawn(self) -> list[str]:
        """What was on a terminal one after the other, without the bars."""
        assert "\n" not in self.text and "\x1b" not in self.text, "more than one line"
        texts = [re.sub(r" *\|.*", "", each).strip() for each in self.text.split("\r")]
        return [text for text in texts if text]

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(text.partition(":")[0] for text in self.drawn))

    def slow(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        seconds: float | Callable[..., float],
    ) -> None:
        """Have calls of a function take some seconds, or what a function of its arguments says."""
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            self.now += seconds(*args, **kwargs) if callable(seconds) else seconds
            return found

        patch.setattr(owner, name, call)


@contextmanager
def watched(is_terminal: bool = False, delay: float = 0.0) -> Iterator[Watched]:
    found = Watched(is_terminal, delay)
    with on_screen(found.screen):
        yield found
