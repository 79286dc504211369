"""RMSNorm and quantization in one pass: a program takes rows, a lane a block of each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .quantize_triton import (
    DTYPES,
    fma_pairs,
    join_halves,
    load_global_scale,
    mul_pairs,
    quantize_block,
    split_words,
    store_block,
    word_count,
)
from .tiles import LAUNCH, PTX, as_words, bits_of, load_block, unpack_block

# Blocks of a row at a time, and so many of them to a warp: measured on an H200.
_MOST_LANES = 1024
_WARP_LANES = 64

# Programs that share the rows, for each lane of one: what fills any GPU.
_PROGRAM_LANES = 1 << 18


def rms_norm_quantize_triton(
    x: Tensor, weight: Tensor, eps: float, global_divisor: Tensor | None, fmt: Format
) -> tuple[Tensor, Tensor]:
    """Quantize the RMSNorm of `x` over its last dimension (norm_quantize_ref.py).

    The mean is summed in another order; what is quantized is within a rounding of the reference's.
    """
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // fmt.block), dtype=torch.uint8)
    blocks = x.shape[-1] // fmt.block
    if packed.numel():
        rows = scale.numel() // blocks
        lanes = min(max(triton.next_power_of_2(blocks), 32), _MOST_LANES)
        _norm_quantize_kernel[(min(rows, _PROGRAM_LANES // lanes),)](
            as_words(x),
            as_words(weight),
            global_divisor,
            packed.view(torch.int64),
            scale,
            rows,
            eps,
            BLOCKS=blocks,
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            LANES=lanes,
            num_warps=max(1, min(lanes // _WARP_LANES, 8)),
            **LAUNCH,
        )
    return packed, scale
