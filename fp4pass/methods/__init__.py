"""Methods: weight, statistics, format and global scale to a QuantState. One file each."""

from .base import METHODS, Method, Stats, resolve_method, weight_amax, weight_problem
from .gptq import Gptq
from .hessian import Certificate, Certified, Hessian, certify
from .naive import Naive
from .sse import Sse

__all__ = [
    "METHODS",
    "Certificate",
    "Certified",
    "Gptq",
    "Hessian",
    "Method",
    "Naive",
    "Sse",
    "Stats",
    "certify",
    "resolve_method",
    "weight_amax",
    "weight_problem",
]
