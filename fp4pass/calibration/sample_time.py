"""How long a model takes to write its calibration text, by a few tokens of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.clock import Clock
from ..observers.batches import device_of
from ..quantization.layer_inputs import FAULTS
from .sample import rows_at_once, scripts_of

# Tokens that are written for the time of one.
_STEPS = 3


def sampling_seconds(model: Any, tokenizer: Any, tokens: int, seq_len: int) -> float | None:
    """Return the seconds in which `sample` writes some tokens, None for a model without a cache.

    Steps are timed behind half a window, where they take as long as they do on average.

    Args:
        model: as `sample` takes it.
        tokenizer: its tokenizer or processor.
        tokens: how many are to be written.
        seq_len: tokens of a window.
    """
    device = device_of(model) or torch.device("cpu")
    reader = getattr(tokenizer, "tokenizer", tokenizer)
    seconds = 0.0
    try:
        rows = rows_at_once(model, seq_len, device)
        for _, number in scripts_of(model, reader, seq_len, math.ceil(tokens / seq_len)):
            parts = math.ceil(number / rows)
            size = math.ceil(number / parts)
            seconds += parts * seq_len * _step_seconds(model, size, seq_len // 2, device)
    except FAULTS:
        return None
    return seconds


@torch.no_grad()
def _step_seconds(model: Any, rows: int, length: int, device: torch.device) -> float:
    """Return the seconds in which `rows` windows get a token behind `length` others."""
    start = torch.zeros(1, length, dtype=torch.int64, device=device)
    cache = model(start, use_cache=True).past_key_values
    cache.batch_repeat_interleave(rows)

    def step() -> None:
        output = model(start[:, :1].expand(rows, 1), past_key_values=cache, use_cache=True)
        output.logits[:, -1].float().softmax(-1).cpu()

    step()
    clock, steps = Clock(device), list[float]()
    for _ in range(_STEPS):
        step()
        steps.append(clock.lap())
    return min(steps)
