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
    warpgroup_mma_wait,
)

from ..._compat.triton import barrier, load_tile, warpgroup_mma_init
from ..common.tiles import global_multiplier, power
from ..fp8.decode_triton import table_assembly
from .ptx_triton import offset, scale_assembly, wide_assembly


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
            table_assembly(FMT), "=r,=r,=r,=r,l,f", [word, step * power_of_row],
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


@gluon.jit(do_not_specialize=["M"])
def wide_kernel(
    x, x_factors, weight, powers, factors, out, M, N,
    K: gl.constexpr, FMT: gl.constexpr, FP8: gl.constexpr, TILES: gl.constexpr,
    OVERLAP: gl.constexpr, RELEASES: gl.constexpr,
):  # fmt: skip
    """Multiply sorted rows x, a tensor descriptor, and packed weights, or a part of K."""
    # FP8: x and weights are E4M3 with `powers` and factors of rows, else bfloat16.
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
    pairs: gl.constexpr = K // (2 * COLUMNS)
    part = gl.program_id(2)
    # Not PARTS: where the loop is known to run, ptxas waits for each instruction of a product.
    parts = gl.num_programs(2)
    first = part * pairs // parts * 2
    count = (part + 1) * pairs // parts * 2 - first
    start_m = gl.program_id(0) * BM
    start_n = gl.program_id(1) * BN
    row = start_n + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    row = gl.minimum(row, N - 1).to(gl.int64)[:, None]
    ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, COLUMNS], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    # Words are under way two steps before they are decoded: one in each half of an iteration.
    word_a, byte_a = load_words(words, scales, row, first, FMT, K, WORDS, LAYOUT)
    word_b, byte_b = load_words(words, scales, row, first + 1, FMT, K, WORDS, LAYOUT)
    word_c, byte_c = load_words(
        words, scales, row, first + gl.minimum(2, count - 1), FMT, K, WORDS, LAYOUT
    )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if RELEASES:
        tl.extra.cuda.gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        fetch(x, ring, full, start_m, first, s, count, COLUMNS, STAGES)
    power_of_row = 1.0
    if FP8:
        power_of_row = gl.load(powers + row)
    a = decode_words(word_a, byte_a, power_of_row, FMT, FP8, BN, WORDS)
    acc = gl.zeros((BN, BM), gl.float32, MMA)
    acc = multiply(a, ring, full, acc, 0, STAGES, FP8, BN, WORDS, MMA)
    for step in range(1, count - 1, 2):
        b = decode_words(word_b, byte_b, power_of_row, FMT, FP8, BN, WORDS)
        ahead = first + gl.minimum(step + 2, count - 1)
        word_b, byte_b = load_words(words, scales, row, ahead, FMT, K, WORDS, LAYOUT)
        acc = multiply(b, ring, full, acc, step, STAGES, FP8, BN, WORDS, MMA)
        acc, a = warpgroup_mma_wait(1, deps=[acc, a])
        barrier()
        fetch(x, ring, full, start_m, first, step - 1 + STAGES, count, COLUMNS, STAGES)
        a = decode_words(word_c, byte_c, power_of_row, FMT, FP8, BN, WORDS)
        ahead = first + gl.minimum(step + 3, count - 1)
        word_c, byte_c = load_words(words, scales, row, ahead, FMT, K, WORDS, LAYOUT)
        acc = multiply(a, ring, full, acc, step + 1, STAGES, FP8, BN, WORDS, MMA)
        acc, b = warpgroup_mma_wait(1, deps=[acc, b])
        acc = warpgroup_mma_init(acc)
        barrier()
        fetch(x, ring, full, start_m, first, step + STAGES, count, COLUMNS, STAGES)
    b = decode_words(word_b, byte_b, power_of_row, FMT, FP8, BN, WORDS)
    acc = multiply(b, ring, full, acc, count - 1, STAGES, FP8, BN, WORDS, MMA)
    y, a, b = warpgroup_mma_wait(0, deps=[acc, a, b])
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))

    n = start_n + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    if FP8:
        m = start_m + gl.arange(0, BM, gl.SliceLayout(0, MMA))
        y *= gl.load(x_factors + m, mask=m < M, other=0.0)[None, :]
        y *= gl.load(factors + n, mask=n < N, other=0.0)[:, None]
    elif PARTS == 1:
        y *= power(-offset(FMT))
        if weight.global_scale is not None:
            y *= global_multiplier(weight.global_scale, FMT)
    if weight.bias is not None and PARTS == 1:
        y += gl.load(weight.bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    across: gl.constexpr = BN // 64
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [across, WARPS // across], [0, 1])
    y = gl.convert_layout(y.to(out.dtype.element_ty), STORE)
    m = start_m + gl.arange(0, BM, gl.SliceLayout(0, STORE))
    n = start_n + gl.arange(0, BN, gl.SliceLayout(1, STORE))
    at = (part * M + m).to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + at, y, mask=(n < N)[:, None] & (m < M)[None, :])
