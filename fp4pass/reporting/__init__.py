"""Report on a quantized model: a page with its numbers and charts, which also are files beside it.

`gather` returns the numbers, `write_report` writes the page, `draw_allocation` a picture of what
`fp4pass.allocate` found. `charts` draws all pictures of the project with matplotlib.
"""

from __future__ import annotations

from .budget import draw_allocation
from .data import gather
from .write import write_report

__all__ = ["draw_allocation", "gather", "write_report"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
