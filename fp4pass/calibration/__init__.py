"""Make batches of calibration data: texts, chats, rows, images, files and data sets.

`fp4pass.calibrate` calls `batches` for data in other forms. `sample` has a model write a text of
its own.
"""

from .sample import sample
from .to_batches import batches

__all__ = ["batches", "sample"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
