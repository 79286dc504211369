"""Methods that quantize a weight: one file each, and the registry."""

from .base import (
    METHODS,
    Certificate,
    Method,
    MethodResult,
    method,
    method_from_dict,
    method_to_dict,
    resolve_method,
    search_scales,
    weight_amax,
    weight_problem,
)
from .gptq import Gptq
from .hessian import Hessian, certify
from .naive import Naive
from .sse import Sse
from .statistics import STATISTICS, Stats

__all__ = [
    "METHODS",
    "STATISTICS",
    "Certificate",
    "Gptq",
    "Hessian",
    "Method",
    "MethodResult",
    "Naive",
    "Sse",
    "Stats",
    "certify",
    "method",
    "method_from_dict",
    "method_to_dict",
    "resolve_method",
    "search_scales",
    "weight_amax",
    "weight_problem",
]
