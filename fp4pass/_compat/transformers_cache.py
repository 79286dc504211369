"""Private APIs of transformers: caches of keys and values. Tested with 5.17 and 5.23."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .transformers import require_transformers

require_transformers()

from transformers import DynamicCache, PreTrainedModel  # noqa: E402
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer  # noqa: E402

# The child of a decoder's graph that holds the keys and values.
CACHE = "fp4pass_cache"


class _Layer(StaticLayer):
    """Keys and values in memory of a fixed size, of which a call reads what is filled.

    Attributes:
        past: How many tokens were there before the call.
        total: How many are there after it.
    """

    past: int
    total: int

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = self._write(self.keys, key_states)
        return keys, self._write(self.values, value_states)

    def _write(self, memory: Tensor, new: Tensor) -> Tensor:
        rows = memory.narrow(0, 0, new.shape[0])
        rows.narrow(2, self.past, new.shape[2]).copy_(new.detach())
        return rows.narrow(2, 0, self.total)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.total, 0

    def get_seq_length(self) -> int:
        return self.past


class Decoder(nn.Module):
    """A decoder-only model with its cache of keys and values inside, for torch.export.

    It has the model's parameters, buffers and children under their names.

    Args:
        model: The model.
        rows: The largest batch.
        length: How many tokens the cache holds.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        super().__init__()
        self.__dict__.update(
            _parameters=model._parameters,
            _buffers=model._buffers,
            _non_persistent_buffers_set=model._non_persistent_buffers_set,
            _modules={**model._modules},
            _model=model,
        )
        self.train(model.training)
        memory = nn.Module()
        for i, shapes in enumerate(_cached(model)):
            for name, (heads, width, dtype, device) in zip(("keys", "values"), shapes, strict=True):
                zeros = torch.zeros(rows, heads, length, width, dtype=dtype, device=device)
                memory.register_buffer(f"{name}_{i}", zeros, persistent=False)
        self._modules[CACHE] = memory

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Run the model on the tokens that follow those in the cache.

        Args:
            input_ids: [B, T].
            attention_mask: [B, tokens in the cache + T].

        Returns:
            The model's output, with logits alone.
        """
        memory = dict(getattr(self, CACHE).named_buffers())
        layers = [
            _Layer(memory[f"keys_{i}"], memory[f"values_{i}"]) for i in range(len(memory) // 2)
        ]
        new, total = input_ids.shape[1], attention_mask.shape[1]
        for layer in layers:
            layer.past, layer.total = total - new, total
        # As `generate` counts positions, so that padding may be on the left.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        # A slice would have torch.export ask whether it is the whole.
        places = torch.arange(new, device=positions.device) + (total - new)
        given = {"position_ids": positions.index_select(1, places)}
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **{name: value for name, value in given.items() if name in _arguments(self._model)},
        )
        # What is in the cache has no gradient, so nothing has.
        return type(output)(logits=output.logits.detach())


def is_decoder(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that continues its input token by token."""
    return (
        isinstance(model, PreTrainedModel)
        and model.can_generate()
        and not model.config.is_encoder_decoder
        and {"input_ids", "attention_mask", "past_key_values"} <= _arguments(model)
    )


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Return whether keys and values of all tokens are what a model keeps of a text."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(isinstance(layer, DynamicLayer) for layer in layers)


def _cached(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Heads, width, dtype and device of the keys and of the values of every layer."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)

    def facts(x: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
        return x.shape[1], x.shape[3], x.dtype, x.device

    return [(facts(layer.keys), facts(layer.values)) for layer in cache.layers]


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
