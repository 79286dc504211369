"""Quantize activations in plain PyTorch, alone or after a norm or an activation function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format, power_reaching
from ...core.packing import pack_codes
from ..common.rounding import (
    global_multiplier,
    in_chunks,
    naive_scale,
    quantize_rows_ref,
    round_to_codes_,
    round_to_scale,
    scale_values,
)
from ..norm.naive import rms_norm_ref
from ..search.reference import sse_scales

# A function that quantizes: `quantize_ref`, or another with its bits.
Quantize = Callable[..., tuple[Tensor, Tensor]]

# The scale of a block is chosen from its amax, or as that of least squared error.
ACTIVATION_SCALES = ("naive", "sse")


def quantize_ref(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Return packed codes [..., P] and scales [..., K / block] of activations x [..., K]."""
    # global_scale: of a format with float32 scales, the one scale of all (`quantize_rows_ref`).
    if fmt.has_float_scale:
        return quantize_rows_ref(x, global_scale, fmt)
    # A block with NaN or infinity gets the scale NaN, which it decodes to. With naive scales, a
    # block whose scale rounds to zero gets codes 0 and the smallest scale, and powers of two round
    # amax up where the next one is as near (`Element.carry`).
    factor = None if global_scale is None else global_multiplier(global_scale, fmt)
    chunks = in_chunks(fmt.block, x.reshape(-1, fmt.block))
    parts = [
        _quantize_blocks(each.to(torch.float32), factor, fmt, scale_method) for (each,) in chunks
    ]
    packed, scale = map(torch.cat, zip(*parts, strict=True))
    return (
        packed.view(*x.shape[:-1], fmt.packed_columns(x.shape[-1])),
        scale.view(*x.shape[:-1], x.shape[-1] // fmt.block),
    )


def _quantize_blocks(
    blocks: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str
) -> tuple[Tensor, Tensor]:
    """Return packed codes [J, p] and scale bits [J, 1] of float32 blocks [J, n]."""
    amax = blocks.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 0)
    if scale_method == "sse":
        vanishes = ~finite
        number = 1.0 if global_scale is None else float(global_scale)
        byte = sse_scales(blocks.masked_fill(vanishes, 0), number, fmt).unsqueeze(1)
    elif fmt.scale.mantissa_bits:
        full = fmt.element.max if global_scale is None else fmt.element.max * global_scale
        byte = round_to_scale(amax / full, fmt.scale)
        vanishes = byte == 0
        byte.clamp_(1, fmt.scale.last)
    else:
        vanishes = ~finite
        rounded = (amax.view(torch.int32) + fmt.element.carry).view(torch.float32)
        byte = naive_scale(rounded, 1.0, fmt.element, fmt.scale)
    step = scale_values(byte, fmt.scale)
    if global_scale is not None:
        step.mul_(global_scale)
    # A quotient by NaN becomes the positive zero, whatever its sign.
    quotient = (blocks / step.masked_fill_(vanishes, math.nan)).nan_to_num_()
    codes = round_to_codes_(quotient, fmt.element)
    packed = pack_codes(codes, fmt.element.bits)
    return packed, byte.masked_fill_(~finite, fmt.scale.nan).to(torch.uint8)


def dynamic_global_scale_ref(x: Tensor, fmt: Format) -> Tensor:
    """Return the stored global scale [1] for the amax of the finite values of x."""
    if not fmt.has_global_scale:
        return x.new_ones(1, dtype=torch.float32)
    finite = x.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    amax = finite.abs_().amax().view(1) if x.numel() else finite.new_zeros(1)
    found = power_reaching(amax, fmt.scale.max * fmt.element.max)
    return found if fmt.multiplies else 1.0 / found


def _gelu_new(x: Tensor) -> Tensor:
    """Return GELU by tanh, each step rounded to x's dtype, as transformers' GPT2 writes it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


# By the name that crosses the operator.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": _gelu_new,
}


def activate_quantize_ref(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
    *,
    quantize: Quantize = quantize_ref,
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of x [..., K], times `up` [..., K] if given, as eager PyTorch."""
    active = ACTIVATIONS[activation](x)
    return quantize(active if up is None else active * up, global_scale, fmt, scale_method)


# By the name that crosses the operator: functions of x, weight, bias and eps.
NORMS: dict[str, Callable[..., Tensor]] = {
    "rms": lambda x, weight, bias, eps: rms_norm_ref(x, weight, eps),
    "layer": lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
}


def norm_quantize_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
    *,
    quantize: Quantize = quantize_ref,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the norm of x [..., K], or of x + residual: that sum, codes and scale bits."""
    # kind: of NORMS. The sum is rounded to the dtype of x, and empty, [0], without a residual.
    total = x.new_empty(0) if residual is None else (x + residual).contiguous()
    normal = NORMS[kind](x if residual is None else total, weight, bias, eps)
    return total, *quantize(normal, global_scale, fmt, scale_method)
