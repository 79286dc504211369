# ruff: noqa: F401 (imported to be exported)
"""Quantize one model on several processes: exchange tensors, and assign searches to ranks."""

from .exchange import shared_tensors, summed_statistics, whole_tensors
from .ranks import (
    ONE,
    Ranks,
    divide,
    is_sharded,
    ranks,
    require_initialized,
    reshard,
    sharded_parameter,
)
