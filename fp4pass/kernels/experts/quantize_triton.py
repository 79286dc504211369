"""Quantize the inputs of experts with a global scale each: a lane takes a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ...core.packing import empty_rows
from ..common.tiles import DTYPES, LAUNCH, as_words, cdiv, load_block
from ..quantize.block_tiles import load_global_scale, quantize_block, store_block, word_count

_LANES, _WARPS = 64, 2


def experts_quantize_triton(
    x: Tensor, ids: Tensor, global_scale: Tensor, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of pairs by the scales of their experts (`experts_quantize_ref`)."""
    packed, scale = empty_rows(x, ids.shape, fmt)
    if scale.numel():
        blocks = scale.shape[-1]
        _experts_quantize_kernel[(ids.numel(), cdiv(blocks, _LANES))](
            as_words(x), ids.contiguous(), global_scale, packed.view(torch.int64), scale, blocks,
            len(global_scale), FAN=ids.shape[1] if x.ndim == 2 else 1,
            DTYPE=DTYPES.get(x.dtype, tl.float32), FMT=fmt, SEARCHES=scale_method == "sse",
            LANES=_LANES, num_warps=_WARPS, **LAUNCH,
        )  # fmt: skip
    return packed, scale


@triton.jit(do_not_specialize=["blocks", "E"])
def _experts_quantize_kernel(
    words, ids, stored, packed, scale, blocks, E, FAN: tl.constexpr, DTYPE: tl.constexpr,
    FMT: tl.constexpr, SEARCHES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of one pair; FAN pairs read one row of x."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair)
    live = (expert >= 0) & (expert < E)
    global_scale = load_global_scale(stored + tl.where(live, expert, 0), FMT)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = at < blocks
    block = (pair // FAN) * blocks + at
    read = tl.where(live, at, blocks) < blocks
    tile = load_block(words, block, read, word_count(FMT.block, DTYPE))
    byte, codes = quantize_block(tile, global_scale, DTYPE, FMT, SEARCHES)
    codes = [tl.where(live, each, 0) for each in codes]
    store_block(packed, scale, pair * blocks + at, mask, tl.where(live, byte, 0), codes)
