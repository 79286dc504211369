"""Several processes that quantize one model: what they exchange, and who searches what."""

from .ranks import (
    ONE,
    Ranks,
    divide,
    is_sharded,
    ranks,
    require_initialized,
    sharded_parameter,
)
from .statistics import summed_statistics
from .tensors import shared_tensors, whole_tensors

__all__ = [
    "ONE",
    "Ranks",
    "divide",
    "is_sharded",
    "ranks",
    "require_initialized",
    "sharded_parameter",
    "shared_tensors",
    "summed_statistics",
    "whole_tensors",
]
