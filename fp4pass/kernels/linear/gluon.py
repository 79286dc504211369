"""The kernel of one row in Gluon: where it multiplies packed weights, and its launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import LAUNCH, PTX, overlapping
from .tiling import Tiles, shared_memory_of

try:
    from .one_row_triton import one_row_kernel
except ImportError:
    # Gluon is experimental: what it has differs between versions of Triton.
    one_row_kernel = None


def step_of_warps(x: Tensor, dtype: torch.dtype | None, m: int, k: int, fmt: Format) -> int:
    """Return the columns that a warp takes at a time, or 0 where this kernel takes no m rows."""
    if one_row_kernel is None or not PTX or m != 1 or dtype != torch.bfloat16:
        return 0
    step = 8 * fmt.block
    # The row is in shared memory. Scales are decoded as float8, which sm_80 lacks.
    whole = k % step == 0 and fmt.element.bits == 4 and 2 * k <= shared_memory_of(x.device) // 2
    return step if whole and _has_float8(x.device) else 0


@lru_cache(maxsize=64)
def _has_float8(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def multiply_row(
    x: Tensor,
    words: tuple[Tensor, ...],
    scales: tuple[Tensor, ...],
    global_scales: tuple[Tensor, ...] | None,
    biases: tuple[Tensor, ...] | None,
    outs: tuple[Tensor, ...],
    starts: tuple[int, ...],
    programs: int,
    fmt: Format,
    tiles: Tiles,
) -> None:
    """Fill `outs` with the products of a row x and weights, as `multiply_few` cuts them."""
    sizes = tuple(each.numel() for each in outs)
    one_row_kernel[(programs,)](
        x, words, scales, global_scales, biases, outs, sizes, starts, K=x.numel(), FMT=fmt,
        BN=tiles.n, WARPS=tiles.warps, AHEAD=tiles.stages, num_warps=tiles.warps,
        **LAUNCH, **overlapping(x.device, tiles.releases),
    )  # fmt: skip
