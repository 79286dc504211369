"""The distance of a model's logits from those of another, on any batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..observers.batches import call_arguments, device_of
from ..observers.visible_tokens import visible_rows, watching_tokens
from .loss import kl_loss


@torch.no_grad()
def logits_kl(model: nn.Module, original: nn.Module, batches: Iterable[Any]) -> float | None:
    """Return the mean KL of a model's tokens from the original's, in nats.

    Tokens that `attention_mask` hides do not count. None for a model whose output has no
    `logits` [..., tokens, vocabulary].
    """
    total = torch.zeros(2, dtype=torch.float64)
    with ExitStack() as watched:
        for each in (model, original):
            watched.enter_context(watching_tokens(each))
        for batch in batches:
            logits, visible = _logits(model, batch)
            others, _ = _logits(original, batch)
            if logits is None or others is None:
                return None
            others = others.to(logits.device)
            if visible is not None:
                logits, others = logits[visible], others[visible]
            if len(logits):
                count = len(logits)
                total += torch.tensor([float(kl_loss(logits, others)) * count, count]).double()
    kl, tokens = total.tolist()
    return float(kl / tokens) if tokens else None


def _logits(model: nn.Module, batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the logits [T, vocabulary] of a batch, and which tokens count, None for all."""
    args, kwargs = call_arguments(batch, device_of(model))
    seen: list[Tensor | None] = []
    # The scope of a call ends with it.
    handle = model.register_forward_hook(
        lambda *call: seen.append(_visible(call[-1])), prepend=True
    )
    try:
        logits = getattr(model(*args, **kwargs), "logits", None)
    finally:
        handle.remove()
    if not isinstance(logits, Tensor) or logits.ndim < 3:
        return None, None
    return logits.flatten(0, -2), seen[0]


def _visible(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    return visible_rows(logits).visible if isinstance(logits, Tensor) else None
