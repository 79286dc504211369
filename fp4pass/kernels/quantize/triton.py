"""Quantize activations, or a function of them, on a GPU: a lane takes a block."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...core.formats import Format
from ...core.packing import empty_blocks
from ..common.tiles import (
    DTYPES,
    LAUNCH,
    PTX,
    as_words,
    bits_of,
    cdiv,
    float_of,
    load_block,
    overlapping,
    rounded,
    unpack_word,
    wait,
)
from .block_tiles import load_global_scale, quantize_block, store_block, word_count
from .word_tiles import fma_pairs, max_over_pair, max_pairs, pack_word, scale_word

# A program is two warps; a lane reads so many bytes of blocks. Measured on an H200.
_LANES, _WARPS, _LANE_BYTES = 64, 2, 64

# Words that a lane reads at a time for the amax, and programs: enough to fill any GPU.
_AMAX_LANES, _AMAX_WORDS, _AMAX_PROGRAMS = 256, 8, 1056


def quantize_triton(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize activations in blocks along their last dimension (`quantize_ref`): the same bits."""
    packed, scale = empty_blocks(x, fmt)
    if blocks := scale.numel():
        words = as_words(x)
        tiles = max(1, _LANE_BYTES * blocks // (8 * words.numel()))
        _quantize_kernel[(cdiv(blocks, _LANES * tiles),)](
            *(words, global_scale, packed.view(torch.int64), scale, blocks),
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            SEARCHES=scale_method == "sse",
            LANES=_LANES,
            TILES=tiles,
            num_warps=_WARPS,
            **LAUNCH,
            **overlapping(x.device, False),
        )
    return packed, scale


@triton.jit(do_not_specialize=["blocks"])
def _quantize_kernel(
    words,
    stored,
    packed,
    scale,
    blocks,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    wait(OVERLAP, RELEASES)
    global_scale = load_global_scale(stored, FMT)
    # Backwards: the end of x is still in the cache after the pass for its amax.
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    first = program * (TILES * LANES) + tl.arange(0, LANES)
    # All loads go out before the first store, which they may not pass.
    tiles = ()
    for i in tl.static_range(TILES):
        block = first + i * LANES
        tiles = tiles + (load_block(words, block, block < blocks, word_count(FMT.block, DTYPE)),)
    for i in tl.static_range(TILES):
        block = first + i * LANES
        byte, codes = quantize_block(tiles[i], global_scale, DTYPE, FMT, SEARCHES)
        store_block(packed, scale, block, block < blocks, byte, codes)


def dynamic_global_scale_triton(x: Tensor, fmt: Format) -> Tensor:
    """Return the global scale for the amax of x (`dynamic_global_scale_ref`): the same bits."""
    if not fmt.has_global_scale:
        return x.new_ones(1, dtype=torch.float32)
    words = as_words(x) if x.numel() else x.new_empty(0, dtype=torch.int64)
    stored = x.new_empty(1, dtype=torch.float32)
    programs = cdiv(words.numel(), _AMAX_LANES * _AMAX_WORDS)
    programs = min(max(programs, 1), _AMAX_PROGRAMS)
    _dynamic_global_scale_kernel[(programs,)](
        *(words, x.new_zeros(2, dtype=torch.int32), stored, words.numel()),
        DTYPE=DTYPES.get(x.dtype, tl.float32),
        FMT=fmt,
        LANES=_AMAX_LANES,
        WORDS=_AMAX_WORDS,
        num_warps=8,
        **LAUNCH,
    )
    return stored


@triton.jit(do_not_specialize=["count"])
def _dynamic_global_scale_kernel(
    words,
    state,
    stored,
    count,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """state: int32 [2], zeroed: the bits of the amax so far, and how many programs are done."""
    programs = tl.num_programs(0)
    lane = tl.arange(0, LANES)
    start = tl.program_id(0).to(tl.int64) * (LANES * WORDS)
    largest = tl.zeros((LANES,), tl.int32)
    while start < count:
        at = ()
        for i in tl.static_range(WORDS):
            index = start + i * LANES + lane
            at = at + (tl.load(words + index, mask=index < count, other=0),)
        for i in tl.static_range(WORDS):
            largest = max_finite(largest, at[i], DTYPE)
        start += programs.to(tl.int64) * (LANES * WORDS)
    tl.atomic_max(state, tl.max(max_over_pair(largest, DTYPE), axis=0))
    if tl.atomic_add(state + 1, 1) == programs - 1:
        tl.store(stored, stored_global_scale(tl.atomic_max(state, 0), FMT))


@triton.jit
def stored_global_scale(bits, FMT: tl.constexpr):
    """Return the global scale for the float bits of a finite amax >= 0, as it is stored."""
    exponent = (bits >> 23) - 126
    FULL: tl.constexpr = full_bits(FMT)
    above = ((bits & 0x7FFFFF) > (FULL & 0x7FFFFF)).to(tl.int32)
    k = tl.minimum(tl.maximum(exponent - ((FULL >> 23) - 126) + above, -126), 126)
    if not FMT.multiplies:
        k = -k
    return tl.where(bits == 0, 1.0, float_of((127 + k) << 23))


@triton.constexpr_function
def full_bits(FMT):
    """Return the float32 bits of the largest value at a global scale of 1."""
    mantissa, exponent = math.frexp(FMT.scale.max * FMT.element.max)
    return round((mantissa * 2 - 1) * 2**23) | (exponent + 126) << 23


@triton.jit
def max_finite(largest, word, DTYPE: tl.constexpr):
    """Return the larger of `largest` and the float bits of what is finite in a word."""
    # For bfloat16 both halves of `largest` hold a maximum of their own (`max_over_pair`).
    if PTX and DTYPE == tl.bfloat16:
        for half in tl.static_range(2):
            magnitude = (word >> (32 * half)).to(tl.int32) & 0x7FFF7FFF
            # x + 0 x is NaN where x is not finite, and the maximum ignores NaN.
            largest = max_pairs(largest, fma_pairs(magnitude, 0, magnitude), False)
    else:
        values = unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            # Bits of NaN and infinity become negative.
            bits = (bits_of(values[i]) & 0x7FFFFFFF) + 0x800000
            largest = tl.maximum(largest, bits - tl.where(bits < 0, 0, 0x800000))
    return largest


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
    places = (rows.stride(0), rows.storage_offset())
    if rows.stride(1) != 1 or rows.data_ptr() % 8 or any(place % each for place in places):
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
    """Quantize activations of LANES blocks; with BLOCKS, those of a row, rows are gaps apart."""
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
    # Next to -1 its last bit decides the value of GELU.
    if PTX:
        y = libdevice.tanh(x)
    else:
        shrunk = tl.exp(-2.0 * tl.abs(x))
        y = tl.math.div_rn(1.0 - shrunk, 1.0 + shrunk)
        y = tl.where(x < 0, -y, y)
    return y
