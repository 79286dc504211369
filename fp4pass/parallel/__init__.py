"""Run converted models on several processes, each with a part of the packed weights."""

from .styles import ColwiseParallel, ExpertParallel, RowwiseParallel, fully_shard, parallelize

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel", "fully_shard", "parallelize"]
