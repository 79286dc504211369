"""The flow from a model to packed weights: plan, statistics, scales, search, report."""

from .compute import set_compute
from .recipe import Recipe
from .report import Report, report

__all__ = ["Recipe", "Report", "report", "set_compute"]
