"""Errors of huggingface_hub. Their classes come from its HTTP library."""

from __future__ import annotations

from . import require


def require_hub_library() -> None:
    """Raise VersionError unless huggingface_hub is installed, and not too old."""
    require("huggingface_hub")


def hub_faults() -> tuple[type[Exception], ...]:
    """Return what is raised where the hub refuses, or cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError

    # httpx in version 1, httpx2 in version 2; both raise more below it than HfHubHTTPError.
    errors = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    return (*errors, OSError, ValueError)
