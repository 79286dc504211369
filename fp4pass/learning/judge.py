"""The distance of a model's logits from those of another, on any batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..observers.batches import call_arguments, device_of
from ..observers.visible_tokens import visible_rows, watching_tokens

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24


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
            total += _sum(logits, others.to(logits.device), visible).cpu()
    kl, count = total.tolist()
    return float(kl / count) if count else None


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


def _sum(logits: Tensor, others: Tensor, visible: Tensor | None) -> Tensor:
    """Return the sum of the KL of tokens, and their number: float64 [2]."""
    if visible is not None:
        logits, others = logits[visible], others[visible]
    kl = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows in torch.arange(len(logits)).split(max(1, _CHUNK // logits.shape[-1])):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        log_q, log_p = (each[part].float().log_softmax(-1) for each in (logits, others))
        p = log_p.exp()
        kl += torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dtype=torch.float64)
    return torch.stack((kl, torch.full_like(kl, len(logits))))
