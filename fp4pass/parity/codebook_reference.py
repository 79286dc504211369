"""Quantize blocks of a flattened tensor to codes of a table and their absmax, and back.

x of any shape with n elements has packed codes uint8 [ceil(n * bits / 8)], the first of two 4-bit
codes in the high half, and absmax float32 [ceil(n / block)]. A quotient x / absmax becomes the
nearest value of the `Codebook`. The kernels of codebook_triton.py return the same bits, except
codes of a block with NaN or infinity, whose absmax is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.common.rounding import in_chunks
from .codebooks import Codebook, bound_table, order_table, value_table

# Blocks below it are divided by it, so that the reciprocal is finite. As bitsandbytes does.
LEAST_ABSMAX = 1e-38


def quantize_codebook_ref(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Return packed codes and absmax of x, in blocks along its flattened elements."""
    # Quotients are products with the reciprocal of absmax. In a last block that is shorter they are
    # divided, and its absmax is at least 1e-38, as in the CPU build of bitsandbytes.
    flat = x.reshape(-1)
    whole = len(flat) - len(flat) % codebook.block
    chunks = in_chunks(codebook.block, flat[:whole].view(-1, codebook.block))
    parts = [_quantize_blocks(blocks.float(), codebook, divide=False) for (blocks,) in chunks]
    if whole < len(flat):
        parts.append(_quantize_blocks(flat[whole:].float().view(1, -1), codebook, divide=True))
    codes, absmax = map(torch.cat, zip(*parts, strict=True))
    if codebook.bits == 4:
        codes = F.pad(codes, (0, len(codes) % 2), value=_zero(codebook))
        codes = codes[::2] << 4 | codes[1::2]
    return codes, absmax


def _quantize_blocks(blocks: Tensor, codebook: Codebook, *, divide: bool) -> tuple[Tensor, Tensor]:
    """Return the codes uint8 [J * n] and absmax [J] of blocks [J, n] float32."""
    absmax = blocks.abs().amax(-1)
    least = absmax.clamp(min=LEAST_ABSMAX)
    column = least.view(-1, 1)
    quotient = blocks / column if divide else blocks * (1 / column)
    return codes_of(quotient.flatten(), codebook), least if divide else absmax


def codes_of(quotient: Tensor, codebook: Codebook) -> Tensor:
    """Return the codes (uint8) of float32 quotients in [-1, 1]; any code for NaN."""
    if codebook.steps is not None:
        # Two's complement, cut to the lower bits.
        signed = quotient.nan_to_num().mul_(codebook.steps).round_().to(torch.int32)
        return (signed & (1 << codebook.bits) - 1).to(torch.uint8)
    rank = torch.bucketize(quotient, bound_table(codebook, quotient.device), out_int32=True)
    return order_table(codebook, quotient.device).index_select(0, rank)


def _zero(codebook: Codebook) -> int:
    """Return the code of zero, which fills a last byte."""
    return int(codes_of(torch.zeros(1), codebook))


def dequantize_codebook_ref(
    packed: Tensor, absmax: Tensor, codebook: Codebook, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return values[code] * absmax of its block, float32 rounded to `dtype`, in `shape`."""
    dense = packed.new_empty(tuple(shape), dtype=dtype)
    flat, table = dense.view(-1), value_table(codebook, packed.device)
    # Whole blocks at a time; the last part may end within one.
    size = max(codebook.block, 1 << 17)
    bytes_of = codebook.packed_bytes(size)
    parts = flat.split(size), packed.split(bytes_of), absmax.split(size // codebook.block)
    for out, part, largest in zip(*parts, strict=True):
        codes = torch.stack((part >> 4, part & 15), -1).flatten() if codebook.bits == 4 else part
        values = table.index_select(0, codes[: len(out)].int())
        factors = largest.repeat_interleave(codebook.block)[: len(out)]
        out.copy_(values.mul_(factors))
    return dense


def linear_codebook_ref(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor | None,
    rows: int,
    codebook: Codebook,
    *,
    dequantize: Callable[..., Tensor] = dequantize_codebook_ref,
) -> Tensor:
    """Return x [..., K] times a weight [rows, K] in a codebook, dequantized to the dtype of x."""
    weight = dequantize(packed, absmax, codebook, (rows, x.shape[-1]), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
