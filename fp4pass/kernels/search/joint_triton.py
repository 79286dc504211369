"""Choose scale and codes of a block together in Triton, one block a thread, in one launch.

The choice is that of joint_reference.py; losses come from the factor of H, as sums of squares. A
thread holds a block in its registers and tries scales in turn: threads that share a block would
finish sooner, but would exchange every residual. Tiles are [n, 32] with the threads of a warp along
the rows, and memory is accessed in one dimension, so values stay in their registers. Warps of a
program that hold the same blocks try different scales, and then all do the same.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common import tiles
from .joint_reference import PASSES, Chooser, Metric, Solution, candidate_steps, gptq_ref, joint_ref
from .triton import floor_byte

# Blocks of one program: 4096 rows are 128 programs, as many as a large GPU has SMs.
_LANES = 32

# Where few programs run, up to so many warps of one share the scales of its blocks, of the warps
# that a large GPU runs at a time.
_MOST_GROUPS, _WARPS = 8, 1056


def choose_blocks_triton(
    x: Tensor, metric: Metric, unit: Tensor, fmt: Format, joint: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize normalized blocks x [J, n, R] to a small r^T H r (joint_reference.py)."""
    shape = columns, rows = (len(x), x.shape[2])
    q, loss = x.new_empty(x.shape), x.new_empty(shape)
    found = x.new_empty(shape, dtype=torch.int64)
    if x.numel():
        unit, out = unit.expand(shape), (q, found, loss, None, None)
        sizes = (rows, rows, columns, 0)
        _launch(x.contiguous(), metric, unit, unit.stride(), fmt, joint, out, sizes, columns)
    return q, found, loss


def settle_triton(
    target: Tensor, solution: Solution, block: int, metric: Metric, fmt: Format, revise: bool
) -> None:
    """Choose scales and codes of a block column, in place (joint_reference.py)."""
    rows = len(solution.unit)
    out = (solution.q, solution.byte, None, solution.x, solution.residual)
    sizes = (rows, solution.part, len(solution.byte) // rows, block)
    _launch(target, metric, solution.unit, (0, 1), fmt, True, out, sizes, 1, revise)


CHOOSER = Chooser(choose_blocks_triton, settle_triton)

# The references, whose blocks the kernel chooses.
gptq_triton = partial(gptq_ref, chooser=CHOOSER)
joint_triton = partial(joint_ref, chooser=CHOOSER)


def _launch(
    x: Tensor,
    metric: Metric,
    unit: Tensor,
    unit_strides: tuple[int, int],
    fmt: Format,
    joint: bool,
    out: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int, int],
    columns: int,
    revise: bool = False,
) -> None:
    """Choose for `columns` block columns, and fill `out`: q, byte, and loss or residual = x - q."""
    # sizes: rows, those of a part, block columns of all tensors but x, and the first to choose.
    # All tensors but unit are contiguous.
    programs = tiles.cdiv(sizes[0], _LANES) * columns
    groups = 1
    while groups < _MOST_GROUPS and 2 * groups * programs <= _WARPS:
        groups *= 2
    _choose[(tiles.cdiv(sizes[0], _LANES), columns)](
        x, (metric.sequential, metric.pivots, metric.descent), unit, out,
        *sizes, *unit_strides, revise, 0,
        _LANES, groups, fmt, candidate_steps(fmt.scale), not joint,
        PASSES if joint else 0, num_warps=groups, **tiles.LAUNCH,
    )  # fmt: skip


# Tiles are [N, LANES], and a thread holds one column. Memory is accessed through one-dimensional
# tensors, so that it is the same column wherever a tile comes from.


@triton.jit
def _row(tile, index, i):
    """Return row i of a tile [N, LANES], to the bit; for a constant i without an instruction."""
    return tiles.float_of(tl.sum(tl.where(index == i, tiles.bits_of(tile), 0), axis=0))


@triton.jit
def _column(coefficients, index, i):
    """Load column i of coefficients [N, N] for all lanes: [N, LANES]."""
    N: tl.constexpr = index.shape[0]
    LANES: tl.constexpr = index.shape[1]
    row = tl.arange(0, N * LANES) // LANES
    return tl.reshape(tl.load(coefficients + row * N + i), (N, LANES))


@triton.jit
def _nearest(x, step, inverse, limit, ELEMENT: tl.constexpr):
    """Round x to elements times step; inverse: 1 / step, limit: the largest element times step."""
    # Adding 1.5 * 2^23 of the distance between elements rounds to one (common/rounding.py).
    # The quotient of a clipped x rounds to the largest element, as a clipped quotient does.
    x = tl.minimum(tl.maximum(x, -limit), limit)
    if tiles.PTX:
        quotient = tiles.corrected_quotient(x, step, inverse)
    else:
        quotient = tl.math.div_rn(x, step)
    binade = tl.maximum(
        tiles.bits_of(quotient) & 0x7F800000, (tiles.min_exponent(ELEMENT) + 127) << 23
    )
    anchor = tiles.float_of(binade + ((tiles.shift(ELEMENT) << 23) | 0x400000))
    return (quotient + anchor - anchor) * step


@triton.jit
def _round(x, index, step, factor, ALONE: tl.constexpr, ELEMENT: tl.constexpr):
    """Round blocks x [N, LANES] at scales [LANES]: q and the losses [LANES]."""
    # ALONE: whether targets leave out the residuals of the elements before.
    sequential, pivots = factor
    inverse = tl.math.div_rn(1.0, step)
    limit = step * ELEMENT.max
    q = x
    pull = tl.zeros_like(x)
    loss = tl.zeros_like(step)
    for i in tl.static_range(x.shape[0]):
        value = _row(x, index, i)
        pulled = _row(pull, index, i)
        target = value if ALONE else value + pulled
        rounded = _nearest(target, step, inverse, limit, ELEMENT)
        residual = value - rounded
        q = tl.where(index == i, rounded[None, :], q)
        moved = tl.fma(_column(sequential, index, i), residual[None, :], pull)
        pull = tl.where(index > i, moved, pull)
        error = residual + pulled
        loss = tl.fma(error * error, tl.load(pivots + i), loss)
    return q, loss


@triton.jit
def _product(coefficients, residual, index):
    """Return coefficients [N, N] in memory times residuals [N, LANES]."""
    total = tl.zeros_like(residual)
    for i in range(residual.shape[0]):
        column = _column(coefficients, index, i)
        total = tl.fma(column, _row(residual, index, i)[None, :], total)
    return total


@triton.jit
def _loss(residual, index, factor):
    """Return the losses [LANES] of residuals [N, LANES], by the additions of `_round`."""
    sequential, pivots = factor
    error = residual + _product(sequential, residual, index)
    loss = _row(error, index, 0) * 0.0
    for i in range(residual.shape[0]):
        each = _row(error, index, i)
        loss = tl.fma(each * each, tl.load(pivots + i), loss)
    return loss


@triton.jit
def _descend(x, q, index, step, descent, PASSES: tl.constexpr, ELEMENT: tl.constexpr):
    """Return q [N, LANES] after passes of coordinate descent."""
    inverse = tl.math.div_rn(1.0, step)
    limit = step * ELEMENT.max
    pull = _product(descent, x - q, index)
    for _ in range(PASSES):
        for i in range(x.shape[0]):
            target = _row(x, index, i) + _row(pull, index, i)
            rounded = _nearest(target, step, inverse, limit, ELEMENT)
            change = _row(q, index, i) - rounded
            q = tl.where(index == i, rounded[None, :], q)
            pull = tl.fma(_column(descent, index, i), change[None, :], pull)
    return q


@triton.jit
def _step_size(byte, unit, SCALE: tl.constexpr):
    """Return what elements are multiplied by at scale bytes (blocks.step_sizes)."""
    return tl.minimum(
        tl.maximum(tiles.scale_value(byte, SCALE) * unit, tiles.power(-100)), tiles.power(100)
    )


@triton.jit
def _first_candidate(x, unit, FMT: tl.constexpr, START: tl.constexpr):
    """Return the first byte to try for blocks x [N, LANES]; it may be less than 1."""
    SCALE: tl.constexpr = FMT.scale
    amax = tl.max(tl.abs(x), axis=0)
    limit = tl.math.div_rn(amax * (2 / FMT.element.halving_reach), unit)
    # The largest scale below the limit: the floor of the next smaller number.
    below = tiles.float_of(tl.maximum(tiles.bits_of(limit) - 1, 0))
    return tl.maximum(floor_byte(below, SCALE), 1) + START


@triton.jit
def _best_of_groups(best, least, GROUPS: tl.constexpr):
    """Return for each block the byte of the least loss that any of its lanes has found."""
    LANES: tl.constexpr = best.shape[0] // GROUPS
    losses = tl.reshape(least, (GROUPS, LANES))
    found = losses == tl.min(losses, axis=0)[None, :]
    # The first of equal ones, as bytes ascend.
    byte = tl.min(tl.where(found, tl.reshape(best, (GROUPS, LANES)), 256), axis=0)
    return tl.reshape(tl.broadcast_to(byte[None, :], (GROUPS, LANES)), best.shape)


@triton.jit
def _best_candidate(
    x, unit, first, index, factor, zero, COUNT: tl.constexpr, GROUPS: tl.constexpr,
    FMT: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Try COUNT scales from byte `first` on: the best one's q [N, LANES], byte and loss [LANES]."""
    # GROUPS of lanes have the same blocks, and share the scales.
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    LANES: tl.constexpr = x.shape[1]
    share: tl.constexpr = (COUNT + GROUPS - 1) // GROUPS
    own = first + tl.arange(0, LANES) // (LANES // GROUPS) * share
    last = tl.minimum(first + (COUNT - 1), SCALE.last)
    best = tl.minimum(tl.maximum(first, 1), SCALE.last)
    least = tl.full(best.shape, float("inf"), tl.float32)
    q = x
    # After all candidates the best of them once more, so that only its q is held.
    for step in range(share + 1):
        if GROUPS > 1:
            if step == share:
                best = _best_of_groups(best, least, GROUPS)
        byte = tl.where(step < share, tl.maximum(tl.minimum(own + step, last), 1), best)
        # A compiler that knew zero would read the coefficients once, into too many registers.
        here = (factor[0] + step * zero, factor[1])
        q, loss = _round(x, index, _step_size(byte, unit, SCALE), here, ALONE, ELEMENT)
        better = loss < least
        best = tl.where(better, byte, best)
        least = tl.where(better, loss, least)
    return q, best, least


@triton.jit(
    do_not_specialize=[
        "rows", "part_rows", "columns", "first_column", "unit_column", "unit_row", "revise", "zero"
    ]
)  # fmt: skip
def _choose(
    x_ptr, metric, unit_ptr, out, rows, part_rows, columns, first_column, unit_column,
    unit_row, revise, zero, LANES: tl.constexpr, GROUPS: tl.constexpr, FMT: tl.constexpr,
    STEPS: tl.constexpr, ALONE: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Choose scales and codes of LANES blocks; `revise`: only where they beat those in q."""
    sequential_ptr, pivots_ptr, descent_ptr = metric
    q_ptr, byte_ptr, loss_ptr, original_ptr, residual_ptr = out
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    N: tl.constexpr = FMT.block
    ALL: tl.constexpr = LANES * GROUPS
    # Where the program's part begins, and the rows that it has.
    part = (tl.program_id(0) * LANES) // part_rows * part_rows
    count = tl.minimum(part_rows, rows - part)
    start = tl.program_id(0) * LANES - part
    lane = start + tl.arange(0, ALL) % LANES
    mask = lane < count
    kept = mask & (tl.arange(0, ALL) < LANES)
    flat = tl.arange(0, N * ALL)
    in_row = flat % ALL % LANES
    whole = start + in_row < count
    whole_kept = whole & (flat % ALL < LANES)
    inside = flat // ALL * count + start + in_row
    # x is of the columns that are chosen here, everything else of all.
    x_column = tl.program_id(1).to(tl.int64)
    column = first_column + x_column
    x_ptr += part * (N * tl.num_programs(1)).to(tl.int64) + x_column * N * count
    start_of_column = part * (N * columns).to(tl.int64) + column * N * count
    place = part * columns.to(tl.int64) + column * count + lane
    # The row of each element of a tile: a constant of every register.
    index = tl.arange(0, N)[:, None] + tl.zeros((N, ALL), tl.int32)
    factor = (sequential_ptr + column * N * N, pivots_ptr + column * N)
    x = tl.reshape(tl.load(x_ptr + inside, mask=whole, other=0.0), (N, ALL))
    unit_ptr += x_column * unit_column + part * unit_row.to(tl.int64)
    unit = tl.load(unit_ptr + lane * unit_row, mask=mask, other=1.0)

    COUNT: tl.constexpr = STEPS[1] - STEPS[0]
    first = _first_candidate(x, unit, FMT, STEPS[0])
    q, best, least = _best_candidate(x, unit, first, index, factor, zero, COUNT, GROUPS, FMT, ALONE)
    if PASSES > 0:
        size = _step_size(best, unit, SCALE)
        descent = descent_ptr + column * N * N
        lower = _descend(x, q, index, size, descent, PASSES, ELEMENT)
        descended = _loss(x - lower, index, factor)
        # Rounding may have raised the least loss there is.
        q = tl.where((descended < least)[None, :], lower, q)
        least = tl.minimum(descended, least)
    inside += start_of_column
    if revise:
        old = tl.reshape(tl.load(q_ptr + inside, mask=whole, other=0.0), (N, ALL))
        better = least < _loss(x - old, index, factor)
        q = tl.where(better[None, :], q, old)
        best = tl.where(better, best, tl.load(byte_ptr + place, mask=mask, other=1).to(tl.int32))
        if GROUPS > 1:
            # Before one of the lanes of a block writes.
            tl.debug_barrier()

    q = tl.reshape(q, (N * ALL,))
    tl.store(byte_ptr + place, best.to(tl.int64), mask=kept)
    tl.store(q_ptr + inside, q, mask=whole_kept)
    if loss_ptr is not None:
        tl.store(loss_ptr + place, least, mask=kept)
    if residual_ptr is not None:
        original = tl.load(original_ptr + inside, mask=whole, other=0.0)
        tl.store(residual_ptr + inside, original - q, mask=whole_kept)
