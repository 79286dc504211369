"""Prepare, calibrate and convert a model: in steps, in one call, or from folder to folder."""

from .from_disk import quantize_checkpoint
from .steps import calibrate, convert, prepare

__all__ = ["calibrate", "convert", "prepare", "quantize_checkpoint"]
