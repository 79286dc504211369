"""Private APIs of other libraries, one file for each library.

Private functions, methods and attributes of torch, transformers, accelerate, lm-eval and others are
reached in this package only. It asks for the thing that it needs, not for a version: a library that
is newer than the tested ones is a warning. A `Part` of fp4pass that needs a private thing is off
where that is gone or fails a self-test, which is said once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from packaging.version import Version
from torch import enable_grad, inference_mode

from ..errors import VersionError

_log = logging.getLogger(__name__)


class Tested(NamedTuple):
    """Versions of a library."""

    oldest: str  # the lower bound in pyproject.toml
    newest: str  # the newest that the tests have run with, without the number of its patch
    extra: str = ""  # of fp4pass, which installs it

    def __str__(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


LIBRARIES = {
    "torch": Tested("2.11", "2.15"),
    "triton": Tested("3.6", "3.9"),
    "transformers": Tested("5.17", "5.24", "hf"),
    "accelerate": Tested("1.10", "1.15", "hf"),
    "huggingface_hub": Tested("1.0", "2.4", "hf"),
    "peft": Tested("0.20", "0.21", "peft"),
    "diffusers": Tested("0.40", "0.42", "diffusers"),
    "sentence-transformers": Tested("6.0", "6.2", "sentence-transformers"),
    "lm-eval": Tested("0.4.12", "0.4.13", "eval"),
    "compressed-tensors": Tested("0.20", "0.20", "test"),
}


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, which takes milliseconds the first time."""
    from importlib.metadata import version

    return version(package)


def is_newer(found: str, newest: str) -> bool:
    """Return whether a version is of a later release than the newest that was tested."""
    numbers = Version(newest).release
    return Version(found).release[: len(numbers)] > numbers


def is_older(found: str, oldest: str) -> bool:
    """Return whether a version is too old; a nightly build of the oldest one is not."""
    return Version(Version(found).base_version) < Version(oldest)


def require(package: str) -> None:
    """Raise VersionError unless a library is installed and not too old; warn of an untested one."""
    from importlib.metadata import PackageNotFoundError

    oldest, newest, extra = LIBRARIES[package]
    try:
        found = installed_version(package)
        if not is_older(found, oldest):
            if is_newer(found, newest):
                _warn_newer(package, found)
            return
    except PackageNotFoundError:
        found = "no installation"
    wanted = f"fp4pass[{extra}]" if extra else f"{package}>={oldest}"
    raise VersionError(
        f"{package}: expected version {oldest} or newer, got {found}. "
        f"Run pip install -U '{wanted}'."
    )


@functools.cache
def _warn_newer(package: str, found: str) -> None:
    warnings.warn(
        f"{package} {found} is newer than {LIBRARIES[package].newest}, the newest version that "
        "fp4pass was tested with. `fp4pass doctor` shows what does not work with it.",
        stacklevel=4,
    )


# Raised where a private thing is gone, or became another. Errors of torch are RuntimeErrors, those
# of versions ImportErrors.
FAULTS = (
    *(ImportError, AttributeError, TypeError, LookupError, ValueError, RuntimeError),
    *(AssertionError, OSError),
)


class Part:
    """A part of fp4pass that works by private things of a library."""

    def __init__(self, library: str, name: str, cost: str, test: Callable[[], object]) -> None:
        """test: raises one of FAULTS unless the private things do what is expected of them."""
        self.library, self.name, self.cost, self.test = library, name, cost, test
        self.problem: str | None = None  # why the part is off
        self.is_tested = False

    def works(self) -> bool:
        """Return whether the self-test passes, which runs once."""
        if not self.is_tested:
            # Not in a thread of its own: the second FakeTensorMode of torch 2.11 in one crashes.
            with warnings.catch_warnings(), inference_mode(False), enable_grad():
                warnings.simplefilter("ignore")
                self.attempt(self.test)
            self.is_tested = True
        return self.problem is None

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns that reaches private things; None where they fail."""
        try:
            return call(*args)
        except FAULTS as error:
            if self.problem is None:
                line = str(error).strip().partition("\n")[0]
                self.problem = f"{type(error).__name__}: {line}"
                _log.warning("%s", self)
        return None

    def __str__(self) -> str:
        from importlib.metadata import PackageNotFoundError

        library = self.library
        try:
            library += f" {installed_version(library)}"
        except PackageNotFoundError:
            # Triton comes under other names, too, such as pytorch-triton.
            pass
        return f"{self.name}: off with {library} ({self.problem}). {self.cost}"


# The parts of the files that are imported.
PARTS: list[Part] = []


def all_parts() -> list[Part]:
    """Return the parts of the libraries that are installed."""
    from importlib import import_module
    from importlib.util import find_spec

    for name in ("torch", "inductor", "transformers"):
        import_module(f".{name}", __name__)
    return [each for each in PARTS if find_spec(each.library) is not None]


def part(library: str, name: str, cost: str) -> Callable[[Callable[[], object]], Part]:
    """Register the self-test that this decorates as a part of fp4pass."""

    def register(test: Callable[[], object]) -> Part:
        PARTS.append(Part(library, name, cost, test))
        return PARTS[-1]

    return register


@contextmanager
def needed(library: str) -> Iterator[None]:
    """Raise VersionError where a library, or a private name of it that is read, is missing."""
    require(library)
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise lacking(library, str(error)) from error


def lacking(library: str, what: str) -> VersionError:
    """Return the error for a library without something that nothing replaces."""
    return VersionError(
        f"{library} {installed_version(library)} is not as fp4pass needs it: {what}. "
        f"Run pip install '{library}=={LIBRARIES[library].newest}.*', the newest tested version."
    )


def expect(fact: bool, what: str) -> None:
    """Raise AssertionError in a self-test unless a fact holds."""
    if not fact:
        raise AssertionError(f"a self-test expected {what}")


def callers(module: str) -> Iterator[FrameType]:
    """Yield the frames of all calls that run, the last first, unless a module is not imported."""
    frame = inspect.currentframe() if module in sys.modules else None
    while frame is not None:
        yield frame
        frame = frame.f_back
