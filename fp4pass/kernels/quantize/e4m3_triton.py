"""Quantize activations to E4M3, alone or after a norm or activation function: a row a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import WHOLE, Format
from ...core.packing import empty_blocks
from ..common.e4m3_tiles import codes_of, scale_of_amax
from ..common.tiles import DTYPES, LAUNCH, bits_of, overlapping, wait
from .naive import activate_quantize_ref, norm_quantize_ref, quantize_ref
from .triton import activate, narrow

# Columns that a program holds in registers; the reference takes longer rows.
_WIDEST = 1 << 16


def quantize_e4m3(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of activations x [..., K] (`quantize_ref`): the same bits."""
    if not _serves(x, scale_method):
        return quantize_ref(x, global_scale, fmt, scale_method)
    return _launch(x, None, None, None, "", 0.0, global_scale, fmt)[1:]


def activate_quantize_e4m3(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of x, times `up` if given (`activate_quantize_ref`)."""
    if not _serves(x, scale_method):
        return activate_quantize_ref(x, up, activation, global_scale, fmt, scale_method)
    return _launch(x, up, None, None, activation, 0.0, global_scale, fmt)[1:]


def norm_quantize_e4m3(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the norm of x, or of x + residual, and return that sum (`norm_quantize_ref`)."""
    # Means are summed in another order than there: inputs differ by a rounding.
    operands = (x, residual, weight, bias, kind, eps, global_scale, fmt)
    if not _serves(x, scale_method):
        return norm_quantize_ref(*operands, scale_method)
    return _launch(*operands)


def _serves(x: Tensor, scale_method: str) -> bool:
    return scale_method == "naive" and x.dtype in DTYPES and 0 < x.shape[-1] <= _WIDEST


def _launch(
    x: Tensor,
    beside: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    static: Tensor | None,
    fmt: Format,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum before a norm, [0] without one, codes and scales."""
    # kind: a norm, before which `beside` is added, an activation, which it multiplies, or "".
    is_norm = kind in ("rms", "layer")
    total = x.new_empty(x.shape if is_norm and beside is not None else 0)
    codes, scales = empty_blocks(x, fmt)
    columns = x.shape[-1]
    if codes.numel():
        # A row has J blocks of B columns; the last may be cut.
        blocks = triton.next_power_of_2(fmt.scale_columns(columns))
        width = triton.next_power_of_2(columns) if fmt.block == WHOLE else fmt.block
        given = (x, beside, weight, bias, static, total if total.numel() else None)
        _e4m3_kernel[(codes.numel() // columns,)](
            *(None if each is None else each.contiguous() for each in given), codes, scales, eps,
            K=columns, KIND=kind, IS_NORM=is_norm, EACH=static is not None and static.numel() > 1,
            FMT=fmt, J=blocks, B=width,
            num_warps=min(16, max(1, blocks * width // 512)),
            **LAUNCH, **overlapping(x.device, False),
        )  # fmt: skip
    return total, codes, scales


@triton.jit
def _e4m3_kernel(
    x, beside, weight, bias, static, total, codes, scales, eps,
    K: tl.constexpr, KIND: tl.constexpr, IS_NORM: tl.constexpr, EACH: tl.constexpr,
    FMT: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """beside, weight, bias, static, total: None where there is none. EACH: static is of rows."""
    wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = x.dtype.element_ty
    ELEMENT: tl.constexpr = FMT.element
    SCALES: tl.constexpr = (K + B - 1) // B
    block = tl.arange(0, J)
    column = block[:, None] * B + tl.arange(0, B)[None, :]
    inside = column < K
    row = tl.program_id(0).to(tl.int64)
    at = row * K + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if IS_NORM:
        if beside is not None:
            value += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
            value = narrow(value, DTYPE)
            tl.store(total + at, value.to(DTYPE), mask=inside)
        value = _normal(value, weight, bias, column, inside, eps, K, KIND == "layer", DTYPE)
    elif KIND != "":
        value = narrow(activate((value,), KIND, DTYPE)[0], DTYPE)
        if beside is not None:
            value = narrow(value * tl.load(beside + at, mask=inside, other=0.0), DTYPE)
    # As integers, for a maximum of floats may drop NaN.
    amax = tl.max(tl.where(inside, bits_of(value) & 0x7FFFFFFF, 0), 1)
    stored, step = scale_of_amax(amax, FMT)
    if static is not None:
        given = tl.load(static + row if EACH else static)
        step = tl.where(amax < 0x7F800000, given, float("nan"))
        stored = step
    tl.store(scales + row * SCALES + block, stored, mask=block < SCALES)
    tl.store(codes + at, codes_of(value, step[:, None], ELEMENT), mask=inside)


@triton.jit
def _normal(
    value, weight, bias, column, inside, eps,
    K: tl.constexpr, CENTER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the norm of a row of float32 values, as eager PyTorch rounds it to DTYPE."""
    if CENTER:
        mean = tl.sum(tl.sum(value, 1), 0) / K
        value = tl.where(inside, value - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / K + eps)
    value = value * inverse
    if not CENTER:
        value = narrow(value, DTYPE)
    if weight is not None:
        value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value = value + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return narrow(value, DTYPE)
