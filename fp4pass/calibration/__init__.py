"""Calibration data: texts, chats, rows, images, files and data sets as batches.

`batches` makes them; `fp4pass.calibrate` calls it for data that is no batches yet. `sample` has a
model write a text of its own.
"""

from .sample import sample
from .to_batches import batches

__all__ = ["batches", "sample"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
