"""Methods: weight, statistics, format and global scale to a QuantState. One file each."""

from .base import METHODS, Method, Stats, resolve_method, weight_amax, weight_problem
from .hessian import Hessian
from .naive import Naive
from .sse import Sse

__all__ = [
    "METHODS",
    "Hessian",
    "Method",
    "Naive",
    "Sse",
    "Stats",
    "resolve_method",
    "weight_amax",
    "weight_problem",
]
