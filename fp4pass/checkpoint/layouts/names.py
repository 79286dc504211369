"""Match names and patterns of layers, as the configs of other libraries have them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import OptionError, expected

# The rank of a match of a target and a layer: by name, by pattern, by class, none.
_BY_NAME, _BY_PATTERN, _BY_CLASS, _NO_MATCH = range(4)

# Seconds of this process for one name, a thousand times what the patterns of others take.
_MOST_TIME = 0.02

_BELOW = r"(\..*)?$"

# The parts of a simple pattern, and those of a glob.
_GLOBS = {".*": "*", ".": "?"}


def matches(name: str, targets: Sequence[str]) -> bool:
    """Return whether a linear layer is among targets: names, patterns behind "re:", or Linear."""
    return distance(name, targets) < _NO_MATCH


def distance(name: str, targets: Sequence[str]) -> int:
    """Return how well targets match a layer; less is better."""
    if name in targets:
        return _BY_NAME
    for pattern in (target[3:] for target in targets if target.startswith("re:")):
        try:
            if _compiled(pattern).match(name, timeout=_MOST_TIME) is not None:
                return _BY_PATTERN
        except TimeoutError as error:
            wanted = f"one that matches {name!r} in {_MOST_TIME} s"
            raise OptionError(expected("pattern", wanted, repr(pattern))) from error
    return _BY_CLASS if "Linear" in targets else _NO_MATCH


@functools.lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> Any:
    # Some patterns take exponential time, and Python's own `re` cannot be stopped. Imported here,
    # for that takes longer than any other import of fp4pass.
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise OptionError(f"{pattern!r} is no pattern: {error}.") from error


def below(path: str) -> str:
    """Return the pattern, as compressed-tensors has them, of a module and all below it."""
    return f"re:{re.escape(path)}{_BELOW}"


def as_globs(patterns: Iterable[str]) -> list[str]:
    """Return names and patterns as globs, which ModelOpt's readers match, as far as they can be."""
    found = []
    for pattern in patterns:
        if not pattern.startswith("re:"):
            found.append(pattern)
        elif pattern.endswith(_BELOW):
            path = re.sub(r"\\(.)", r"\1", pattern[3 : -len(_BELOW)])
            found += [path, f"{path}.*"]
        else:
            # Patterns match the start of a name.
            text = f"{pattern[3:].removeprefix('^')}.*".removesuffix("$.*")
            glob = re.sub(r"\.\*|\\?.", lambda each: _GLOBS.get(each[0], each[0][-1]), text)
            found += [glob] if _pattern(glob) == text else []
    return found


def from_globs(globs: Iterable[str]) -> list[str]:
    """Return globs as names and patterns, such as those of `below`."""
    found = []
    for each in globs:
        path = each.removesuffix(".*")
        if not set(path) & set("*?"):
            found.append(each if path == each else below(path))
        else:
            found.append(f"re:{_pattern(each)}$")
    return found


def _pattern(glob: str) -> str:
    return re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")


def is_plain(pattern: str) -> bool:
    """Return whether a pattern is a name, or one of `below`, which every layout can write."""
    return not pattern.startswith("re:") or pattern.endswith(_BELOW)
