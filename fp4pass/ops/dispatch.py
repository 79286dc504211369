"""How an operator is defined, what implements it on a device, and what several of them check."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_autograd, register_fake

from ..core.formats import Format, get_format
from ..errors import DtypeError, ShapeError
from ..kernels.codebook.reference import dequantize_codebook_ref, quantize_codebook_ref
from ..kernels.dequantize.reference import dequantize_ref
from ..kernels.linear.reference import (
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from ..kernels.quantize.activation_reference import activate_quantize_ref
from ..kernels.quantize.norm_reference import (
    add_layer_norm_quantize_ref,
    add_rms_norm_quantize_ref,
    layer_norm_quantize_ref,
    rms_norm_quantize_ref,
)
from ..kernels.quantize.reference import dynamic_global_scale_ref, quantize_ref
from ..kernels.rotate.reference import rotate_quantize_ref, rotate_ref
from ..kernels.search.gptq_reference import gptq_ref
from ..kernels.search.joint_reference import joint_ref
from ..kernels.search.reference import search_ref
from ..kernels.statistics.errors_reference import errors_ref
from ..kernels.statistics.reference import observe_ref

# What can be quantized.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_log = logging.getLogger(__name__)

# torch.library.custom_op would do all this too, and adds layers of Python to every call.
_LIBRARY = Library("fp4pass", "DEF")


def operator(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator by its implementation and its fake, and return what calls it."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _opaque(_unviewed(function)), "CompositeExplicitAutograd")
        register_fake(f"fp4pass::{name}", fake, lib=_LIBRARY)
        operator: Callable[..., Any] = getattr(torch.ops.fp4pass, name).default
        return operator

    return define


def _unviewed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result is no view of a tensor that nobody else has.

    Of views that come out of an operator with gradients autograd allows none to be changed in
    place, which the activation after a linear may do.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and result._is_view():
            return torch.ops.aten._unsafe_view(result, result.shape)
        return result

    return run


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, where torch.compile will not look into it.

    Its graphs stop at operators; but it also follows what runs outside of its graphs. Asking it not
    to imports it, which takes a second, and costs time at every call.
    """
    disabled: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """Give an operator a backward, as torch.library.register_autograd does."""
    register_autograd(f"fp4pass::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


@lru_cache(maxsize=1)
def _kernels() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The Triton kernel of every reference, which are not imported where there is no GPU."""
    from ..kernels.codebook.triton import dequantize_codebook_triton, quantize_codebook_triton
    from ..kernels.dequantize.triton import dequantize_triton
    from ..kernels.linear.triton import (
        linear_group_triton,
        linear_quantized_group_triton,
        linear_quantized_triton,
        linear_triton,
    )
    from ..kernels.quantize.activation_triton import activate_quantize_triton
    from ..kernels.quantize.norm_triton import (
        add_layer_norm_quantize_triton,
        add_rms_norm_quantize_triton,
        layer_norm_quantize_triton,
        rms_norm_quantize_triton,
    )
    from ..kernels.quantize.triton import dynamic_global_scale_triton, quantize_triton
    from ..kernels.rotate.triton import rotate_quantize_triton, rotate_triton
    from ..kernels.search.joint_triton import gptq_triton, joint_triton
    from ..kernels.search.triton import search_triton
    from ..kernels.statistics.errors_triton import errors_triton
    from ..kernels.statistics.triton import observe_triton

    return {
        search_ref: search_triton,
        gptq_ref: gptq_triton,
        joint_ref: joint_triton,
        quantize_codebook_ref: quantize_codebook_triton,
        dequantize_codebook_ref: dequantize_codebook_triton,
        errors_ref: errors_triton,
        observe_ref: observe_triton,
        dynamic_global_scale_ref: dynamic_global_scale_triton,
        quantize_ref: quantize_triton,
        rms_norm_quantize_ref: rms_norm_quantize_triton,
        add_rms_norm_quantize_ref: add_rms_norm_quantize_triton,
        layer_norm_quantize_ref: layer_norm_quantize_triton,
        add_layer_norm_quantize_ref: add_layer_norm_quantize_triton,
        activate_quantize_ref: activate_quantize_triton,
        rotate_ref: rotate_triton,
        rotate_quantize_ref: rotate_quantize_triton,
        dequantize_ref: dequantize_triton,
        linear_ref: linear_triton,
        linear_quantized_ref: linear_quantized_triton,
        linear_group_ref: linear_group_triton,
        linear_quantized_group_ref: linear_quantized_group_triton,
    }


@lru_cache(maxsize=256)
def _serve(
    reference: Callable[..., Any], device: torch.device, fmt: Format | None
) -> Callable[..., Any]:
    """What implements an operator on a device: the kernel of the reference, or the reference.

    Where a GPU runs the reference, it says so, once for each operator, device and format.
    """
    if device.type != "cuda":
        return reference
    reason = unserved(device, fmt)
    if reason is None:
        return _kernels()[reference]
    _log.warning("%s runs in plain PyTorch on %s: %s.", reference.__name__, device, reason)
    return reference


def unserved(device: torch.device, fmt: Format | None) -> str | None:
    """Why the kernels cannot serve a GPU or a format, or None."""
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability 8.0 is needed, this GPU has {capability[0]}.{capability[1]}"
    from ..kernels.common.tiles import supports

    if fmt is not None and not supports(fmt):
        return f"the kernels do not know {fmt.key}"
    return None


def run(reference: Callable[..., Any], x: Tensor, fmt: Format | None, *args: Any) -> Any:
    """Run an operator's implementation for the device of x, under that device."""
    implementation = _serve(reference, x.device, fmt)
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return implementation(*args)
    with torch.cuda.device(x.device):
        return implementation(*args)


def require_float(x: Tensor) -> None:
    """Raise DtypeError unless x can be quantized."""
    if x.dtype not in FLOATS:
        raise DtypeError(
            f"The input of a quantized linear is {x.dtype}; float32, bfloat16, float16 or float64 "
            "is wanted. Cast it before the call."
        )


def require_blocks(x: Tensor, fmt: Format) -> None:
    """Raise ShapeError unless the last dimension of x is whole blocks."""
    if x.ndim == 0 or x.shape[-1] % fmt.block:
        raise ShapeError(
            f"The tensor to quantize has shape {tuple(x.shape)}; its last dimension must be a "
            f"multiple of {fmt.block}, the block of {fmt.key}."
        )


def empty_blocks(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Uninitialized packed codes and scale bits for x [..., K]."""
    form = get_format(fmt)
    return (
        x.new_empty((*x.shape[:-1], form.packed_columns(x.shape[-1])), dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], x.shape[-1] // form.block), dtype=torch.uint8),
    )
