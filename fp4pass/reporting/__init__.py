"""Report on a quantized model: `gather` returns the numbers, `write_report` writes the page."""

from __future__ import annotations

from .data import gather
from .page import write_report

__all__ = ["gather", "write_report"]
