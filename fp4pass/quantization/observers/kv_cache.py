"""Observe keys and values for the scales of a quantized cache, and make caches for `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import transformers_cache as caches
from ...distributed import ranks
from ...errors import CalibrationError, NonFiniteError, OptionError, StateError, expected
from ...nn.kv_cache import KV_CACHE, CacheCodec, CacheFormat, get_cache_format
from ...record.state import get_state, unwrap
from .batches import device_of
from .observer import observes
from .visible_tokens import visible_rows

# Names of the observed tensors.
_KINDS = ("keys", "values")

# On a prepared attention module: the largest magnitudes [H] of its keys and of its values, and the
# numbers of a head of each.
_SEEN = "_fp4pass_keys_and_values"


def observe_cache(root: nn.Module, name: str) -> None:
    """Put observers on the keys and values that attention modules write. Raises OptionError."""
    get_cache_format(name)
    for module in caches.cached_attention(root).values():
        if _SEEN not in module.__dict__:
            module.__dict__[_SEEN] = {}
            module.register_forward_pre_hook(_observe, with_kwargs=True)


@observes
def _observe(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seen = module.__dict__[_SEEN]

    def note(keys: Tensor, values: Tensor) -> None:
        for name, x in zip(_KINDS, (keys, values), strict=True):
            # [B, T, H, D]
            tokens = x.detach().transpose(1, 2)
            visible = visible_rows(tokens[:, :, 0])
            if visible is not None:
                tokens = torch.where(visible.view(*tokens.shape[:2], 1, 1), tokens, 0)
            amax = tokens.abs().amax(dim=(0, 1, 3)).float()
            before = seen.get(name)
            seen[name] = amax if before is None else torch.maximum(before[0], amax), x.shape[3]

    return args, caches.watch(module, kwargs, note)


def unobserve_cache(root: nn.Module) -> None:
    """Take what `observe_cache` put in out again."""
    for module in root.modules():
        if module.__dict__.pop(_SEEN, None) is None:
            continue
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _observe:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def require_cache_statistics(root: nn.Module, name: str) -> None:
    """Raise an error for attention whose keys were not seen, or fit no block of the format."""
    fmt = get_cache_format(name)
    for path, module in caches.cached_attention(root).items():
        seen = module.__dict__[_SEEN]
        if not seen and ranks().size == 1:
            raise _unseen(path)
        for amax, columns in seen.values():
            fmt.require_columns(columns, path)
            if not amax.isfinite().all():
                raise NonFiniteError(f"{path}: its keys or values held NaN or infinity.")


def _unseen(path: str) -> CalibrationError:
    return CalibrationError(
        f"{path}: calibration has not seen its keys and values. Run batches through the model "
        "before convert."
    )


def settle_cache(root: nn.Module, name: str) -> None:
    """Give attention modules the scales of what was observed, and take the observers out."""
    fmt = get_cache_format(name)
    for path, module in caches.cached_attention(root).items():
        found = ranks().gather({key: each[0].cpu() for key, each in module.__dict__[_SEEN].items()})
        for kind, key in zip(_KINDS, fmt.scales, strict=True):
            parts = [each[kind] for each in found if kind in each]
            if not parts:
                raise _unseen(path)
            scale = fmt.scale_for(torch.stack(parts).amax(0))
            module.register_buffer(key, scale.to(device_of(module)))
    unobserve_cache(root)


def enable_cache(root: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Have `generate` use the cache that a recipe names, if it names one."""
    if recipe.get(KV_CACHE) is not None:
        caches.generate_with(root, quantized_cache)


def drop_cache(root: nn.Module) -> None:
    """Undo `enable_cache`, and drop the scales of a converted model's cache."""
    fmt = cache_format_of(root)
    if fmt is not None:
        caches.generate_as_before(root)
        for module in caches.cached_attention(root).values():
            for key in fmt.scales:
                delattr(module, key)


def hold_scales(root: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Give attention modules room for the scales that a checkpoint has. Raises OptionError."""
    fmt = get_cache_format(name)
    for path, module in caches.cached_attention(root).items():
        for key in fmt.scales:
            scale = tensors.get(f"{path}.{key}", torch.zeros(()))
            fits = scale.is_floating_point() and scale.ndim == (3 if fmt.per_head else 1)
            if not fits or not ((scale > 0) & scale.isfinite()).all():
                what = f"positive finite numbers {'[heads, 1, 1]' if fmt.per_head else '[1]'}"
                got = f"{scale.dtype} {tuple(scale.shape)}"
                raise OptionError(expected(f"{path}.{key}", what, got))
            room = torch.ones_like(scale, dtype=torch.float32)
            module.register_buffer(key, room.to(next(module.parameters()).device))


def cache_format_of(model: nn.Module) -> CacheFormat | None:
    """Return the format of the cache of a converted model, None where it stays in float."""
    state = get_state(unwrap(model))
    name = None if state is None or state.status != "converted" else state.recipe.get(KV_CACHE)
    return None if name is None else get_cache_format(name)


def quantized_cache(model: nn.Module, max_cache_len: int | None = None) -> Any:
    """Return a cache for a model that was converted with `kv_cache`.

    Keys and values are read as what their bytes stand for from the first call on, so that logits do
    not depend on how a text is cut into calls.

    Args:
        model: converted with `kv_cache`, or loaded.
        max_cache_len: tokens that there is memory for, as compiled code needs it; None for a cache
            that grows.

    Raises:
        StateError: the model has no scales for a cache.
        OptionError: `max_cache_len` is not a positive number.

    Example:
        >>> model = fp4pass.prepare(model, "sse", kv_cache="fp8")
        >>> model = fp4pass.convert(fp4pass.calibrate(model, batches, progress=False))
        >>> cache = fp4pass.integrations.quantized_cache(model)
        >>> model(batches[0], cache=cache).cache.get_seq_length()
        8
    """
    root, fmt = unwrap(model), cache_format_of(model)
    if fmt is None:
        raise StateError(
            "The model has no scales of a key-value cache. Call fp4pass.prepare(model, "
            "kv_cache='fp8'), calibrate and convert."
        )
    if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
        raise OptionError(expected("max_cache_len", "a positive number, or None", max_cache_len))
    modules: Any = caches.cached_attention(root).values()
    codecs = [[CacheCodec(fmt, getattr(each, key)) for key in fmt.scales] for each in modules]
    return caches.make_cache([(keys, values) for keys, values in codecs], max_cache_len)
