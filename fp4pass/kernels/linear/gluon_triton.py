"""Choose where the kernels in Gluon multiply packed weights, and launch them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedWeight
from ..common.tiles import LAUNCH, PTX, cdiv, overlapping, wider
from .around_triton import NOTHING, Around
from .matmul_triton import add_parts
from .ptx_triton import offset
from .tiling import Tiles, shared_memory_of

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .one_row_triton import one_row_kernel
    from .wide_triton import wide_kernel
except ImportError:
    # Gluon is experimental: what it has differs between versions of Triton.
    one_row_kernel = wide_kernel = None


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def step_of_warps(x: Tensor, dtype: torch.dtype | None, m: int, k: int, fmt: Format) -> int:
    """Return the columns that a warp of `one_row_kernel` takes at a time, or 0 for other rows m."""
    if one_row_kernel is None or not PTX or m != 1 or dtype != torch.bfloat16:
        return 0
    step = 8 * fmt.block
    # The row is in shared memory. Scales are decoded as float8, which sm_80 lacks.
    whole = k % step == 0 and fmt.element.bits == 4 and 2 * k <= shared_memory_of(x.device) // 2
    return step if whole and _capability(x.device) >= (8, 9) else 0


def multiply_row(
    x: Tensor,
    weights: PackedWeight,
    outs: tuple[Tensor, ...],
    starts: tuple[int, ...],
    programs: int,
    fmt: Format,
    tiles: Tiles,
    around: Around = NOTHING,
) -> None:
    """Fill `outs` with the products of a row x and weights, as `multiply_few` cuts them."""
    sizes = tuple(each.numel() for each in outs)
    one_row_kernel[(programs,)](
        x, around.norm, weights, around.residual, outs, around.squares, sizes, starts,
        K=x.numel(), FMT=fmt, TILES=tiles, ACTIVATION=around.activation,
        num_warps=tiles.warps, **LAUNCH, **overlapping(x.device, tiles.releases),
    )  # fmt: skip


def runs_wide(k: int, device: torch.device) -> bool:
    """Return whether `wide_kernel` can multiply over K columns on this device: on Hopper."""
    known = wide_kernel is not None and bool(PTX) and k % 256 == 0
    return known and _capability(device)[0] == 9


def multiply_wide(
    x: Tensor,
    x_factors: Tensor | None,
    weight: PackedWeight,
    powers: Tensor | None,
    factors: Tensor | None,
    out: Tensor,
    fmt: Format,
    tiles: Tiles,
) -> Tensor:
    """Fill `out` [M, N] with the product of sorted rows x [M, K] and a weight, and return it."""
    # x of E4M3 has factors, as the weight then has powers and factors; else it is bfloat16.
    (m, k), n, fp8 = x.shape, out.shape[-1], powers is not None
    whole = tiles.parts == 1
    sums = out if whole else out.new_empty((tiles.parts, m, n), dtype=torch.float32)
    block = [tiles.m, 8 * tiles.words]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv if fp8 else gl.bfloat16)
    words = wider(weight.packed, torch.int64)
    stored = weight._replace(packed=words, scale=weight.scale.contiguous())
    wide_kernel[(cdiv(m, tiles.m), cdiv(n, tiles.n), tiles.parts)](
        TensorDescriptor.from_tensor(x, block, layout), x_factors, stored, powers, factors,
        sums, m, n, K=k, FMT=fmt, FP8=fp8, TILES=tiles, num_warps=tiles.warps, **LAUNCH,
        **overlapping(x.device, tiles.releases),
    )  # fmt: skip
    if not whole:
        add_parts(sums, None, weight, out, fmt, 0 if fp8 else offset(fmt))
    return out
