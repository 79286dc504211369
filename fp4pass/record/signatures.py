"""The options of a linear layer in the signatures and docstrings of functions that take them."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from .config import OPTIONS, check_options

P = ParamSpec("P")
R = TypeVar("R")

# The line of a docstring that stands for all options, and its indentation.
_OPTIONS_LINE = re.compile(r"^( +)\*\*options: .*(?:\n\1 +.*)*$", re.MULTILINE)


def with_options(function: Callable[P, R]) -> Callable[P, R]:
    """Show the options of a linear layer where a function takes `**options`.

    They stand in its signature, and in its docstring with what they do. An unknown option raises
    OptionError with the nearest known one.
    """
    own = inspect.signature(function).parameters
    shown = [each for each in own.values() if each.kind is not each.VAR_KEYWORD]
    shown += [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
        )
        for each in OPTIONS
        if each.name not in own
    ]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options({key: kwargs[key] for key in kwargs if key not in own}, "")
        return function(*args, **kwargs)

    checked.__doc__ = described(function.__doc__ or "", own)
    checked.__signature__ = inspect.signature(function).replace(parameters=shown)  # type: ignore[attr-defined]
    return checked


def described(docstring: str, known: Collection[str] = ()) -> str:
    """Return a docstring with a line for each option, but those that are known, after `**options`.

    Args:
        docstring: in Google's style; without `**options:` it is returned as it is.
        known: names that the docstring describes itself.
    """

    def listed(match: re.Match[str]) -> str:
        lines = [match[0]]
        for each in OPTIONS:
            if each.name in known:
                continue
            choices = ", ".join(map(str, each.metadata["choices"]))
            text = f"{each.name}: {each.metadata['help']}" + (f" One of {choices}." * bool(choices))
            text += "" if each.default is None else f" Default: {each.default}."
            lines.append(
                textwrap.indent(textwrap.fill(text, 79, subsequent_indent="    "), match[1])
            )
        return "\n".join(lines)

    return _OPTIONS_LINE.sub(listed, docstring)
