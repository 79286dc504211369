"""Calibration data: batches of what a user has, and text that a model writes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .sample import sample

__all__ = ["batches", "sample"]


def batches(
    data: Any,
    tokenizer: Any = None,
    *,
    model: nn.Module | None = None,
    samples: int = 128,
    seq_len: int = 512,
    batch_size: int = 8,
    seed: int | None = None,
) -> Any:
    """Return data as the batches that `calibrate` runs."""
    if isinstance(data, Tensor):
        return list(data.split(batch_size))
    texts = [data] if isinstance(data, str) else list(data)
    if not all(isinstance(each, str) for each in texts):
        return data
    ids = [token for text in texts for token in tokenizer(text).input_ids]
    count = min(samples, len(ids) // seq_len)
    return list(torch.tensor(ids[: count * seq_len]).view(-1, seq_len).split(batch_size))
