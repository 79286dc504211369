"""Make batches of calibration data: texts, chats, rows, images, files and data sets.

`fp4pass.calibrate` calls `batches` for data in other forms. `mixture` is the text where there is
none: the model writes most of it, by `sample`. `smooth` moves large channels of inputs into
weights.
"""

from typing import Any

from .sample import sample
from .to_batches import batches, mixture

__all__ = ["batches", "mixture", "sample", "smooth"]


def __getattr__(name: str) -> Any:
    """Import `smooth` when it is asked for: it traces, which takes a while to import."""
    if name == "smooth":
        from .smoothing import smooth

        return smooth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
