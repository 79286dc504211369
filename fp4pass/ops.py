"""Every operator of `torch.ops.fp4pass`: schema, implementation, fake and autograd.

A format crosses an operator as its key and a scale as its uint8 bits. All operators are
functional but `observe`. NVIDIA GPUs run the Triton kernels, everything else the references.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_autograd, register_fake
from torch.nn import functional as F

from .errors import DtypeError, NonFiniteError, ShapeError, unknown_name
from .formats import Format, get_format
from .kernels.dequantize_ref import dequantize_ref
from .kernels.errors_ref import errors_ref
from .kernels.hessian_ref import HESSIAN_BLOCK, observe_ref
from .kernels.linear_ref import linear_quantized_ref, linear_ref
from .kernels.norm_quantize_ref import rms_norm_quantize_ref
from .kernels.quantize_ref import global_divisor_ref, quantize_ref
from .kernels.search_ref import OBJECTIVES, search_ref

# What can be quantized.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_log = logging.getLogger(__name__)

# torch.library.custom_op would do all this too, and adds layers of Python to every call.
_LIBRARY = Library("fp4pass", "DEF")


def _operator(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator by its implementation and its fake, and return what calls it."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _opaque(function), "CompositeExplicitAutograd")
        register_fake(f"fp4pass::{name}", fake, lib=_LIBRARY)
        operator: Callable[..., Any] = getattr(torch.ops.fp4pass, name).default
        return operator

    return define


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


def _differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    register_autograd(f"fp4pass::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


@lru_cache(maxsize=1)
def _kernels() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The Triton kernel of every reference, which are not imported where there is no GPU."""
    from .kernels.dequantize_triton import dequantize_triton
    from .kernels.errors_triton import errors_triton
    from .kernels.hessian_triton import observe_triton
    from .kernels.linear_triton import linear_quantized_triton, linear_triton
    from .kernels.norm_quantize_triton import rms_norm_quantize_triton
    from .kernels.quantize_triton import global_divisor_triton, quantize_triton
    from .kernels.search_triton import search_triton

    return {
        search_ref: search_triton,
        errors_ref: errors_triton,
        observe_ref: observe_triton,
        global_divisor_ref: global_divisor_triton,
        quantize_ref: quantize_triton,
        rms_norm_quantize_ref: rms_norm_quantize_triton,
        dequantize_ref: dequantize_triton,
        linear_ref: linear_triton,
        linear_quantized_ref: linear_quantized_triton,
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
    reason = _unserved(device, fmt)
    if reason is None:
        return _kernels()[reference]
    _log.warning("%s runs in plain PyTorch on %s: %s.", reference.__name__, device, reason)
    return reference


def _unserved(device: torch.device, fmt: Format | None) -> str | None:
    """Why the kernels cannot serve a GPU or a format, or None."""
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability 8.0 is needed, this GPU has {capability[0]}.{capability[1]}"
    from .kernels.tiles import supports

    if fmt is not None and not supports(fmt):
        return f"the kernels do not know {fmt.key}"
    return None


def _run(reference: Callable[..., Any], x: Tensor, fmt: Format | None, *args: Any) -> Any:
    """Run an operator's implementation for the device of x, under that device."""
    implementation = _serve(reference, x.device, fmt)
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return implementation(*args)
    with torch.cuda.device(x.device):
        return implementation(*args)


def _fake_search(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: str, objective: str
) -> tuple[Tensor, Tensor]:
    return _empty_blocks(weight, fmt)


@_operator(_fake_search)
def search(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: str, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with the block scales that minimize `objective`.

    hessian: [ceil(K / 32), 32, 32] float32 for "hessian", else None. Returns packed uint8
    [N, K / 2] and scale bits [N, K / block].
    """
    if objective not in OBJECTIVES:
        raise unknown_name("Objective", objective, OBJECTIVES)
    if objective == "hessian":
        _require_hessian(hessian, weight.shape[1])
    form = get_format(fmt)
    return _run(search_ref, weight, form, weight, hessian, global_scale, form, objective)


def _fake_errors(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    hessian: Tensor | None,
    fmt: str,
) -> Tensor:
    return weight.new_empty(4, dtype=torch.float64)


@_operator(_fake_errors)
def errors(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    hessian: Tensor | None,
    fmt: str,
) -> Tensor:
    """Squared errors of a quantized weight and what they are relative to (kernels/errors_ref.py).

    Returns float64 [4]: |W - Q|^2, |W|^2, tr (W - Q) H (W - Q)^T and tr W H W^T.
    """
    form = get_format(fmt)
    if hessian is not None:
        _require_hessian(hessian, weight.shape[1])
    quantized = (packed, scale, global_divisor)
    return _run(errors_ref, weight, form, weight, *quantized, hessian, form)


def _fake_observe(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    return None


@_operator(_fake_observe, mutates=("hessian", "count", "amax"))
def observe(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add the tokens of x [..., K] to a layer's input statistics (kernels/hessian_ref.py)."""
    _run(observe_ref, x, None, x, hessian, count, amax)


def _fake_global_divisor(x: Tensor, fmt: str) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


@_operator(_fake_global_divisor)
def global_divisor(x: Tensor, fmt: str) -> Tensor:
    """1 / global_scale for the amax of this x: [1] float32, a power of two."""
    form = get_format(fmt)
    return _run(global_divisor_ref, x, form, x, form)


def _fake_quantize(x: Tensor, global_divisor: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return _empty_blocks(x, fmt)


@_operator(_fake_quantize)
def quantize(x: Tensor, global_divisor: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize activations x [..., K] in blocks along K.

    global_divisor: [1] float32 or None. Returns packed uint8 [..., K / 2] and scale bits
    [..., K / block].
    """
    form = get_format(fmt)
    _require_float(x)
    _require_blocks(x, form)
    return _run(quantize_ref, x, form, x, global_divisor, form)


def _fake_rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: str
) -> tuple[Tensor, Tensor]:
    return _empty_blocks(x, fmt)


@_operator(_fake_rms_norm_quantize)
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: str
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of x [..., K] with weight [K], as `quantize` does its input."""
    form = get_format(fmt)
    _require_float(x)
    _require_blocks(x, form)
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ShapeError(
            f"The weight of an RMSNorm is {tuple(weight.shape)} {weight.dtype}; for an input "
            f"{tuple(x.shape)} {x.dtype} it is {tuple(x.shape[-1:])} {x.dtype}."
        )
    return _run(rms_norm_quantize_ref, x, form, x, weight, eps, global_divisor, form)


def _fake_dequantize(
    packed: Tensor, scale: Tensor, global_divisor: Tensor | None, fmt: str, dtype: torch.dtype
) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype)


@_operator(_fake_dequantize)
def dequantize(
    packed: Tensor, scale: Tensor, global_divisor: Tensor | None, fmt: str, dtype: torch.dtype
) -> Tensor:
    """The tensor [..., K] in `dtype` that packed codes [..., K / 2] and scale bits stand for."""
    form = get_format(fmt)
    return _run(dequantize_ref, packed, form, packed, scale, global_divisor, form, dtype)


def _fake_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@_operator(_fake_linear)
def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    """x [..., K] times a packed weight [N, K / 2], transposed, plus bias: [..., N] in x's dtype."""
    form = get_format(fmt)
    _require_float(x)
    return _run(linear_ref, x, form, x, packed, scale, global_divisor, bias, form)


def _fake_linear_quantized(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_divisor: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@_operator(_fake_linear_quantized)
def linear_quantized(
    x: Tensor,
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_divisor: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    global_divisor: Tensor | None,
    bias: Tensor | None,
    fmt: str,
) -> Tensor:
    """The product of quantized activations and a packed weight, plus bias: [..., N].

    x [..., K] is what was quantized. Only its dtype, that of the result, is read; its gradient
    is that of the dense product, as if rounding were the identity (straight-through).
    """
    form = get_format(fmt)
    activations = (x_packed, x_scale, x_global_divisor)
    weight = (packed, scale, global_divisor)
    return _run(linear_quantized_ref, x, form, *activations, *weight, bias, form, x.dtype)


def _require_float(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise DtypeError(
            f"The input of a quantized linear is {x.dtype}; float32, bfloat16, float16 or float64 "
            "is wanted. Cast it before the call."
        )


def _require_hessian(hessian: Tensor | None, columns: int) -> None:
    groups = math.ceil(columns / HESSIAN_BLOCK)
    wanted = (groups, HESSIAN_BLOCK, HESSIAN_BLOCK)
    if hessian is None or tuple(hessian.shape) != wanted:
        found = "None" if hessian is None else f"of shape {tuple(hessian.shape)}"
        raise ShapeError(
            f"The block Hessian is {found}; for a weight of {columns} columns {wanted} is wanted."
        )
    if not hessian.isfinite().all():
        raise NonFiniteError("The block Hessian holds NaN or infinity. Calibrate on finite inputs.")


def _require_blocks(x: Tensor, fmt: Format) -> None:
    if x.ndim == 0 or x.shape[-1] % fmt.block:
        raise ShapeError(
            f"The tensor to quantize has shape {tuple(x.shape)}; its last dimension must be a "
            f"multiple of {fmt.block}, the block of {fmt.key}."
        )


def _empty_blocks(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Uninitialized packed codes and scale bits for x [..., K]."""
    block = get_format(fmt).block
    return (
        x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], x.shape[-1] // block), dtype=torch.uint8),
    )


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, packed, scale, global_divisor, bias, fmt = inputs
    ctx.save_for_backward(packed, scale, global_divisor)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.fmt = fmt
    ctx.arguments = len(inputs)


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, the first argument, and of the bias, the last but one."""
    packed, scale, divisor = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * ctx.arguments
    if ctx.needs_input_grad[0]:
        grads[0] = grad @ dequantize(packed, scale, divisor, ctx.fmt, grad.dtype)
    if ctx.needs_input_grad[-2]:
        grads[-2] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return tuple(grads)


_differentiable("linear", _backward_linear, _setup_linear)
_differentiable("linear_quantized", _backward_linear, _setup_linear)


def _setup_rounding(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))
    ctx.arguments = len(inputs)


def _backward_rounding(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    """Codes and scales have no gradient; that of x flows through the product instead."""
    return (None,) * ctx.arguments


_differentiable("quantize", _backward_rounding, _setup_rounding)
_differentiable("rms_norm_quantize", _backward_rounding, _setup_rounding)
_differentiable("global_divisor", _backward_rounding, _setup_rounding)


@_operator(F.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, which torch.compile neither decomposes nor fuses (graph/inductor.py)."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def _fake_gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(input, approximate=approximate)


@_operator(_fake_gelu)
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu, which torch.compile neither decomposes nor fuses."""
    return F.gelu(input, approximate=approximate)


@_operator(torch.softmax)
def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax, which torch.compile neither decomposes nor fuses."""
    return torch.softmax(input, dim, dtype=dtype)


def _setup_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.shape, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(input, weight, bias)


def _backward_layer_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, bias = ctx.saved_tensors
    _, mean, rstd = torch.native_layer_norm(input, ctx.shape, weight, bias, ctx.eps)
    wanted = [each is not None and each.requires_grad for each in (input, weight, bias)]
    grads = torch.ops.aten.native_layer_norm_backward(
        grad, input, ctx.shape, mean, rstd, weight, bias, wanted
    )
    return grads[0], None, grads[1], grads[2], None


def _setup_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.approximate = inputs
    ctx.save_for_backward(input)


def _backward_gelu(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (input,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(grad, input, approximate=ctx.approximate), None


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
    ctx.save_for_backward(output)


def _backward_softmax(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (output,) = ctx.saved_tensors
    grad = torch.ops.aten._softmax_backward_data(grad, output, ctx.dim, output.dtype)
    return grad.to(ctx.dtype), None, None


_differentiable("layer_norm", _backward_layer_norm, _setup_layer_norm)
_differentiable("gelu", _backward_gelu, _setup_gelu)
_differentiable("softmax", _backward_softmax, _setup_softmax)
