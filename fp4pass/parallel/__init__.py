"""Run converted models on several processes, each with a part of the packed weights."""

from .apply import fully_shard, parallelize
from .styles import ColwiseParallel, ExpertParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel", "fully_shard", "parallelize"]
