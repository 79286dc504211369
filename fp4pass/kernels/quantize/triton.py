"""Quantize activations, or a function of them, on a GPU.

Of 4-bit codes a lane takes a block, and after a norm a program takes rows. Of E4M3 codes a program
takes a row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...core.formats import WHOLE, Format
from ...core.packing import empty_blocks
from ..common import tiles as kit
from . import tiles as lanes
from .naive import activate_quantize_ref, norm_quantize_ref, quantize_ref

# The operators of this file ask for it by this name: E4M3 codes have kernels here, too.
supports = kit.supports_any

# A program is two warps; a lane reads so many bytes of blocks. Measured on an H200.
_LANES, _WARPS, _LANE_BYTES = 64, 2, 64

# Words that a lane reads at a time for the amax, and programs: enough to fill any GPU.
_AMAX_LANES, _AMAX_WORDS, _AMAX_PROGRAMS = 256, 8, 1056

# Columns of E4M3 codes that a program holds in registers; the reference takes longer rows.
_WIDEST = 1 << 16


def _serves(x: Tensor, fmt: Format, scale_method: str) -> bool:
    """Return whether a kernel takes x: of E4M3 codes, those that fit, with naive scales."""
    fits = scale_method == "naive" and 0 < x.shape[-1] <= _WIDEST
    return x.dtype in kit.DTYPES and (fmt.element.bits == 4 or fits)


def quantize_triton(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize activations in blocks along their last dimension (`quantize_ref`): the same bits."""
    if fmt.element.bits == 8:
        if not _serves(x, fmt, scale_method):
            return quantize_ref(x, global_scale, fmt, scale_method)
        return _quantize_rows(x, None, None, None, "", 0.0, global_scale, fmt)[1:]
    packed, scale = empty_blocks(x, fmt)
    if blocks := scale.numel():
        words = kit.as_words(x)
        tiles = max(1, _LANE_BYTES * blocks // (8 * words.numel()))
        _quantize_kernel[(kit.cdiv(blocks, _LANES * tiles),)](
            *(words, global_scale, packed.view(torch.int64), scale, blocks),
            DTYPE=kit.DTYPES.get(x.dtype, tl.float32), FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=_LANES, TILES=tiles, num_warps=_WARPS, **kit.launch(x.device),
        )  # fmt: skip
    return packed, scale


@triton.jit(do_not_specialize=["blocks"])
def _quantize_kernel(
    words, stored, packed, scale, blocks, DTYPE: tl.constexpr, FMT: tl.constexpr,
    SEARCHES: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    kit.wait(OVERLAP, RELEASES)
    global_scale = lanes.load_global_scale(stored, FMT)
    # Backwards: the end of x is still in the cache after the pass for its amax.
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    first = program * (TILES * LANES) + tl.arange(0, LANES)
    # All loads go out before the first store, which they may not pass.
    tiles = ()
    for i in tl.static_range(TILES):
        block = first + i * LANES
        tiles = tiles + (
            kit.load_block(words, block, block < blocks, lanes.word_count(FMT.block, DTYPE)),
        )
    for i in tl.static_range(TILES):
        block = first + i * LANES
        byte, codes = lanes.quantize_block(tiles[i], global_scale, DTYPE, FMT, SEARCHES)
        lanes.store_block(packed, scale, block, block < blocks, byte, codes)


def dynamic_global_scale_triton(x: Tensor, fmt: Format) -> Tensor:
    """Return the global scale for the amax of x (`dynamic_global_scale_ref`): the same bits."""
    if not fmt.has_global_scale:
        return x.new_ones(1, dtype=torch.float32)
    words = kit.as_words(x) if x.numel() else x.new_empty(0, dtype=torch.int64)
    stored = x.new_empty(1, dtype=torch.float32)
    programs = kit.cdiv(words.numel(), _AMAX_LANES * _AMAX_WORDS)
    programs = min(max(programs, 1), _AMAX_PROGRAMS)
    _dynamic_global_scale_kernel[(programs,)](
        *(words, x.new_zeros(2, dtype=torch.int32), stored, words.numel()),
        DTYPE=kit.DTYPES.get(x.dtype, tl.float32), FMT=fmt, LANES=_AMAX_LANES, WORDS=_AMAX_WORDS,
        num_warps=8, **kit.LAUNCH,
    )  # fmt: skip
    return stored


@triton.jit(do_not_specialize=["count"])
def _dynamic_global_scale_kernel(
    words, state, stored, count, DTYPE: tl.constexpr, FMT: tl.constexpr, LANES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
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
    tl.atomic_max(state, tl.max(lanes.max_over_pair(largest, DTYPE), axis=0))
    if tl.atomic_add(state + 1, 1) == programs - 1:
        bits = tl.atomic_max(state, 0)
        exponent = (bits >> 23) - 126
        FULL: tl.constexpr = full_bits(FMT)
        above = ((bits & 0x7FFFFF) > (FULL & 0x7FFFFF)).to(tl.int32)
        k = tl.minimum(tl.maximum(exponent - ((FULL >> 23) - 126) + above, -126), 126)
        if not FMT.multiplies:
            k = -k
        tl.store(stored, tl.where(bits == 0, 1.0, kit.float_of((127 + k) << 23)))


@triton.constexpr_function
def full_bits(FMT):
    """Return the float32 bits of the largest value at a global scale of 1."""
    mantissa, exponent = math.frexp(FMT.scale.max * FMT.element.max)
    return round((mantissa * 2 - 1) * 2**23) | (exponent + 126) << 23


@triton.jit
def max_finite(largest, word, DTYPE: tl.constexpr):
    """Return the larger of `largest` and the float bits of what is finite in a word."""
    # For bfloat16 both halves of `largest` hold a maximum of their own (`max_over_pair`).
    if kit.PTX and DTYPE == tl.bfloat16:
        for half in tl.static_range(2):
            magnitude = (word >> (32 * half)).to(tl.int32) & 0x7FFF7FFF
            # x + 0 x is NaN where x is not finite, and the maximum ignores NaN.
            largest = lanes.max_pairs(largest, lanes.fma_pairs(magnitude, 0, magnitude), False)
    else:
        values = kit.unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            # Bits of NaN and infinity become negative.
            bits = (kit.bits_of(values[i]) & 0x7FFFFFFF) + 0x800000
            largest = tl.maximum(largest, bits - tl.where(bits < 0, 0, 0x800000))
    return largest


def activate_quantize_triton(
    x: Tensor, up: Tensor | None, activation: str, global_scale: Tensor | None, fmt: Format,
    scale_method: str = "naive",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize the activation of `x`, times `up` if it is given (`activate_quantize_ref`)."""
    if not _serves(x, fmt, scale_method):
        given = (x, up, activation, global_scale, fmt, scale_method)
        return activate_quantize_ref(*given, quantize=quantize_triton)
    if fmt.element.bits == 8:
        return _quantize_rows(x, up, None, None, activation, 0.0, global_scale, fmt)[1:]
    # A gate and up that are slices of one tensor are read where they are.
    packed, scale = empty_blocks(x, fmt)
    if blocks := scale.numel():
        words, gap = _words_and_gap(x)
        up_words, up_gap = (None, 0) if up is None else _words_and_gap(up)
        strided = gap != 0 or up_gap != 0
        _activate_quantize_kernel[(kit.cdiv(blocks, _LANES),)](
            *(words, up_words, gap if strided else None, up_gap if strided else None),
            *(global_scale, packed.view(torch.int64), scale, blocks),
            BLOCKS=scale.shape[-1] if strided else None, ACTIVATION=activation,
            DTYPE=kit.DTYPES[x.dtype], FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=_LANES, num_warps=_WARPS, **kit.LAUNCH,
        )  # fmt: skip
    return packed, scale


def _words_and_gap(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., K] as int64 words, and how many lie between the ends of two rows."""
    # Copied unless it is rows of whole words at equal distances.
    rows = x.reshape(-1, x.shape[-1])
    each = 8 // rows.element_size()
    places = (rows.stride(0), rows.storage_offset())
    if rows.stride(1) != 1 or rows.data_ptr() % 8 or any(place % each for place in places):
        return kit.as_words(rows), 0
    return rows.view(torch.int64), (rows.stride(0) - rows.shape[1]) // each


@triton.jit(do_not_specialize=["blocks"])
def _activate_quantize_kernel(
    words, up, gap, up_gap, stored, packed, scale, blocks, BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr, SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Quantize activations of LANES blocks; with BLOCKS, those of a row, rows are gaps apart."""
    COUNT: tl.constexpr = lanes.word_count(FMT.block, DTYPE)
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = block < blocks
    if BLOCKS is not None:
        row = block // BLOCKS
        words += row * gap
        if up is not None:
            up += row * up_gap
    x = kit.load_block(words, block, mask, COUNT)
    if up is None:
        factors = ()
    else:
        factors = kit.load_block(up, block, mask, COUNT)
    active = ()
    for i in tl.static_range(COUNT):
        values = activate(kit.unpack_word(x[i], DTYPE), ACTIVATION, DTYPE)
        if up is None:
            word = lanes.pack_word(values, DTYPE)
        else:
            word = lanes.scale_word(values, factors[i], DTYPE)
        active = active + (word,)
    byte, codes = lanes.quantize_block(
        active, lanes.load_global_scale(stored, FMT), DTYPE, FMT, SEARCHES
    )
    lanes.store_block(packed, scale, block, mask, byte, codes)


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
    return kit.rounded(x, DTYPE).to(tl.float32)


@triton.jit
def exp(x):
    """Return e^x of float32 values, by the function of eager PyTorch."""
    if kit.PTX:
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32 values, by the function of eager PyTorch."""
    # Next to -1 its last bit decides the value of GELU.
    if kit.PTX:
        y = libdevice.tanh(x)
    else:
        shrunk = tl.exp(-2.0 * tl.abs(x))
        y = tl.math.div_rn(1.0 - shrunk, 1.0 + shrunk)
        y = tl.where(x < 0, -y, y)
    return y


# Warps of all programs: 16 on each multiprocessor of an H200, whose registers they fill.
_NORM_WARPS = 16 * 132


def norm_quantize_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str,
    eps: float, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize the norm of x, or of x + residual, and return that sum (`norm_quantize_ref`)."""
    # Means are summed in another order than there: inputs differ by a rounding.
    if not _serves(x, fmt, scale_method):
        given = (x, residual, weight, bias, kind, eps, global_scale, fmt, scale_method)
        return norm_quantize_ref(*given, quantize=quantize_triton)
    if fmt.element.bits == 8:
        return _quantize_rows(x, residual, weight, bias, kind, eps, global_scale, fmt)
    total = x.new_empty(0 if residual is None else x.shape)
    packed, scale = empty_blocks(x, fmt)
    blocks = x.shape[-1] // fmt.block
    if packed.numel():
        rows = scale.numel() // blocks
        width, warps = _lanes_and_warps(blocks)
        _norm_quantize_kernel[(min(rows, _NORM_WARPS // warps),)](
            *(None if each is None else kit.as_words(each) for each in (x, residual, weight, bias)),
            *(global_scale, None if residual is None else kit.as_words(total)),
            *(packed.view(torch.int64), scale, rows, eps), BLOCKS=blocks, CENTER=kind == "layer",
            DTYPE=kit.DTYPES[x.dtype], FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=width, num_warps=warps, **kit.LAUNCH,
        )  # fmt: skip
    return total, packed, scale


def _lanes_and_warps(blocks: int) -> tuple[int, int]:
    """Return the lanes and warps of a program, for rows of so many blocks: measured on an H200."""
    # Rows that nearly fill a power of two of lanes are held in registers. Others are read twice,
    # in parts of as many lanes as leave few of the last part idle.
    whole = max(triton.next_power_of_2(blocks), 32)
    if whole == 32 or (whole <= 256 and blocks >= whole * 3 // 4):
        return whole, max(1, whole // 64)
    for width in (128, 64):
        if kit.cdiv(blocks, width) * width <= blocks * 9 // 8:
            return width, width // 32
    return 32, 1


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_kernel(
    words, residual, weight, bias, stored, total, packed, scale, rows, eps, BLOCKS: tl.constexpr,
    CENTER: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr, SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """residual, weight, bias, stored: None where there is none; total: None without residual."""
    COUNT: tl.constexpr = lanes.word_count(FMT.block, DTYPE)
    HELD: tl.constexpr = BLOCKS <= LANES
    COLUMNS: tl.constexpr = BLOCKS * FMT.block
    lane = tl.arange(0, LANES)
    global_scale = lanes.load_global_scale(stored, FMT)
    row = tl.program_id(0).to(tl.int64)
    if HELD:
        mask = lane < BLOCKS
        weights = load_if_any(weight, lane, mask, COUNT)
        biases = load_if_any(bias, lane, mask, COUNT)
        ahead = kit.load_block(words, row * BLOCKS + lane, mask, COUNT)
        beside = load_if_any(residual, row * BLOCKS + lane, mask, COUNT)
    while row < rows:
        first = row * BLOCKS
        row += tl.num_programs(0)
        squares = tl.zeros((LANES,), tl.float32)
        if HELD:
            now, added = ahead, beside
            # The next row's loads, or the last's again, go out before this row's work.
            block = tl.minimum(row, rows - 1) * BLOCKS + lane
            ahead = kit.load_block(words, block, mask, COUNT)
            beside = load_if_any(residual, block, mask, COUNT)
            held = add_words(now, added, DTYPE)
            store_words(total, first + lane, mask, held)
            mean = None
            if CENTER:
                mean = mean_of(add_values(squares, held, DTYPE), COLUMNS)
            squares = add_squares(squares, held, mean, mask, DTYPE)
        else:
            mean = None
            if CENTER:
                sums = tl.zeros((LANES,), tl.float32)
                for start in range(0, BLOCKS, LANES):
                    mask = start + lane < BLOCKS
                    x = load_sum(words, residual, first + start + lane, mask, COUNT, DTYPE)
                    sums = add_values(sums, x, DTYPE)
                mean = mean_of(sums, COLUMNS)
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                x = load_sum(words, residual, first + start + lane, mask, COUNT, DTYPE)
                squares = add_squares(squares, x, mean, mask, DTYPE)
        variance = mean_of(squares, COLUMNS)
        inverse = tl.math.rsqrt(variance + eps)
        if HELD:
            normal = normalize(held, weights, biases, mean, inverse, DTYPE)
            byte, codes = lanes.quantize_block(normal, global_scale, DTYPE, FMT, SEARCHES)
            lanes.store_block(packed, scale, first + lane, mask, byte, codes)
        else:
            for start in range(0, BLOCKS, LANES):
                mask = start + lane < BLOCKS
                block = first + start + lane
                x = load_sum(words, residual, block, mask, COUNT, DTYPE)
                each = load_if_any(weight, start + lane, mask, COUNT)
                offset = load_if_any(bias, start + lane, mask, COUNT)
                store_words(total, block, mask, x)
                normal = normalize(x, each, offset, mean, inverse, DTYPE)
                byte, codes = lanes.quantize_block(normal, global_scale, DTYPE, FMT, SEARCHES)
                lanes.store_block(packed, scale, block, mask, byte, codes)


@triton.jit
def mean_of(sums, COUNT: tl.constexpr):
    """Return the sum of a tensor over COUNT, rounded as IEEE division rounds it."""
    total = tl.sum(sums, axis=0)
    if COUNT & (COUNT - 1) == 0:
        mean = total * (1.0 / COUNT)
    else:
        mean = tl.math.div_rn(total, COUNT)
    return mean


@triton.jit
def load_if_any(words, block, mask, COUNT: tl.constexpr):
    """Return the words of one block per lane, a tuple, which is empty where `words` is None."""
    loaded = ()
    if words is not None:
        loaded = kit.load_block(words, block, mask, COUNT)
    return loaded


@triton.jit
def load_sum(words, residual, block, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the words of one block per lane, with those of the residual added to them."""
    x = kit.load_block(words, block, mask, COUNT)
    return add_words(x, load_if_any(residual, block, mask, COUNT), DTYPE)


@triton.jit
def add_words(words, others, DTYPE: tl.constexpr):
    """Return the sums of two blocks, rounded, as words of DTYPE; `words` if `others` is empty."""
    if len(others) > 0:
        sums = ()
        for i in tl.static_range(len(words)):
            x, y = kit.unpack_word(words[i], DTYPE), kit.unpack_word(others[i], DTYPE)
            each = ()
            for j in tl.static_range(len(x)):
                each = each + (x[j] + y[j],)
            sums = sums + (lanes.pack_word(each, DTYPE),)
    else:
        sums = words
    return sums


@triton.jit
def store_words(words, block, mask, values):
    """Store one block of words per lane, unless `words` is None."""
    if words is not None:
        for i in tl.static_range(len(values)):
            tl.store(words + block * len(values) + i, values[i], mask=mask)


@triton.jit
def add_values(sums, words, DTYPE: tl.constexpr):
    """Add a block's values to `sums`."""
    values = kit.unpack_block(words, DTYPE)
    for i in tl.static_range(len(values)):
        sums += values[i]
    return sums


@triton.jit
def add_squares(squares, words, mean, mask, DTYPE: tl.constexpr):
    """Add the squares of a block's values, or of their distances from a mean, to `squares`."""
    # mask: which lanes have values; others hold zeros.
    values = kit.unpack_block(words, DTYPE)
    for i in tl.static_range(len(values)):
        if mean is None:
            squares = tl.fma(values[i], values[i], squares)
        else:
            distance = tl.where(mask, values[i] - mean, 0.0)
            squares = tl.fma(distance, distance, squares)
    return squares


@triton.jit
def normalize(words, weights, biases, mean, inverse, DTYPE: tl.constexpr):
    """Return the norm of a block: words of DTYPE, a tuple."""
    # Without a mean x * inverse is rounded before its product with weight; else only the result is.
    normal = ()
    for i in tl.static_range(len(words)):
        x = kit.unpack_word(words[i], DTYPE)
        if mean is not None:
            values = ()
            for j in tl.static_range(len(x)):
                value = (x[j] - mean) * inverse
                if len(weights) > 0:
                    value *= kit.unpack_word(weights[i], DTYPE)[j]
                if len(biases) > 0:
                    value += kit.unpack_word(biases[i], DTYPE)[j]
                values = values + (value,)
            word = lanes.pack_word(values, DTYPE)
        else:
            values = ()
            for j in tl.static_range(len(x)):
                values = values + (x[j] * inverse,)
            word = lanes.scale_word(values, weights[i], DTYPE)
        normal = normal + (word,)
    return normal


def _quantize_rows(
    x: Tensor, beside: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str,
    eps: float, static: Tensor | None, fmt: Format,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum before a norm, [0] without one, E4M3 codes and scales."""
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
            FMT=fmt, J=blocks, B=width, num_warps=min(16, max(1, blocks * width // 512)),
            CONVERTS=bool(kit.PTX) and kit.capability(x.device) >= (8, 9), **kit.launch(x.device),
        )  # fmt: skip
    return total, codes, scales


@triton.jit
def _e4m3_kernel(
    x, beside, weight, bias, static, total, codes, scales, eps,
    K: tl.constexpr, KIND: tl.constexpr, IS_NORM: tl.constexpr, EACH: tl.constexpr,
    FMT: tl.constexpr, J: tl.constexpr, B: tl.constexpr, CONVERTS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """beside, weight, bias, static, total: None where there is none. EACH: static is of rows."""
    # CONVERTS: whether the GPU rounds float32 to E4M3 by itself.
    kit.wait(OVERLAP, RELEASES)
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
    amax = tl.max(tl.where(inside, kit.bits_of(value) & 0x7FFFFFFF, 0), 1)
    stored, step = kit.scale_of_amax(amax, FMT)
    if static is not None:
        given = tl.load(static + row if EACH else static)
        step = tl.where(amax < 0x7F800000, given, float("nan"))
        stored = step
    tl.store(scales + row * SCALES + block, stored, mask=block < SCALES)
    if CONVERTS:
        quotient = kit.exact_quotient(value, step[:, None])
        # Corrected, a zero has no sign.
        code = (kit.e4m3_bits(quotient) & 0x7F) | ((kit.bits_of(value) >> 24) & 0x80)
        code = tl.where(quotient == quotient, code, 0).to(tl.uint8)
    else:
        code = kit.codes_of(value, step[:, None], ELEMENT)
    tl.store(codes + at, code, mask=inside)


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
