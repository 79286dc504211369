"""An activation function, gated or not, and quantization in one pass: a lane takes a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...core.formats import Format
from ...core.quant_state import empty_blocks
from ..common.tiles import DTYPES, LAUNCH, PTX, as_words, cdiv, load_block, rounded, unpack_word
from .block_tiles import load_global_scale, quantize_block, store_block, word_count
from .word_tiles import pack_word, scale_word

# A program is two warps, as that of triton.py.
_LANES, _WARPS = 64, 2


def activate_quantize_triton(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    global_scale: Tensor | None,
    fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of `x`, times `up` if it is given (`activate_quantize_ref`)."""
    # A gate and up that are slices of one tensor are read where they are.
    packed, scale = empty_blocks(x, fmt)
    if blocks := scale.numel():
        words, gap = _words_and_gap(x)
        up_words, up_gap = (None, 0) if up is None else _words_and_gap(up)
        strided = gap != 0 or up_gap != 0
        _activate_quantize_kernel[(cdiv(blocks, _LANES),)](
            *(words, up_words, gap if strided else None, up_gap if strided else None),
            *(global_scale, packed.view(torch.int64), scale, blocks),
            BLOCKS=scale.shape[-1] if strided else None,
            ACTIVATION=activation,
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            SEARCHES=scale_method == "sse",
            LANES=_LANES,
            num_warps=_WARPS,
            **LAUNCH,
        )
    return packed, scale


def _words_and_gap(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., K] as int64 words, and how many lie between the ends of two rows."""
    # Copied unless it is rows of whole words at equal distances.
    rows = (x.float() if x.dtype == torch.float64 else x).reshape(-1, x.shape[-1])
    each = 8 // rows.element_size()
    places = (rows.stride(0), rows.storage_offset(), rows.data_ptr() // rows.element_size())
    if rows.stride(1) != 1 or any(place % each for place in places):
        return as_words(rows), 0
    return rows.view(torch.int64), (rows.stride(0) - rows.shape[1]) // each


@triton.jit(do_not_specialize=["blocks"])
def _activate_quantize_kernel(
    words,
    up,
    gap,
    up_gap,
    stored,
    packed,
    scale,
    blocks,
    BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
):
    """up: None where there is none. Where BLOCKS, a row's, is given, rows are gaps apart."""
    COUNT: tl.constexpr = word_count(FMT.block, DTYPE)
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = block < blocks
    if BLOCKS is not None:
        row = block // BLOCKS
        words += row * gap
        if up is not None:
            up += row * up_gap
    x = load_block(words, block, mask, COUNT)
    if up is None:
        factors = ()
    else:
        factors = load_block(up, block, mask, COUNT)
    active = ()
    for i in tl.static_range(COUNT):
        values = activate(unpack_word(x[i], DTYPE), ACTIVATION, DTYPE)
        if up is None:
            word = pack_word(values, DTYPE)
        else:
            word = scale_word(values, factors[i], DTYPE)
        active = active + (word,)
    byte, codes = quantize_block(active, load_global_scale(stored, FMT), DTYPE, FMT, SEARCHES)
    store_block(packed, scale, block, mask, byte, codes)


@triton.jit
def activate(values, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the activations of float32 values, tuples, before the last rounding to DTYPE."""
    active = ()
    for i in tl.static_range(len(values)):
        x = values[i]
        if ACTIVATION == "silu":
            y = tl.math.div_rn(x, 1.0 + exp(-x))
        elif ACTIVATION == "gelu":
            y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
        elif ACTIVATION == "gelu_tanh":
            inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
            y = 0.5 * x * (1.0 + tanh(inner))
        else:
            tl.static_assert(ACTIVATION == "gelu_new")
            cube = narrow(narrow(x * x, DTYPE) * x, DTYPE)
            inner = narrow(x + narrow(0.044715 * cube, DTYPE), DTYPE)
            inner = narrow(0.7978845608028654 * inner, DTYPE)
            y = narrow(0.5 * x, DTYPE) * narrow(1.0 + narrow(tanh(inner), DTYPE), DTYPE)
        active = active + (y,)
    return active


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Return float32 values rounded to DTYPE."""
    return rounded(x, DTYPE).to(tl.float32)


@triton.jit
def exp(x):
    """Return e^x of float32 values, by the function of eager PyTorch."""
    if PTX:
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32 values, by the function of eager PyTorch."""
    # Next to -1 its last bit decides what GELU is.
    if PTX:
        y = libdevice.tanh(x)
    else:
        shrunk = tl.exp(-2.0 * tl.abs(x))
        y = tl.math.div_rn(1.0 - shrunk, 1.0 + shrunk)
        y = tl.where(x < 0, -y, y)
    return y
