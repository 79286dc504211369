"""Multiply one row in Gluon: each block of codes has a column of a tensor core tile.

The row is in shared memory, normed maybe, and becomes columns of tensor core tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..common import tiles as kit
from ..norm.naive import SQUARES
from ..quantize.triton import narrow
from .decode_triton import code_lines
from .matmul_triton import gate_times_up

# Columns of a row that a sum of squares is of.
_SQUARES = gl.constexpr(SQUARES)

# Triton 3.6 has memory in another shape under a private name, and 3.9 does not.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# Tensor cores multiply 16 weights by 8 columns. Of one row all columns but one would repeat it.
# Here column j has the row where it meets block j, and zeros elsewhere: the sums are those of the
# blocks, and a scale is multiplied once for 16 or 32 codes. Codes are their bits, subnormal numbers
# in bfloat16, so x is multiplied by a power of two to meet them.
_UP = 64

# The exponents that stay in the sums, for elements whose smallest exponent is 0.
_DOWN = 126 - _UP


@triton.constexpr_function
def _decoding(FMT):
    """Return PTX for a word of codes as four pairs i, i + 4 of bfloat16, times 2^-126."""
    lines = code_lines(FMT, [f"${code}" for code in range(4)])
    return "".join(["{.reg .b32 t, u; mov.b32 t, $4;", *lines, "}"])


@triton.constexpr_function
def _rest(FMT):
    """Return the power of two that sums lack."""
    return 2.0 ** (_DOWN + FMT.element.minifloat[1])


@triton.constexpr_function
def power_of_two(count):
    """Return the least power of two from `count` on."""
    return 1 << max(count - 1, 0).bit_length()


@triton.jit
def normed(x, inverse, weight, DTYPE: tl.constexpr):
    """Return x times an inverse and a weight, rounded to DTYPE after each."""
    normal = narrow(x.to(tl.float32) * inverse, DTYPE)
    return kit.rounded(normal * weight.to(tl.float32), DTYPE)


@gluon.jit
def along(axis: gl.constexpr, count: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 0 to count - 1 along an axis of three."""
    if axis == 0:
        index = gl.arange(0, count, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    elif axis == 1:
        index = gl.arange(0, count, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    else:
        index = gl.arange(0, count, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return index


@gluon.jit
def halves_of(pairs):
    """Return 32-bit registers as the two bfloat16 in them."""
    low = (pairs & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return low, high


@gluon.jit
def _load_row(x, FIRST: gl.constexpr, STOP: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Return parts FIRST to STOP - 1 of a row: eight columns for each thread, zeros beyond K."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
    loaded = ()
    for i in gl.static_range(FIRST, STOP):
        eight = i * (32 * WARPS) + thread
        is_there = (eight < K // 8) & (column >= 0)
        loaded = loaded + (gl.load(x + (eight * 8 + column), mask=is_there, other=0.0),)
    return loaded


@gluon.jit
def inverse_norm(norm, K: gl.constexpr, WARPS: gl.constexpr):
    """Return 1 / the root mean square of a row, given sums of its squares."""
    COUNT: gl.constexpr = (K + _SQUARES - 1) // _SQUARES
    # Each warp adds all of them, and waits for no other.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    i = gl.arange(0, power_of_two(COUNT), gl.SliceLayout(0, LAYOUT))
    squares = gl.load(norm.squares + i, mask=i < COUNT, other=0.0)
    return tl.math.rsqrt(tl.math.div_rn(gl.sum(squares, 0), K) + norm.eps)


@gluon.jit
def stage(x, norm, K: gl.constexpr, WARPS: gl.constexpr, BLOCK: gl.constexpr):
    """Return shared memory that holds the row, times 2^64, by steps: pairs i, i + 4 of a word."""
    # norm: None, or the RowNorm that makes the row from x.
    PARTS: gl.constexpr = (K // 8 + 32 * WARPS - 1) // (32 * WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = gl.allocate_shared_memory(gl.int32, [PARTS, 32 * WARPS, 4], PLAIN)
    for start in gl.static_range(0, PARTS, 8):
        stop: gl.constexpr = min(start + 8, PARTS)
        # Loads first.
        loaded = _load_row(x, start, stop, K, WARPS)
        if norm is not None:
            gains = _load_row(norm.weight, start, stop, K, WARPS)
            inverse = inverse_norm(norm, K, WARPS)
        for i in gl.static_range(start, stop):
            row = loaded[i - start]
            if norm is not None:
                row = normed(row, inverse, gains[i - start], row.dtype)
            row = (row * 2.0**64).to(gl.bfloat16).reshape((32 * WARPS, 2, 4))
            low, high = gl.split(row.permute((0, 2, 1)))
            low = low.to(gl.uint16, bitcast=True).to(gl.int32)
            high = high.to(gl.uint16, bitcast=True).to(gl.int32)
            memory.index(i).store(low | high << 16)
    steps: gl.constexpr = [PARTS * 32 // BLOCK, WARPS, 8, BLOCK // 2]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if _IS_PUBLIC:
        staged = memory.reinterpret(gl.int32, steps, LAYOUT)
    else:
        staged = memory._reinterpret(gl.int32, steps, LAYOUT)
    return staged


@gluon.jit
def columns(staged, BLOCK: gl.constexpr, X: gl.constexpr):
    """Return a step of the row where each column meets its block: [warps, 8 BLOCK, 8]."""
    WARPS: gl.constexpr = staged.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, BLOCK // 2], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    # [warps, column, block, pair]
    row = gl.expand_dims(staged.load(gl.SliceLayout(2, LAYOUT)), 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OF_BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    column = gl.arange(0, 8, COLUMN)[None, :, None, None]
    row, meet = gl.broadcast(row, column == gl.arange(0, 8, OF_BLOCK)[None, None, :, None])
    low, high = halves_of(gl.where(meet, row, 0))
    # As the codes of a thread lie: words, pairs of a word, and the two of a pair.
    row = gl.join(low, high).reshape((WARPS, 8, 4, BLOCK // 4, 2, 2, 2))
    row = row.permute((0, 3, 4, 5, 2, 6, 1)).reshape((WARPS, 8 * BLOCK, 8))
    return gl.convert_layout(row, X, assert_trivial=True)


@gluon.jit
def _row_starts(
    pointers, starts, program, first, N, i, WIDTH: gl.constexpr, BN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Return where the rows i of the BN that a program multiplies begin."""
    # GATED: the first half of them are those of a gate, the others those of its factor.
    if GATED:
        n = gl.minimum(first + i % (BN // 2), N - 1).to(gl.int64) * WIDTH
        found = gl.where(i < BN // 2, pointers[0] + n, pointers[1] + n)
    else:
        n = gl.minimum(first + i, N - 1).to(gl.int64) * WIDTH
        found = kit.chosen(pointers, starts, program) + n
    return found


@gluon.jit
def _pairs(word, FMT: gl.constexpr):
    return gl.inline_asm_elementwise(
        _decoding(FMT), "=r,=r,=r,=r,r", [word], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def _scale_of(byte, FMT: gl.constexpr):
    """Return the float32 numbers for scale bytes."""
    if FMT.scale.subnormal:
        value = byte.to(gl.float8e4nv, bitcast=True).to(gl.float32)
    else:
        # Byte 0 is a subnormal number, and the last one is NaN.
        bits = gl.where(byte == 0, 0x00400000, byte.to(gl.int32) << 23)
        value = gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return value


@gluon.jit
def _grid(CODE: gl.constexpr):
    """Run an instruction on the order of kernels (`wait` in tiles.py)."""
    gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_codes(words, scales, of_word, of_scale, step, K: gl.constexpr, FMT: gl.constexpr):
    """Load a step of codes and scales; beyond K those of the last step, which meet zeros."""
    # words, scales: where the rows begin. of_word, of_scale: their warp, and where they are in it.
    BLOCK: gl.constexpr = FMT.block
    COUNT: gl.constexpr = K // (8 * BLOCK)
    word_step, scale_step = step + of_word[0], step + of_scale[0]
    if COUNT % of_word[0].shape[0] != 0:
        word_step = gl.minimum(word_step, COUNT - 1)
        scale_step = gl.minimum(scale_step, COUNT - 1)
    word = gl.load(words + (word_step * BLOCK + of_word[1]))
    byte = gl.load(scales + (scale_step * 8 + of_scale[1]))
    return word, byte


@gluon.jit
def _block_sums(word, x, FMT: gl.constexpr, L: gl.constexpr):
    """Return the sums of codes times x over each block, [warps, BN, 8]."""
    BLOCK: gl.constexpr = FMT.block
    WARPS: gl.constexpr = word.shape[0]
    BN: gl.constexpr = word.shape[1]
    p = _pairs(word, FMT)
    low, high = halves_of(gl.join(gl.join(p[0], p[2]), gl.join(p[1], p[3])))
    codes = gl.join(low, high).reshape((WARPS, BN, 4, BLOCK // 4, 2, 2, 2))
    codes = codes.permute((0, 1, 3, 4, 5, 2, 6)).reshape((WARPS, BN, 8 * BLOCK))
    codes = gl.convert_layout(codes, gl.DotOperandLayout(0, L, 2), assert_trivial=True)
    return mma_v2(codes, x, gl.zeros((WARPS, BN, 8), gl.float32, L))


@gluon.jit
def _plain_sums(
    x, norm, weights, starts, program, first, N, K: gl.constexpr, FMT: gl.constexpr,
    BN: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Return the sums over K, of any x, one product at a time: [BN]."""
    # A word a thread, so that the kernel has no registers for this.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [WARPS, 1, 1], [2, 1, 0])
    row = along(1, BN, LAYOUT)
    words = _row_starts(weights.packed, starts, program, first, N, row, K // 8, BN, GATED)
    scales = _row_starts(weights.scale, starts, program, first, N, row, K // FMT.block, BN, GATED)
    column = along(0, WARPS, LAYOUT) * 2 + along(2, 2, LAYOUT)
    acc = gl.zeros((WARPS, BN, 2), gl.float32, LAYOUT)
    inverse = 1.0
    if norm is not None:
        inverse = inverse_norm(norm, K, WARPS)
    for start in range(0, K // 8, 2 * WARPS):
        at = gl.minimum(start + column, K // 8 - 1)
        scale = _scale_of(gl.load(scales + at // (FMT.block // 8)), FMT)
        pairs = _pairs(gl.load(words + at), FMT)
        for i in gl.static_range(4):
            low, high = halves_of(pairs[i])
            one = _input(x, norm, inverse, 8 * at + i)
            other = _input(x, norm, inverse, 8 * at + i + 4)
            more = low.to(gl.float32) * 2.0**126 * scale * one
            more += high.to(gl.float32) * 2.0**126 * scale * other
            acc += gl.where(start + column < K // 8, more, 0.0)
    return gl.sum(gl.sum(acc, 2), 0)


@gluon.jit
def _input(x, norm, inverse, k):
    """Return the columns k of the row in float32."""
    value = gl.load(x + k)
    if norm is not None:
        value = normed(value, inverse, gl.load(norm.weight + k), value.dtype)
    return value.to(gl.float32)


@gluon.jit
def one_row_kernel(
    x, norm, weights, residual, outs, squares, sizes, starts,
    K: gl.constexpr, FMT: gl.constexpr, TILES: gl.constexpr, ACTIVATION: gl.constexpr,
    OVERLAP: gl.constexpr, RELEASES: gl.constexpr,
):  # fmt: skip
    """Multiply a row of bfloat16 and weights, of several tensors maybe; the warps share K."""
    # norm: a RowNorm that x still needs, or None. residual: what the row of one weight is added to,
    # or None; then `squares` gets the sum of the squares of each program's columns. ACTIVATION: of
    # a gate, whose weight is the first one and its factor's the second, with one result; or None.
    # AHEAD: steps whose codes are loaded before they are used, the first of them before the kernel
    # in front of this one has ended: only kernels that write no weights let another start early.
    BN: gl.constexpr = TILES.n
    WARPS: gl.constexpr = TILES.warps
    AHEAD: gl.constexpr = TILES.stages
    BLOCK: gl.constexpr = FMT.block
    STEPS: gl.constexpr = (K // (8 * BLOCK) + WARPS - 1) // WARPS
    # Steps in a loop, which load others.
    LOOP: gl.constexpr = max(STEPS - AHEAD, 0) // AHEAD * AHEAD
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    LW: gl.constexpr = gl.BlockedLayout([1, 1, BLOCK // 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    GATED: gl.constexpr = ACTIVATION is not None
    program = gl.program_id(0)
    N = kit.chosen(sizes, starts, program)
    out = kit.chosen(outs, starts, program)
    first = (program - kit.chosen(starts, starts, program)) * (BN // 2 if GATED else BN)
    row = along(1, BN, LW)
    word_rows = _row_starts(weights.packed, starts, program, first, N, row, K // 8, BN, GATED)
    row = along(1, BN, L)
    bytes_of = _row_starts(weights.scale, starts, program, first, N, row, K // BLOCK, BN, GATED)
    of_word = along(0, WARPS, LW), along(2, BLOCK, LW)
    of_scale = along(0, WARPS, L), along(2, 8, L)
    # Tiles that are loaded and not used yet, the oldest first.
    loaded = ()
    for i in gl.static_range(min(AHEAD, STEPS)):
        step = _load_codes(word_rows, bytes_of, of_word, of_scale, i * WARPS, K, FMT)
        loaded = loaded + (step,)
    if OVERLAP:
        _grid("griddepcontrol.wait; // $0")
    if RELEASES:
        _grid("griddepcontrol.launch_dependents; // $0")
    OUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    n = first + gl.arange(0, BN, OUT)
    added = 0.0
    if residual is not None:
        added = gl.load(residual + n, mask=n < N, other=0.0).to(gl.float32)
    staged = stage(x, norm, K, WARPS, BLOCK)
    acc = gl.zeros((WARPS, BN, 8), gl.float32, L)
    for start in range(0, LOOP, AHEAD):
        for i in gl.static_range(AHEAD):
            word, byte = loaded[0]
            later = (start + i + AHEAD) * WARPS
            step = _load_codes(word_rows, bytes_of, of_word, of_scale, later, K, FMT)
            loaded = loaded[1:] + (step,)
            row_columns = columns(staged.index(start + i), BLOCK, X)
            acc = gl.fma(_block_sums(word, row_columns, FMT, L), _scale_of(byte, FMT), acc)
    for i in gl.static_range(LOOP, STEPS):
        word, byte = loaded[0]
        loaded = loaded[1:]
        if i + AHEAD < STEPS:
            later = (i + AHEAD) * WARPS
            step = _load_codes(word_rows, bytes_of, of_word, of_scale, later, K, FMT)
            loaded = loaded + (step,)
        row_columns = columns(staged.index(i), BLOCK, X)
        acc = gl.fma(_block_sums(word, row_columns, FMT, L), _scale_of(byte, FMT), acc)
    y = gl.sum(gl.sum(acc, 2), 0) * _rest(FMT)
    size = gl.max(gl.where(y == y, gl.abs(y), float("inf")), 0)
    # Sums of a program that are all that small lost bits to underflow maybe, and are made again.
    if (size < 2.0**-24) | (size == float("inf")):
        # Zero, which the compiler does not know: what it had before stays in no register for this.
        zero = kit.asm("shr.u32 $0, $1, 31;", "=r,f", [size])
        again = _plain_sums(
            x + zero, norm, weights, starts, program, first + zero, N, K, FMT, BN, WARPS, GATED
        )
        y = gl.convert_layout(again, OUT) * (_rest(FMT) * 2.0 ** (64 - 126))
    DTYPE: gl.constexpr = out.dtype.element_ty
    row = gl.arange(0, BN, OUT)
    if weights.global_scale is not None:
        if GATED:
            stored = gl.load(weights.global_scale[0])
            stored = gl.where(row < BN // 2, stored, gl.load(weights.global_scale[1]))
        else:
            stored = gl.load(kit.chosen(weights.global_scale, starts, program))
        y *= stored if FMT.multiplies else 1.0 / stored
    if weights.bias is not None:
        bias = _row_starts(weights.bias, starts, program, first, N, row, 1, BN, GATED)
        y += gl.load(bias).to(gl.float32)
    if GATED:
        # Both of one thread.
        gate, up = gl.split(y.reshape((2, BN // 2)).permute((1, 0)))
        y = gate_times_up(gate, up, ACTIVATION, DTYPE)
        n = first + gl.arange(0, BN // 2, y.type.layout)
    if residual is not None:
        y = narrow(narrow(y, DTYPE) + added, DTYPE)
        gl.store(squares + program, gl.sum(gl.where(n < N, y * y, 0.0), 0))
    gl.store(out + n, y.to(DTYPE), mask=n < N)
