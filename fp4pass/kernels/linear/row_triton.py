"""The row of x in shared memory, normed maybe, and as columns of tensor core tiles, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..norm.naive import SQUARES
from .around_triton import inverse_root, normed, power_of_two

# Columns of a row that a sum of squares is of.
_SQUARES = gl.constexpr(SQUARES)

# Triton 3.6 has memory in another shape under a private name, and 3.9 does not.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


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
    return inverse_root(gl.sum(squares, 0), K, norm.eps)


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
