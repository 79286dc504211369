"""Methods that quantize a weight: one file each, and the registry."""

from .base import (
    METHODS,
    Certificate,
    Method,
    MethodResult,
    Stats,
    method_from_dict,
    method_to_dict,
    resolve_method,
    weight_amax,
    weight_problem,
)
from .gptq import Gptq
from .hessian import Hessian, certify
from .naive import Naive
from .sse import Sse

__all__ = [
    "METHODS",
    "Certificate",
    "Gptq",
    "Hessian",
    "Method",
    "MethodResult",
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
