"""Private APIs of other libraries, one file for each library.

Private functions, methods and attributes of torch, transformers, accelerate, lm-eval and others are
reached in this package only. Each file states the range of versions that it was tested with, so
that another version is an error with a remedy, and not an AttributeError somewhere else.
"""

from __future__ import annotations

import functools

from ..errors import VersionError


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, which takes milliseconds the first time."""
    from importlib.metadata import version

    return version(package)


def require_version(package: str, versions: str, *, extra: str | None = None) -> None:
    """Raise VersionError unless a package of PyPI is installed in one of `versions`."""
    from importlib.metadata import PackageNotFoundError

    from packaging.specifiers import SpecifierSet

    try:
        found = installed_version(package)
        # A nightly build of a version in the range is in the range.
        if SpecifierSet(versions).contains(found, prereleases=True):
            return
    except PackageNotFoundError:
        found = "no installation"
    wanted = f"fp4pass[{extra}]" if extra else f"{package}{versions}"
    raise VersionError(
        f"{package}: expected version {versions}, which fp4pass was tested with, got "
        f"{found}. Run pip install '{wanted}'."
    )
