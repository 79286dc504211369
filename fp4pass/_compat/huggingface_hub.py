"""Errors of huggingface_hub (1.33, 2.4). Their classes come from its HTTP library."""

from __future__ import annotations

from . import require_version


def require_hub_library() -> None:
    """Raise VersionError unless huggingface_hub is installed."""
    require_version("huggingface_hub", ">=1.0", extra="hf")


def hub_faults() -> tuple[type[Exception], ...]:
    """Return what is raised where the hub refuses, or cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError

    # httpx in version 1, httpx2 in version 2; both raise more below it than HfHubHTTPError.
    errors = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    return (*errors, OSError, ValueError)
