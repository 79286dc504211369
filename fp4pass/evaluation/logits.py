"""The logits of a causal language model, a few tokens at a time where it allows that."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StateError
from ..linear import QuantizedLinear
from ..quantization.state import unwrap

_log = logging.getLogger(__name__)

# Logits of a batch that may exist whole: 256 MB.
_WHOLE = 1 << 28

# Tokens on which parts are compared with the whole.
_PROBE = 32

# Of the tokens of a batch, as indices into [B * length], to their logits [tokens, vocabulary].
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LogitsReader:
    """How the logits of a model are had.

    in_parts: whether the model runs without its head, which then sees some tokens at a time.
    batch_size: windows that run at once.
    """

    model: nn.Module
    in_parts: bool
    batch_size: int

    def read(self, ids: Tensor) -> Rows:
        """Run the model on ids [B, length].

        Raises StateError if it returns no logits.
        """
        ids = _move(self.model, ids)
        if not self.in_parts:
            logits = _logits(self.model(ids)).flatten(0, 1)
            return lambda rows: logits[rows.to(logits.device)]
        return partial(_head, self.model, _without_head(self.model, ids))


def logits_reader(model: nn.Module, ids: Tensor, batch_size: int) -> LogitsReader:
    """Whole logits while those of a batch are small, else parts, else fewer windows at once.

    ids: [length], a longest window; a beginning of it shows whether parts are the model's logits.
    """
    vocabulary = _vocabulary(model)
    if vocabulary is None:
        return LogitsReader(model, False, batch_size)
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    fit = _WHOLE // (len(ids) * vocabulary * size)
    if fit >= batch_size:
        return LogitsReader(model, False, batch_size)
    reason = _why_whole(model, ids[None, :_PROBE])
    if reason is None:
        return LogitsReader(model, True, batch_size)
    _warn(f"logits are made for whole windows: {reason}")
    return LogitsReader(model, False, max(1, fit))


@cache
def _warn(message: str) -> None:
    """Once."""
    _log.warning(message)


def _vocabulary(model: nn.Module) -> int | None:
    """The outputs of the head of a transformers model, None of others."""
    head = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    return getattr(head, "out_features", None)


def _why_whole(model: nn.Module, ids: Tensor) -> str | None:
    """Why the head cannot see some tokens at a time; None if it can."""
    if unwrap(model) is not model or getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, QuantizedLinear) and not head.weight_only:
        return "the head quantizes its input, and tokens share a scale"
    if not isinstance(base := _base(model), nn.Module) or base is model:
        return "the model has no part without the head"
    ids = _move(model, ids)
    wanted = _logits(model(ids)).flatten(0, 1)
    rows = torch.arange(len(wanted), device=wanted.device)
    try:
        hidden = _without_head(model, ids)
        # Two parts, and not of one size.
        parts = rows.split(max(1, 2 * len(rows) // 3))
        found = torch.cat([_head(model, hidden, part) for part in parts])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"its head does not run by itself ({error})"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return "its head makes something else by itself"
    # Sums over the head's inputs, in float32, and then one rounding to the dtype.
    width = getattr(head, "in_features", 1)
    rounding = torch.finfo(wanted.dtype).eps + math.sqrt(width) * torch.finfo(torch.float32).eps
    far = (found.float() - wanted.float()).abs().max().item()
    bound = 2 * rounding * wanted.float().abs().max().item()
    return None if far <= bound else f"its head makes logits by itself that are {far:.2g} away"


def _base(model: Any) -> Any:
    """The model without its head, also when adapters of PEFT are around it."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return getattr(inner, "base_model", None)


def _without_head(model: Any, ids: Tensor) -> Any:
    """What the model without its head returns for ids [B, length].

    The model itself is called, and its head sees one token, so that the rest is called as always.
    """
    seen = []
    base = _base(model)
    forward = base.forward

    def first_token(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not isinstance(output, dict) or "last_hidden_state" not in output:
            raise TypeError(f"it gets a {type(output).__name__} without a last hidden state")
        hidden = output["last_hidden_state"]
        seen.append(_with_hidden(output, hidden))
        return _with_hidden(output, hidden[:1, :1])

    with _forward(base, first_token):
        model(ids)
    if not seen:
        raise TypeError("the model does not call its base model")
    return seen[0]


def _head(model: Any, output: Any, rows: Tensor) -> Tensor:
    """What the model makes of the hidden state of some tokens: its head, and all that follows."""
    hidden = output["last_hidden_state"]
    part = hidden.flatten(0, 1)[rows.to(hidden.device)][None]  # [1, tokens, K]
    # Only the shape of the ids is looked at.
    ids = _move(model, torch.zeros(part.shape[:2], dtype=torch.int64))
    with _forward(_base(model), lambda *args, **kwargs: _with_hidden(output, part)):
        return _logits(model(ids))[0]


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The same output with another hidden state, and without the cache, which is large."""
    fields = {name: value for name, value in output.items() if name != "past_key_values"}
    return type(output)(**(fields | {"last_hidden_state": hidden}))


@contextmanager
def _forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Another forward of one module, for a while."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _move(model: nn.Module, ids: Tensor) -> Tensor:
    """To where the first tensor of the model is."""
    tensors = (*model.parameters(), *model.buffers())
    return ids.to(tensors[0].device) if tensors else ids


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise StateError(
            f"The model returned a {type(output).__name__} without logits [batch, tokens, "
            "vocabulary]. A causal language model is wanted."
        )
    return logits
