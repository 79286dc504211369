"""Private APIs of transformers: caches of keys and values. Tested with 5.17 and 5.23."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .transformers import require_transformers

# The child of a decoder's graph that holds the keys and values.
CACHE = "fp4pass_cache"


class Decoder(nn.Module):
    """A decoder-only model with its cache of keys and values inside, for torch.export.

    It has the model's parameters, buffers and children under their names. The cache holds `length`
    tokens of at most `rows` texts.
    """

    def __init__(self, model: Any, rows: int, length: int) -> None:
        super().__init__()
        self.__dict__.update(
            _parameters=model._parameters,
            _buffers=model._buffers,
            _non_persistent_buffers_set=model._non_persistent_buffers_set,
            _modules={**model._modules},
            _model=model,
        )
        memory = nn.Module()
        for name, x in _first_token(model).items():
            shape = (rows, x.shape[1], length, x.shape[3])
            memory.register_buffer(name, x.new_zeros(shape), persistent=False)
        self._modules[CACHE] = memory
        self.training = model.training

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return the logits of tokens [B, T] behind those in the cache; the mask has all tokens."""
        new, total = input_ids.shape[1], attention_mask.shape[1]
        memory = dict(getattr(self, CACHE).named_buffers())
        layers = [
            _layer_class()(memory[f"keys_{i}"], memory[f"values_{i}"], total - new, total)
            for i in range(len(memory) // 2)
        ]
        # As `generate` counts positions, so that padding may be on the left.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        # A slice would have torch.export ask whether it is the whole.
        places = torch.arange(new, device=positions.device) + (total - new)
        given = {"position_ids": positions.index_select(1, places)}
        model: Any = self._model
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=_cache_module().Cache(layers=layers),
            use_cache=True,
            **{name: value for name, value in given.items() if name in _arguments(model)},
        )
        # What is in the cache has no gradient, so nothing has.
        return type(output)(logits=output.logits.detach())


def is_decoder(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that continues its input token by token."""
    # A model of transformers has imported it.
    transformers = sys.modules.get("transformers")
    return (
        transformers is not None
        and isinstance(model, transformers.PreTrainedModel)
        and model.can_generate()
        and not model.config.is_encoder_decoder
        and {"input_ids", "attention_mask", "past_key_values"} <= _arguments(model)
    )


def has_plain_cache(model: Any) -> bool:
    """Return whether a model of transformers keeps of a text the keys and values of all tokens."""
    module = _cache_module()
    plain = (module.DynamicLayer, module.DynamicSlidingWindowLayer)
    layers = module.DynamicCache(config=model.config).layers
    # Layers that read the keys of others have none of their own.
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return len(layers) == count > 0 and all(type(layer) in plain for layer in layers)


def _cache_module() -> Any:
    require_transformers()
    from transformers import cache_utils

    return cache_utils


@functools.cache
def _layer_class() -> Any:
    """The class of a layer's cache; made late, for its base is one of transformers."""
    base: Any = _cache_module().StaticLayer

    class Layer(base):
        """Keys and values in memory of a fixed size, of which a call reads what is filled."""

        def __init__(self, keys: Tensor, values: Tensor, past: int, total: int) -> None:
            super().__init__(max_cache_len=keys.shape[2])
            self.keys, self.values, self.past, self.total = keys, values, past, total
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

    return Layer


def _first_token(model: Any) -> dict[str, Tensor]:
    """The keys and values [1, heads, 1, width] of one token, by the names of their buffers."""
    cache = _cache_module().DynamicCache(config=model.config)
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=cache, use_cache=True)
    found = {f"keys_{i}": layer.keys for i, layer in enumerate(cache.layers)}
    return found | {f"values_{i}": layer.values for i, layer in enumerate(cache.layers)}


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
