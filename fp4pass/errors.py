"""Every exception that fp4pass raises, and how options and unknown names are reported."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# The largest integer of 64 bits; no number that is an option is larger.
_LARGEST = (1 << 63) - 1

# The least of numbers that are to be positive.
ABOVE_0 = math.ulp(0.0)


class Fp4PassError(Exception):
    """Base of all errors raised by fp4pass.

    Example:
        >>> try:
        ...     fp4pass.convert(model, "nvpf4")
        ... except fp4pass.Fp4PassError as error:
        ...     print(error)
        fmt: Scheme 'nvpf4' does not exist. Did you mean 'nvfp4'? Known: ...
    """


class OptionError(Fp4PassError, ValueError):
    """A name or an option that does not exist or is out of range."""


class ShapeError(Fp4PassError, ValueError):
    """A tensor whose shape does not fit the format or the layer."""


class DtypeError(Fp4PassError, TypeError):
    """A tensor whose dtype cannot be quantized."""


class NonFiniteError(Fp4PassError, ValueError):
    """NaN or infinity where only finite values can be quantized."""


class RuleError(Fp4PassError, ValueError):
    """A rule that is malformed or matches nothing."""


class CalibrationError(Fp4PassError, RuntimeError):
    """Calibration data is missing, empty or unusable."""


class StateError(Fp4PassError, RuntimeError):
    """A call out of order: converting twice, or without linears to convert."""


class TraceError(Fp4PassError, RuntimeError):
    """A model that torch.export, torch.jit or the export to ONNX cannot capture."""


class CheckpointError(Fp4PassError, RuntimeError):
    """A checkpoint that cannot be written, or that is damaged, foreign or incomplete."""


class UnreadError(CheckpointError):
    """A checkpoint that may be whole, with weights of another library that are not read."""


class RankError(Fp4PassError, RuntimeError):
    """Another process of torch.distributed failed, ended, or did not make the same call."""


class VersionError(Fp4PassError, ImportError):
    """A package that is missing, too old, or without something that fp4pass needs of it."""


class BuildError(Fp4PassError, RuntimeError):
    """Kernels for this CPU that could not be compiled."""


# The flags of the command that runs, on and off, by the names of Python's arguments.
_flags: ContextVar[Mapping[str, tuple[str, str]]] = ContextVar("flags", default={})  # noqa: B039


@contextmanager
def named_as(flags: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Name options as the flags of a command in every error and warning that is made within."""
    token = _flags.set(flags)
    try:
        yield
    finally:
        _flags.reset(token)


def as_option(name: str, value: object = None) -> str:
    """Return an option as its caller writes it: `name='value'`, or `--flag value` in a shell."""
    if name not in _flags.get():
        return f"{name}=" if value is None else f"{name}={value!r}"
    on, off = _flags.get()[name]
    if value is None or value is True:
        return on
    return off if value is False else f"{on} {value}"


def as_rules(*patterns: str, options: Mapping[str, object] | None = None) -> str:
    """Return rules as their caller writes them: `rules=[...]`, or a file for `--rules`."""
    if "rules" in _flags.get():
        lines = json.dumps([{each: options} for each in patterns])
        return f"{as_option('rules')} FILE with {lines}"
    return f"rules={[(each, options) for each in patterns]}"


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def expected(what: str, wanted: str, got: object) -> str:
    """Return the sentence of an error: "WHAT: expected WANTED, got GOT."."""
    return f"{named(what)}: expected {wanted}, got {got if isinstance(got, str) else repr(got)}."


def named(what: str) -> str:
    """Return what an error is about, its option as its caller writes it."""
    name, colon, rest = what.partition(":")
    return f"{as_option(name) if name in _flags.get() else name}{colon}{rest}"


def require_number(
    what: str,
    wanted: str,
    value: Any,
    kind: type = int,
    least: float = -_LARGEST,
    most: float = _LARGEST,
) -> None:
    """Raise OptionError unless a number is an int, or of `kind`, and from `least` to `most`."""
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not (is_number and abs(value) <= _LARGEST and least <= value <= most):
        raise OptionError(expected(what, wanted, repr(value)))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> OptionError:
    """Return the error for a name that is not registered, with the nearest registered one."""
    names = sorted(known)
    hint = nearest(name, names)
    return OptionError(f"{named(kind)} {name!r} does not exist.{hint} Known: {', '.join(names)}.")


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a question that names the nearest of the known names, empty if none is near."""
    lowered = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.4)
    return f" Did you mean {lowered[near[0]]!r}?" if near else ""
