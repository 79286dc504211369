"""Calibration data: texts, chats, rows, images, files and data sets as batches.

`batches` makes them; `fp4pass.calibrate` calls it for data that is no batches yet.
"""

from .to_batches import batches

__all__ = ["batches"]
