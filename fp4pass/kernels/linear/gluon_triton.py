"""Choose where the kernels in Gluon multiply packed weights, and launch them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import gluon
from ...core.formats import Format
from ...core.packing import PackedWeight
from ..common import tiles as kit
from .tiling import Tiles, shared_memory_of


def _kernels() -> tuple[Any, ...]:
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .one_row_triton import one_row_kernel
    from .wide_triton import wide_kernel

    return language, TensorDescriptor, one_row_kernel, wide_kernel


# Gluon is experimental: what it has differs between versions of Triton.
_FOUND: tuple[Any, ...] = gluon.attempt(_kernels) or (None,) * 4
gl, TensorDescriptor, one_row_kernel, wide_kernel = _FOUND


def step_of_warps(x: Tensor, dtype: torch.dtype | None, m: int, k: int, fmt: Format) -> int:
    """Return the columns that a warp of `one_row_kernel` takes at a time, or 0 for other rows m."""
    if one_row_kernel is None or not kit.PTX or m != 1 or dtype != torch.bfloat16:
        return 0
    step = 8 * fmt.block
    # The row is in shared memory. Scales are decoded as float8, which sm_80 lacks.
    whole = k % step == 0 and fmt.element.bits == 4 and 2 * k <= shared_memory_of(x.device) // 2
    return step if whole and kit.capability(x.device) >= (8, 9) else 0


def runs_wide(k: int, device: torch.device) -> bool:
    """Return whether `wide_kernel` can multiply over K columns on this device: on Hopper."""
    known = wide_kernel is not None and bool(kit.PTX) and k % 256 == 0
    return known and kit.capability(device)[0] == 9


def in_words(weight: PackedWeight) -> PackedWeight:
    """Return a weight whose codes are int64 words, and whose scales begin at a word, as copies."""
    # Make them before the kernel that sorts x: `wide_kernel` reads them while that one runs.
    words, scale = kit.wider(weight.packed, torch.int64), kit.wider(weight.scale, torch.int32)
    return weight._replace(packed=words, scale=scale.view(torch.uint8))


def counters(m: int, n: int, tiles: Tiles, device: torch.device) -> Tensor | None:
    """Return room for what `multiply_wide` counts in, which begins at 0, or None for nothing."""
    if tiles.parts == 1:
        return None
    return torch.empty(
        2 * kit.cdiv(m, tiles.m) * kit.cdiv(n, tiles.n), dtype=torch.int32, device=device
    )


def multiply_wide(
    x: Tensor, x_factors: Tensor | None, weight: PackedWeight, finished: Tensor | None, out: Tensor,
    fmt: Format, tiles: Tiles,
) -> Tensor:  # fmt: skip
    """Fill `out` [M, N] with the product of sorted rows x and a weight, and return it."""
    # x: [R, K], of whole tiles of rows; if it is E4M3 it has factors, else it is bfloat16. weight:
    # `in_words`. finished: zeros in the place of `counters`.
    (m, n), k, fp8 = out.shape, x.shape[1], x_factors is not None
    sums = None
    if finished is not None:
        size = len(finished) // 2 * tiles.parts * tiles.m * tiles.n
        sums = torch.empty(size, dtype=torch.float32, device=out.device)
    block = [tiles.m, 8 * tiles.words]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv if fp8 else gl.bfloat16)
    wide_kernel[(kit.cdiv(m, tiles.m), kit.cdiv(n, tiles.n), tiles.parts)](
        TensorDescriptor.from_tensor(x, block, layout), x_factors, weight, sums, finished,
        out, m, n, K=k, FMT=fmt, FP8=fp8, TILES=tiles, num_warps=tiles.warps,
        **kit.launch(x.device, tiles.releases),
    )  # fmt: skip
    return out
