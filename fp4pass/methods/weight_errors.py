"""Errors of a quantized weight: of its elements, and of its layer's output."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..core.quant_state import QuantState
from ..errors import ShapeError, expected
from ..kernels.common.rounding import bands
from ..kernels.statistics.naive import HESSIAN_BLOCK, ieee_products
from .statistics import Stats

# Elements of a weight in one pass: those that fit into a CPU's cache, those that fill a GPU.
_TILE_CPU, _TILE_GPU = 1 << 19, 1 << 23


def squared_errors(weight: Tensor, state: QuantState, stats: Stats | None = None) -> list[float]:
    """Return |W - Q|^2 and |W|^2, and with a Hessian the squared lengths of (W - Q) x and W x.

    Args:
        weight: [N, K], a float tensor.
        state: the same weight as any method quantized it.
        stats: of the layer's inputs x, over whose tokens the last two are summed: by the whole
            Hessian, which sees that errors of one block make up for those of others, else by its
            diagonal blocks.

    Raises:
        ShapeError: the state is that of another weight.

    Example:
        >>> weight = torch.randn(4, 32)
        >>> error, size = fp4pass.methods.squared_errors(weight, fp4pass.quantize(weight, "nvfp4"))
        >>> 0 < error < 0.02 * size
        True
    """
    if tuple(weight.shape) != state.shape:
        raise ShapeError(expected("weight", f"the shape of state, {state.shape}", weight.shape))
    stats = stats or Stats()
    has_hessian = stats.hessian is not None or stats.block_hessian is not None
    fmt, device = state.format, weight.device
    divisor = torch.tensor([1.0 / state.global_scale], dtype=torch.float32, device=device)
    sums = torch.zeros(2, 2 if has_hessian else 1, dtype=torch.float64, device=device)
    numbers = _TILE_CPU if device.type == "cpu" else _TILE_GPU
    for part in bands(weight.shape, fmt, numbers):
        dense = weight[part].detach().float()
        own = state.rows(part.start, part.stop)
        stored = (own.qdata, own.scale, divisor)
        quantized = ops.dequantize(*stored, fmt.key, torch.float32)
        both = torch.stack((dense - quantized, dense))  # [2, R, K]
        sums[:, 0] += both.double().square_().sum((1, 2))
        if has_hessian:
            sums[:, 1] += output_energies(both, stats)
    # An indefinite Hessian by rounding has energies a little below zero.
    found: list[float] = sums.clamp_(min=0).t().flatten().tolist()
    return found


def output_energies(rows: Tensor, stats: Stats) -> Tensor:
    """Return float64 [B], tr V H V^T for each V of float32 rows [B, R, K], as Hessians tell it."""
    if stats.hessian is not None:
        hessian = stats.hessian.to(rows.device)
        with ieee_products():
            return ((rows @ hessian) * rows).sum((1, 2), dtype=torch.float64)
    assert stats.block_hessian is not None, "the caller has a Hessian"
    hessian = stats.block_hessian.to(rows.device, torch.float64)
    padding = len(hessian) * HESSIAN_BLOCK - rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, padding)).double()
    blocks = padded.flatten(0, 1).view(-1, len(hessian), HESSIAN_BLOCK).transpose(0, 1)
    energy = (blocks @ hessian * blocks).sum((0, 2))
    return energy.view(len(rows), -1).sum(1)
