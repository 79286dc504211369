"""Merge LoRA adapters into packed weights: W + scale B A, quantized again.

`merge` is the verb, and `Merged` its record with the loss: KL to base + adapter.
"""

from .merging import merge
from .record import Merged

__all__ = ["Merged", "merge"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
