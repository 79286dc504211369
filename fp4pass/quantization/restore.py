"""Restore a model: dense weights for packed ones, and no observers after an error."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from .._compat.diffusers import declare, is_diffusers
from .._compat.torch import recompile_hooked
from .._compat.transformers import conv1d_class, forget_quantized, is_pretrained, mark_quantized
from ..core.quant_state import TensorRecord
from ..distributed import is_sharded
from ..errors import OptionError, StateError, expected
from ..nn.experts import QUANTIZED, QuantizedExperts, finalize_stacks, restore_stacks
from ..nn.input_cache import share_nothing
from ..nn.linear import PACKED, QuantizedLinear
from ..nn.packed_linear import swap_class
from ..record.state import forget_state, get_state, has_adapters, is_interrupted, unwrap
from .adapters import allow_adapter_merge
from .observers.attention import CalledAttention, join_projections
from .observers.kv_cache import drop_cache, unobserve_cache
from .replace import SLOW_PATHS, remove_observers
from .tensor import dequantize as dequantize_tensor

_Module = TypeVar("_Module", bound=nn.Module)

# The method of transformers' models that this stands behind.
_METHOD = "dequantize"


@overload
def dequantize(x: TensorRecord) -> Tensor: ...


@overload
def dequantize(x: _Module) -> _Module: ...


def dequantize(x: Any) -> Any:
    """Return a dense tensor of what `quantize` returned, or make a converted model dense, in place.

    Args:
        x: what `quantize` returned; or a model that was converted or loaded, or a part of one,
            whose packed layers become linear layers with their rounded weights. Adapters of PEFT
            stay, and can be merged then. A model of transformers has this as `model.dequantize()`.

    Returns:
        The tensor, in the shape and dtype that it had, computed in float32 and rounded once. Or the
        model, whose weights have the dtype of the parameters beside them.

    Raises:
        OptionError: it is neither.
        StateError: the model has no packed layer, or one that is offloaded, split or in a graph.

    Example:
        >>> model = fp4pass.convert(torch.nn.Sequential(torch.nn.Linear(32, 8)), method="sse")
        >>> fp4pass.dequantize(model)
        Sequential(
          (0): Linear(in_features=32, out_features=8, bias=True)
        )
    """
    if isinstance(x, nn.Module):
        return dequantize_model(x)
    if isinstance(x, TensorRecord):
        return dequantize_tensor(x)
    wanted = "what quantize returned, or a converted model"
    raise OptionError(expected("dequantize", wanted, type(x).__name__))


def dequantize_model(model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
    """Make every packed layer of a model dense, with its rounded weight, in place; return it.

    Args:
        model: converted or loaded.
        dtype: of the dense weights and of what has the dtype of the model now; by default that of
            the parameters, or the one that each weight had where these have several.

    Raises:
        StateError: the model has no packed layer, or one that is offloaded, split or in a graph.
    """
    root: Any = unwrap(model)
    get_state(root)
    _require_whole(root)
    # Saving leaves a string in the config of a model.
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    before = {each.dtype for each in root.parameters() if each.dtype.is_floating_point}
    new = dtype or (before.pop() if len(before) == 1 else None)
    if dtype is not None and is_pretrained(root):
        before = {root.dtype}
    with torch.inference_mode(False), torch.no_grad():
        drop_cache(root)
        share_nothing(root)
        alike: dict[int, list[QuantizedLinear]] = {}
        for module in root.modules():
            if isinstance(module, QuantizedLinear):
                alike.setdefault(id(module.weight_packed), []).append(module)
        trains = not has_adapters(root)
        for layers in alike.values():
            _become_dense(layers, new, trains)
        for module in list(root.modules()):
            if isinstance(module, QuantizedExperts):
                restore_stacks(module, new)
            elif isinstance(module, CalledAttention):
                join_projections(module)
        for parameter in root.parameters():
            if dtype is not None and parameter.dtype in before:
                parameter.data = parameter.data.to(dtype)
    allow_adapter_merge(root)
    for module in root.modules():
        forget_state(module)
        # Where there is no layout for others, `convert` has it refuse.
        for name in ("save_pretrained", _METHOD):
            module.__dict__.pop(name, None)
        forget_quantized(module)
        if is_diffusers(module):
            declare(module, None)
    return model


def enable_dequantize(root: Any) -> None:
    """Have a library's own `dequantize` of a converted model work, and PEFT know the model."""
    if is_pretrained(root) or is_diffusers(root):
        mark_quantized(root)
        # One that was quantized while it was loaded has a quantizer, which does it.
        if getattr(root, "hf_quantizer", None) is None:
            root.__dict__[_METHOD] = functools.partial(dequantize_model, root)


def _require_whole(root: nn.Module) -> None:
    """Raise StateError unless all packed tensors of a model are here, and there are some."""
    packed = {name: each for name, each in root.named_modules() if isinstance(each, QUANTIZED)}
    if not packed:
        raise StateError(
            "dequantize: the model has no packed layer. Convert it first, or leave the call out."
        )
    graphs = (each for each in root.modules() if isinstance(each, fx.GraphModule))
    if any(isinstance(each, QUANTIZED) for graph in graphs for each in graph.modules()):
        raise StateError(
            "dequantize: expected a live model, got a graph, whose nodes multiply by packed "
            "weights. Dequantize the model that it was traced from."
        )
    for name, module in packed.items():
        packed_codes = getattr(module, PACKED)
        if packed_codes.is_meta:
            raise StateError(
                f"{name}: expected a packed weight in memory, got one that is offloaded. Load the "
                "model with a device_map that offloads nothing."
            )
        if module.is_split or is_sharded(packed_codes):
            raise StateError(
                f"{name}: expected a whole layer, got one that is split over processes. Load the "
                "model in one process and dequantize it there."
            )


def _become_dense(
    layers: Sequence[QuantizedLinear], dtype: torch.dtype | None, trains: bool
) -> None:
    """Make converted layers that share codes dense, in place, with one weight."""
    first = layers[0]
    dense = nn.Parameter(first.weight_as(dtype or first.weight_dtype).contiguous(), trains)
    for layer in layers:
        swap_class(layer, conv1d_class() if layer.transposed else nn.Linear, weight=dense)


@contextmanager
def unprepared(root: nn.Module, *, always: bool) -> Iterator[None]:
    """Have a float model that is prepared in between be as it was, always or after an error.

    One whose first weight was replaced stays as it is.
    """
    before = [
        (module, name, module.__dict__[name])
        for module in root.modules()
        for name in SLOW_PATHS
        if name in module.__dict__
    ]
    done = False
    try:
        yield
        done = True
    finally:
        if always or not (done or is_interrupted(root)):
            remove_observers(root)
            unobserve_cache(root)
            forget_state(root)
            share_nothing(root)
            finalize_stacks(root)
            for module, name, value in before:
                setattr(module, name, value)
            recompile_hooked(root)
