"""Multiply by warp-group instructions that take decoded weights from registers.

Each operand of weights has registers of its own, so that one is decoded while the tensor cores
multiply the one before it; x comes through a ring in shared memory.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..._compat.torch import barrier_of_threads, tile_loader
from ..common import tiles as kit
from ..compute_fp8 import operands_triton as fp8
from .decode_triton import offset, scale_assembly, wide_assembly

barrier, load_tile = barrier_of_threads(), tile_loader()


@gluon.constexpr_function
def word_layout(WARPS, WORDS):
    """Return where words of sixteen codes [16 * WARPS, WORDS] are: as an operand has its rows."""
    rows = [[16 << i, 0] for i in range(WARPS.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 4 << i] for i in range((WORDS // 4).bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, rows, [], [16 * WARPS, WORDS])


@gluon.jit
def decode_words(
    word, byte, power_of_row, FMT: gl.constexpr, FP8: gl.constexpr, BN: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """Return codes times scales [BN, 16 * WORDS], four E4M3 or two bfloat16 in each int32."""
    if FP8:
        step = gl.inline_asm_elementwise(
            scale_assembly(FMT), "=f,r", [byte.to(gl.int32)],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        four = gl.inline_asm_elementwise(
            fp8.table_assembly(FMT), "=r,=r,=r,=r,l,f", [word, step * power_of_row],
            dtype=(gl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
        values = gl.join(gl.join(four[0], four[2]), gl.join(four[1], four[3]))
        values = gl.permute(gl.reshape(values, (BN, WORDS // 4, 4, 4)), (0, 1, 3, 2))
        values = gl.reshape(values, (BN, 4 * WORDS))
    else:
        v = gl.inline_asm_elementwise(
            wide_assembly(FMT), "=r,=r,=r,=r,=r,=r,=r,=r,l,r", [word, byte.to(gl.int32)],
            dtype=(gl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        even = gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6]))
        odd = gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))
        values = gl.permute(gl.join(even, odd), (0, 2, 3, 4, 1))
        values = gl.reshape(values, (BN, 8 * WORDS))
    return values


@gluon.jit
def operand(values, FP8: gl.constexpr, BN: gl.constexpr, WORDS: gl.constexpr, MMA: gl.constexpr):
    """Return what `decode_words` returned as an operand: no register changes."""
    if FP8:
        even = gl.join(values.to(gl.uint8), (values >> 16).to(gl.uint8))
        odd = gl.join((values >> 8).to(gl.uint8), (values >> 24).to(gl.uint8))
        numbers = gl.reshape(gl.join(even, odd), (BN, 16 * WORDS))
        numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
        numbers = numbers.to(gl.float8e4nv, bitcast=True)
    else:
        numbers = gl.join(values.to(gl.int16), (values >> 16).to(gl.int16))
        numbers = gl.reshape(numbers, (BN, 16 * WORDS))
        numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        numbers = numbers.to(gl.bfloat16, bitcast=True)
    return numbers


@gluon.jit
def load_words(
    words, scales, row, step, FMT: gl.constexpr, K: gl.constexpr, WORDS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the words of a step and the scale byte of each."""
    share: gl.constexpr = FMT.block // 16
    k = step * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    word = gl.load(words + row * (K // 16) + k)
    byte = gl.load(scales + row * (K // FMT.block) + k // share)
    return word, byte


@gluon.jit
def fetch(x, ring, full, start_m, first, step, count, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Ask for the tile of x of a step, if there is one."""
    slot = step % STAGES
    mbarrier.expect(full.index(slot), x.block_type.nbytes, pred=step < count)
    load_tile(
        x, [start_m, (first + step) * COLUMNS], full.index(slot), ring.index(slot),
        pred=step < count,
    )  # fmt: skip


@gluon.jit
def multiply(
    values, ring, full, acc, step, STAGES: gl.constexpr, FP8: gl.constexpr, BN: gl.constexpr,
    WORDS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Start to add the product of a step."""
    slot = step % STAGES
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    x_tile = ring.index(slot).permute((1, 0))
    return warpgroup_mma(operand(values, FP8, BN, WORDS, MMA), x_tile, acc, is_async=True)


@gluon.jit
def largest_bytes(
    scales, start_n, N, K: gl.constexpr, FMT: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr
):
    """Return the largest scale byte of each of BN rows, int32 [BN]."""
    row_words: gl.constexpr = K // FMT.block // 4
    # Loads under way at once, of 32 words; of rows with more all took too many registers.
    AT_ONCE: gl.constexpr = 2 if row_words <= 64 else 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    row = gl.minimum(start_n + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT)), N - 1)
    column = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    at = scales.to(gl.pointer_type(gl.int32)) + row.to(gl.int64)[:, None] * row_words + column
    even = gl.zeros((BN, 32), gl.int32, LAYOUT)
    odd = even
    for start in range(0, row_words, 32 * AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            k = start + 32 * i + column
            word = gl.load(at + start + 32 * i, mask=k < row_words, other=0)
            even = larger_halves(even, word & 0xFF00FF)
            # The high byte of a half decides.
            odd = larger_halves(odd, word)
    both = larger_halves(even, (odd >> 8) & 0xFF00FF)
    return gl.max(gl.maximum(both & 0xFFFF, both >> 16), axis=1)


@gluon.jit
def larger_halves(a, b):
    """Return the larger of the 16-bit halves of int32."""
    return kit.asm("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b])


@gluon.jit
def finish(
    y, x_factors, shift, weight, out, start_m, start_n, M, N, FMT: gl.constexpr, FP8: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Store the sums y [BN, BM], times the factors of their rows."""
    n = start_n + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    if FP8:
        m = start_m + gl.arange(0, BM, gl.SliceLayout(0, MMA))
        y *= gl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
        y *= fp8.row_factor(shift, weight.global_scale, FMT)[:, None]
    else:
        y *= kit.power(-offset(FMT))
        if weight.global_scale is not None:
            y *= kit.global_multiplier(weight.global_scale, FMT)
    if weight.bias is not None:
        y += gl.load(weight.bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    across: gl.constexpr = BN // 64
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [across, WARPS // across], [0, 1])
    y = gl.convert_layout(y.to(out.dtype.element_ty), STORE)
    m = start_m + gl.arange(0, BM, gl.SliceLayout(0, STORE))
    n = start_n + gl.arange(0, BN, gl.SliceLayout(1, STORE))
    at = m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + at, y, mask=(n < N)[:, None] & (m < M)[None, :])


@gluon.jit
def added(y, sums, at, part, PARTS: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr):
    """Return the sum of all parts in their order: y is `part`, the others are stored."""
    if PARTS == 2:
        # The same in either order.
        total = y + gl.load(sums + (1 - part) * (BN * BM) + at, cache_modifier=".cg")
    else:
        total = gl.zeros_like(y)
        for i in gl.static_range(PARTS):
            stored = (at >= 0) & (part != i)
            other = gl.load(sums + i * (BN * BM) + at, mask=stored, other=0.0, cache_modifier=".cg")
            total += gl.where(stored, other, y)
    return total


@gluon.jit(do_not_specialize=["M"])
def wide_kernel(
    x, x_factors, weight, sums, finished, out, M, N,
    K: gl.constexpr, FMT: gl.constexpr, FP8: gl.constexpr, TILES: gl.constexpr,
    OVERLAP: gl.constexpr, RELEASES: gl.constexpr,
):  # fmt: skip
    """Multiply sorted rows x, a tensor descriptor, and packed weights."""
    # FP8: x and weights are E4M3 with a factor for each row, else bfloat16. Programs that share a
    # sum leave theirs in `sums`, of whole tiles, and count in `finished`, which begins at 0, who
    # comes and who has stored.
    BM: gl.constexpr = TILES.m
    BN: gl.constexpr = TILES.n
    COLUMNS: gl.constexpr = 8 * TILES.words
    WORDS: gl.constexpr = TILES.words // 2
    WARPS: gl.constexpr = TILES.warps
    STAGES: gl.constexpr = TILES.stages
    PARTS: gl.constexpr = TILES.parts
    words, scales = weight.packed, weight.scale
    LAYOUT: gl.constexpr = word_layout(WARPS, WORDS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 32 if FP8 else 16])
    # Steps come in whole iterations, and each part has one.
    fits: gl.constexpr = K % (4 * COLUMNS) == 0 and K >= 4 * COLUMNS * PARTS
    AHEAD: gl.constexpr = 4 if fits else 2
    whole: gl.constexpr = K // (AHEAD * COLUMNS)
    gl.static_assert(whole >= PARTS)
    part = gl.program_id(2)
    # Not PARTS: where the loop is known to run, ptxas waits for each instruction of a product.
    parts = gl.num_programs(2)
    first = part * whole // parts * AHEAD
    count = (part + 1) * whole // parts * AHEAD - first
    start_m = gl.program_id(0) * BM
    start_n = gl.program_id(1) * BN
    row = start_n + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    row = gl.minimum(row, N - 1).to(gl.int64)[:, None]
    ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, COLUMNS], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    # Words are under way AHEAD steps before they are decoded: after the first, one of each step of
    # an iteration.
    first_words = load_words(words, scales, row, first, FMT, K, WORDS, LAYOUT)
    ring_words = ()
    for i in gl.static_range(AHEAD):
        at = first + gl.minimum(i + 1, count - 1)
        ring_words = ring_words + (load_words(words, scales, row, at, FMT, K, WORDS, LAYOUT),)
    power_of_row = 1.0
    shift = 0
    if FP8:
        # Of the whole row, whose bytes a part reads as well.
        shift = fp8.shift_from(largest_bytes(weight.scale, start_n, N, K, FMT, BN, WARPS), FMT)
        power_of_row = fp8.two_to_the(gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT)))[:, None]
        shift = gl.convert_layout(shift, gl.SliceLayout(1, MMA))
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if RELEASES:
        tl.extra.cuda.gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        fetch(x, ring, full, start_m, first, s, count, COLUMNS, STAGES)
    a = decode_words(first_words[0], first_words[1], power_of_row, FMT, FP8, BN, WORDS)
    acc = gl.zeros((BN, BM), gl.float32, MMA)
    acc = multiply(a, ring, full, acc, 0, STAGES, FP8, BN, WORDS, MMA)
    for start in range(1, count - AHEAD + 1, AHEAD):
        for i in gl.static_range(AHEAD):
            step = start + i
            b = decode_words(ring_words[i][0], ring_words[i][1], power_of_row, FMT, FP8, BN, WORDS)
            later = first + gl.minimum(step + AHEAD, count - 1)
            loaded = load_words(words, scales, row, later, FMT, K, WORDS, LAYOUT)
            ring_words = ring_words[:i] + (loaded,) + ring_words[i + 1 :]
            acc = multiply(b, ring, full, acc, step, STAGES, FP8, BN, WORDS, MMA)
            acc, a = warpgroup_mma_wait(1, deps=[acc, a])
            if i == AHEAD - 1:
                acc = warpgroup_mma_init(acc)
            barrier()
            fetch(x, ring, full, start_m, first, step - 1 + STAGES, count, COLUMNS, STAGES)
            a = b
    for i in gl.static_range(AHEAD - 1):
        step = count - AHEAD + 1 + i
        b = decode_words(ring_words[i][0], ring_words[i][1], power_of_row, FMT, FP8, BN, WORDS)
        acc = multiply(b, ring, full, acc, step, STAGES, FP8, BN, WORDS, MMA)
        if i < AHEAD - 2:
            acc, a = warpgroup_mma_wait(1, deps=[acc, a])
            barrier()
            fetch(x, ring, full, start_m, first, step - 1 + STAGES, count, COLUMNS, STAGES)
            a = b
    y, a, b = warpgroup_mma_wait(0, deps=[acc, a, b])
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))

    if PARTS == 1:
        finish(
            y, x_factors, shift, weight, out, start_m, start_n, M, N, FMT, FP8, BM, BN, WARPS, MMA
        )
    else:
        tiles = gl.num_programs(0) * gl.num_programs(1)
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        at = gl.arange(0, BN, gl.SliceLayout(1, MMA))[:, None] * BM
        at += gl.arange(0, BM, gl.SliceLayout(0, MMA))[None, :]
        sums += tile.to(gl.int64) * (PARTS * BN * BM)
        if gl.atomic_add(finished + tile, 1, sem="relaxed") != PARTS - 1:
            gl.store(sums + part * (BN * BM) + at, y)
            barrier()
            gl.atomic_add(finished + tiles + tile, 1, sem="release")
        else:
            # The last to finish waits for the others, which are running, and adds all parts.
            stored = gl.atomic_add(finished + tiles + tile, 0, sem="acquire")
            while stored < PARTS - 1:
                stored = gl.atomic_add(finished + tiles + tile, 0, sem="acquire")
            y = added(y, sums, at, part, PARTS, BN, BM)
            finish(
                y, x_factors, shift, weight, out, start_m, start_n, M, N, FMT, FP8, BM, BN, WARPS,
                MMA,
            )  # fmt: skip
