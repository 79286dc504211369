"""Methods: weight, statistics, format and global scale to a QuantState. One file each."""

from .base import (
    METHODS,
    Method,
    Stats,
    method_from_dict,
    method_to_dict,
    resolve_method,
    weight_amax,
    weight_problem,
)
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
    "method_from_dict",
    "method_to_dict",
    "resolve_method",
    "weight_amax",
    "weight_problem",
]
