"""Private APIs of transformers: caches of keys and values, in floats or in bytes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from . import lacking, require
from .transformers import is_pretrained

# The child of a decoder's graph that holds the keys and values.
CACHE = "fp4pass_cache"


class Decoder(nn.Module):
    """A decoder-only model with a cache of `length` tokens of at most `rows` texts, for export."""

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
        cache = cache_module().DynamicCache(config=model.config)
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=token, use_cache=True, **cache_given(model, cache))
        for kind in ("keys", "values"):
            for i, layer in enumerate(cache.layers):
                # [1, heads, 1, width]
                x = getattr(layer, kind)
                shape = (rows, x.shape[1], length, x.shape[3])
                memory.register_buffer(f"{kind}_{i}", x.new_zeros(shape), persistent=False)
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
            use_cache=True,
            **cache_given(model, cache_module().Cache(layers=layers)),
            **{name: value for name, value in given.items() if name in _arguments(model)},
        )
        # Nothing has a gradient, for the cache has none.
        return type(output)(logits=output.logits.detach())


def is_decoder(model: Any) -> bool:
    """Return whether a model is one of transformers that continues its input token by token."""
    return (
        is_pretrained(model)
        and model.can_generate()
        and not model.config.is_encoder_decoder
        and {"input_ids", "attention_mask"} <= _arguments(model)
        and cache_argument(model.forward) is not None
    )


def has_plain_cache(model: Any) -> bool:
    """Return whether a model of transformers keeps of a text the keys and values of all tokens."""
    module = cache_module()
    plain = (module.DynamicLayer, module.DynamicSlidingWindowLayer)
    layers = module.DynamicCache(config=model.config).layers
    # Layers that read the keys of others have none of their own.
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return len(layers) == count > 0 and all(type(layer) in plain for layer in layers)


def cache_module() -> Any:
    """Return the module of transformers with its caches."""
    require("transformers")
    from transformers import cache_utils

    return cache_utils


@functools.cache
def _layer_class() -> Any:
    """Make the class of a layer's cache, late, for its base is one of transformers."""
    base: Any = cache_module().StaticLayer

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


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


# The argument for a cache: until transformers 5.23, and since. Code of a hub may have either.
_NAMES = ("past_key_values", "cache")

# The method by which `generate` makes a cache.
PREPARE = "_prepare_cache_for_generation"


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the argument for a cache of keys and values, None if there is none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in parameters), None)


def cache_given(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument by which a decoder, or what is around it, takes a cache."""
    return {cache_argument(model.forward) or generated_name(): cache}


@functools.cache
def generated_name() -> str:
    """Return the name by which `generate` hands a cache to a model."""
    from transformers import GenerationMixin

    name = cache_argument(GenerationMixin.prepare_inputs_for_generation)
    if name is None or not hasattr(GenerationMixin, PREPARE):
        raise lacking(
            "transformers", f"`generate` makes no {' or '.join(_NAMES)} in {PREPARE}, for kv_cache="
        )
    return name


# Makes the cache of a call, for a model and a number of tokens, None for one that grows.
MakeCache = Callable[[nn.Module, int | None], Any]


def cached_attention(model: Any) -> dict[str, nn.Module]:
    """Return the attention modules of a decoder by name, in the order of its cache."""
    # Raises OptionError for a model whose cache is not one of keys and values of all tokens.

    def require(fits: bool, wanted: str, got: str) -> None:
        if not fits:
            raise OptionError(
                f"kv_cache: expected {wanted}, got {got} in {type(model).__name__}. Convert it "
                "without kv_cache=."
            )

    require(is_decoder(model), "a decoder of transformers that generates", "none")
    cache_utils = cache_module()
    layers = cache_utils.DynamicCache(config=model.config).layers
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    kinds = [type(each).__name__ for each in layers if type(each) is not cache_utils.DynamicLayer]
    kinds += [] if len(layers) == count else [f"{len(layers)} caches for {count} layers"]
    require(
        not kinds,
        "layers that keep the keys and values of all tokens",
        f"{''.join(kinds[:1])} (sliding windows, linear attention or shared keys)",
    )
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        # The innermost of what is called with the cache.
        if isinstance(index, int) and cache_argument(module.forward) is not None:
            found[index] = (name, module)
    wanted = f"{count} attention modules with a layer_idx, one for each layer"
    require(sorted(found) == list(range(count)), wanted, f"those of {sorted(found)}")
    return dict(found[i] for i in range(count))


class Watched:
    """A cache for an attention module that shows `seen` its keys and values."""

    def __init__(self, cache: Any, seen: Callable[[Tensor, Tensor], None]) -> None:
        self.cache, self.seen = cache, seen

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do what the cache does; without one return what is given."""
        self.seen(keys, values)
        if self.cache is None:
            return keys, values
        return self.cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def watch(
    module: nn.Module, kwargs: Mapping[str, Any], seen: Callable[[Tensor, Tensor], None]
) -> dict[str, Any]:
    """Return the arguments of an attention module with a cache that is watched."""
    name = next((name for name in _NAMES if name in kwargs), None) or cache_argument(module.forward)
    assert name is not None, "cached_attention returns modules that take a cache"
    return {**kwargs, name: Watched(kwargs.get(name), seen)}


def make_cache(codecs: Sequence[tuple[Any, Any]], length: int | None) -> Any:
    """Return a cache in bytes, by the codecs of each layer; length: its tokens, None to grow."""
    grown, fixed = _layer_classes()
    own = [grown(*pair) if length is None else fixed(length, *pair) for pair in codecs]
    return cache_module().Cache(layers=own)


@functools.cache
def _layer_classes() -> tuple[Any, Any]:
    """Make the classes of a layer's cache that grows, and of one of a fixed length."""
    cache_utils = cache_module()
    dynamic: Any = cache_utils.DynamicLayer
    static: Any = cache_utils.StaticLayer

    class Bytes:
        """Keys and values as bytes [B, H, T, W]; a call reads them as numbers."""

        codecs: tuple[Any, Any]
        keys: Tensor
        values: Tensor
        cumulative_length: Tensor

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kw: Any) -> tuple[Any, Any]:
            own: Any = self
            if not own.is_initialized:
                own.lazy_initialization(keys, values)
            of_keys, of_values = self.codecs
            own.put(of_keys.encode(keys), of_values.encode(values))
            return of_keys.decode(own.keys, keys.dtype), of_values.decode(own.values, keys.dtype)

        def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
            own: Any = self
            own.dtype, own.device = keys.dtype, keys.device
            length = getattr(own, "max_cache_len", 0)
            own.keys = self.codecs[0].empty(keys, length)
            own.values = self.codecs[1].empty(values, length)
            own.is_initialized = True

    class DynamicBytes(Bytes, dynamic):
        def __init__(self, keys: Any, values: Any) -> None:
            super().__init__()
            self.codecs = keys, values

        def put(self, keys: Tensor, values: Tensor) -> None:
            self.keys = torch.cat([self.keys, keys], dim=2)
            self.values = torch.cat([self.values, values], dim=2)

    class StaticBytes(Bytes, static):
        def __init__(self, length: int, keys: Any, values: Any) -> None:
            super().__init__(max_cache_len=length)
            self.codecs = keys, values

        def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
            super().lazy_initialization(keys, values)
            self.batch_size, self.num_heads = keys.shape[:2]
            self.k_head_dim, self.v_head_dim = keys.shape[-1], values.shape[-1]
            self.cumulative_length = self.cumulative_length.to(self.device)
            # As StaticLayer does, so that CUDA graphs may write to them.
            if not torch.compiler.is_compiling():
                for tensor in (self.keys, self.values, self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)

        def put(self, keys: Tensor, values: Tensor) -> None:
            count = keys.shape[2]
            places = torch.arange(count, device=self.device) + self.cumulative_length
            self.cumulative_length.add_(count)
            self.keys.index_copy_(2, places, keys)
            self.values.index_copy_(2, places, values)

    return DynamicBytes, StaticBytes


def generate_with(model: Any, make: MakeCache) -> None:
    """Have `generate` of a model use the caches of `make`, unless it is given one."""
    require("transformers")
    generated_name()
    model.__dict__[PREPARE] = _PrepareCache(model, make)


def generate_as_before(model: Any) -> None:
    """Undo `generate_with`."""
    model.__dict__.pop(PREPARE, None)


class _PrepareCache:
    """Makes the cache of `generate` for one model; a copy of the model has a copy of it."""

    # It is no method, for pickle would look that up in a model that has no attributes yet.

    def __init__(self, model: Any, make: MakeCache) -> None:
        self.model, self.make = model, make

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put a cache among the arguments of the model."""
        model, name = self.model, generated_name()
        own = model_kwargs.get(name) is None and generation_config.use_cache is not False
        if own:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "static"):
                raise OptionError(
                    f"cache_implementation: expected None, 'dynamic' or 'static' for a model that "
                    f"was converted with kv_cache, got {kind!r}."
                )
            length = None
            if kind == "static":
                # As transformers does: a longer cache of before is not compiled for again.
                before = getattr(model, "_previous_max_cache_length", -1)
                wanted = getattr(generation_config, "max_cache_len", None) or 0
                length = max(max_cache_length, before, wanted)
                model._previous_max_cache_length = length
            model_kwargs[name] = self.make(model, length)
            if generation_config.is_assistant:
                model_kwargs[name].activate_past_recording()
            return
        getattr(type(model), PREPARE)(
            model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
