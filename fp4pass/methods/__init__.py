"""Methods that quantize a weight, and the registry."""

# ruff: noqa: F401

from .base import (
    METHODS,
    Certificate,
    Method,
    method,
    method_from_dict,
    method_to_dict,
    resolve_method,
)
from .base import MethodChoice as MethodChoice
from .gptq import Gptq
from .search import Hessian, Naive, Sse, certify, search_scales
from .statistics import STATISTICS, ExpertInputs, Stats, squared_errors

__all__ = [
    "METHODS",
    "STATISTICS",
    "Certificate",
    "Gptq",
    "Hessian",
    "Method",
    "Naive",
    "Sse",
    "Stats",
    "certify",
    "method",
    "search_scales",
    "squared_errors",
]
