"""Layers in order: bring each to a device, run it, quantize it, store it, release it."""

from typing import Any

__all__ = ["smooth"]


def __getattr__(name: str) -> Any:
    """Import `smooth` when it is asked for: it traces, which takes a while to import."""
    if name in __all__:
        from .smoothing import smooth

        return smooth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
