"""Calibration data: text that a model writes itself."""

from .sample import sample

__all__ = ["sample"]
