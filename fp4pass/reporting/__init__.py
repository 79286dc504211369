"""A report of a quantized model as one page: the numbers, then the charts, then the files.

`write_report` makes it. The page is written with Jinja2, its pictures with matplotlib.
"""

from __future__ import annotations

from .facts import gather
from .write import write_report

__all__ = ["gather", "write_report"]
