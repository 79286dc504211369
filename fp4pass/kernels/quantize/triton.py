"""Activations to packed codes and scale bits: a lane takes a block, read as int64 words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import DTYPES, LAUNCH, as_words, cdiv, load_block, overlapping, wait
from .block_tiles import load_global_scale, quantize_block, store_block, word_count

# A program is two warps; a lane reads so many bytes of blocks. Measured on an H200.
_LANES, _WARPS, _LANE_BYTES = 64, 2, 64


def quantize_triton(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize activations in blocks along their last dimension (`quantize_ref`): the same bits."""
    # Scales of least squared error are the best of a few near the naive ones
    # (scale_search_tiles.py).
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // fmt.block), dtype=torch.uint8)
    if blocks := scale.numel():
        words = as_words(x)
        tiles = max(1, _LANE_BYTES * blocks // (8 * words.numel()))
        _quantize_kernel[(cdiv(blocks, _LANES * tiles),)](
            words,
            global_scale,
            packed.view(torch.int64),
            scale,
            blocks,
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
    # Backwards: what a pass over x for its amax read last is still in the cache.
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
