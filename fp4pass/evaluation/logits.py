"""Logits of a causal language model, in batches whose logits fit in memory."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import StateError
from ..quantization.batches import device_of
from ..quantization.state import unwrap

# Logits of one batch: 256 MB.
_LARGEST = 1 << 28


def fitting_batch_size(model: nn.Module, window: int, batch_size: int) -> int:
    """Return how many windows run at once so that their logits take at most 256 MB."""
    head = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    vocabulary = getattr(head, "out_features", None)
    if vocabulary is None:
        return batch_size
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return max(1, min(batch_size, _LARGEST // (window * vocabulary * size)))


def read_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [B * length, vocabulary] of windows [B, length]. Raises StateError."""
    output = model(ids.to(device_of(model)))
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise StateError(
            "The output of the model: expected logits [batch, tokens, vocabulary], got "
            f"{type(output).__name__} without them. Give a causal language model."
        )
    return logits.flatten(0, 1)
