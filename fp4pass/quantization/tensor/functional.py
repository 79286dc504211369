"""Quantize a tensor one dimension of which is a block, and measure the error.

The names and conventions of qwantize are in `fp4pass.parity.qwantize`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.formats import get_format
from ...errors import OptionError, ShapeError, unknown_name
from ...kernels.statistics.naive import weight_amax
from .blocks import (
    QuantizedBlocks,
    block_hessians,
    read_blocks,
    read_global_scale,
    require_float,
    search_blocks,
)

__all__ = ["OBJECTIVES", "QuantizedBlocks", "error_metrics", "global_scale_for", "quantize_blocks"]

# The objectives of block scales.
OBJECTIVES = ("naive", "sse", "hessian")

# Elements of a tile of inputs or outputs in error_metrics.
_TILE = 1 << 22


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)


def quantize_blocks(
    weight: Tensor,
    fmt: str = "nvfp4",
    objective: str = "sse",
    *,
    dim: int = -1,
    inputs: Tensor | None = None,
    block_hessian: Tensor | None = None,
    global_scale: float | Tensor | str = "auto",
) -> QuantizedBlocks:
    """Quantize blocks with the scales that an objective asks for.

    Args:
        weight: a finite floating-point tensor, read as float32. For the objective "hessian" it is
            the rows of a layer: [N, J, block] or [N * J, block], or either with the block
            elsewhere, where a row has J blocks.
        fmt: a format, whose block size is that of `weight.shape[dim]`.
        objective: "naive" for the scale that the largest magnitude suggests, "sse" for the scale
            of least squared error, or "hessian" for the scale of least output error r^T H r, where
            r is the rounding error of a block; the last two out of all scales of the format.
        dim: the dimension that is the block.
        inputs: [..., J * block], the inputs of the layer, for the objective "hessian"; read a few
            tokens at a time and summed in float64.
        block_hessian: [J, block, block], the sum of a a^T over the inputs a, in place of `inputs`.
        global_scale: the multiplier of all block scales: a number from 2^-126 to 2^126, or "auto"
            for what `global_scale_for` returns.

    Returns:
        The quantized blocks. A block of zeros has the smallest scale.

    Raises:
        OptionError: an option is unknown or does not fit the format.
        ShapeError: the shape of a tensor does not fit the format or the other tensors.
        DtypeError: a tensor is not floating point.
        NonFiniteError: a tensor holds NaN or infinity, in float32.

    Source: docs/search.md.

    Example:
        >>> weight = torch.randn(8, 4, 16)
        >>> blocks = fp4pass.functional.quantize_blocks(weight)
        >>> blocks.dequantize().shape
        torch.Size([8, 4, 16])
    """
    caller = "quantize_blocks"
    if objective not in OBJECTIVES:
        raise unknown_name("Objective", objective, OBJECTIVES)
    blocks, found, amax = read_blocks(caller, weight, dim, get_format(fmt))
    # Rounded, as block scales are multiplied by it in float32.
    given = torch.tensor(read_global_scale(caller, found, global_scale, amax), dtype=torch.float32)
    hessian = None
    if objective == "hessian":
        hessian = block_hessians(caller, blocks, found, inputs, block_hessian)
    elif inputs is not None or block_hessian is not None:
        raise OptionError(
            f"{caller}: expected no inputs and no block_hessian for objective={objective!r}. Leave "
            "them out, or choose objective='hessian'."
        )
    packed, scale = search_blocks(blocks, hessian, given.item(), found, objective)
    return QuantizedBlocks(packed.movedim(-1, dim), scale, given.item(), found, dim)


def global_scale_for(weight: Tensor, fmt: str = "nvfp4") -> Tensor:
    """Return the global scale that "auto" stands for.

    Args:
        weight: a floating-point tensor.
        fmt: a format.

    Returns:
        float32 []: the smallest power of two with which the largest block scale times the largest
        element reaches every magnitude of the weight; 1 for formats without a global scale.

    Raises:
        OptionError: the format is unknown, or the weight is not finite.
        DtypeError: the weight is not floating point.
        ShapeError: the weight has no elements.

    Example:
        >>> fp4pass.functional.global_scale_for(torch.tensor([[1.0] * 16]))
        tensor(0.0005)
    """
    require_float("global_scale_for", "weight", weight)
    if not weight.numel():
        raise ShapeError(f"global_scale_for: expected a weight with elements, got {weight.shape}.")
    return torch.tensor(get_format(fmt).global_scale_for(weight_amax(weight)), device=weight.device)


def error_metrics(
    weight: Tensor, dequantized: Tensor, inputs: Tensor | None = None
) -> dict[str, float]:
    """Measure how far a dequantized weight and its outputs are from those of the dense weight.

    Norms are Frobenius norms, summed in float64, of float32 numbers, or of float64 ones if the
    weight is float64.

    Args:
        weight: [N, K], or in blocks, [N, J, block].
        dequantized: in the shape of the weight.
        inputs: [..., K], read a few tokens at a time.

    Returns:
        weight_error: |dequantized - weight|.
        weight_error_pct: in percent of |weight|; 0 or inf where that is 0.
        output_error: |inputs (dequantized - weight)^T|, with inputs only.
        output_error_pct: in percent of |inputs weight^T|, with inputs only.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: a tensor is not floating point.

    Example:
        >>> weight = torch.randn(8, 64)
        >>> errors = fp4pass.functional.error_metrics(weight, weight, inputs=torch.randn(3, 64))
        >>> errors["output_error"]
        0.0
    """
    caller = "error_metrics"
    require_float(caller, "weight", weight)
    require_float(caller, "dequantized", dequantized)
    if weight.shape != dequantized.shape or weight.ndim < 2 or not weight.numel():
        raise ShapeError(
            f"{caller}: expected weight and dequantized of one shape, [N, K] or [N, J, block], got "
            f"{tuple(weight.shape)} and {tuple(dequantized.shape)}."
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    dense = weight.detach().flatten(1).to(dtype)
    off = dequantized.detach().flatten(1).to(dense.device, dtype) - dense
    error, norm = _square(off) ** 0.5, _square(dense) ** 0.5
    metrics = {"weight_error": error, "weight_error_pct": _percent(error, norm)}
    if inputs is None:
        return metrics
    require_float(caller, "inputs", inputs)
    if inputs.shape[-1:] != dense.shape[1:] or not inputs.numel():
        raise ShapeError(
            f"{caller}: expected inputs of shape [..., {dense.shape[1]}], as the weight has that "
            f"many columns, got {tuple(inputs.shape)}."
        )
    error = norm = 0.0
    for chunk in inputs.detach().flatten(0, -2).split(max(1, _TILE // max(dense.shape))):
        tokens = chunk.to(dense.device, dtype)
        # Not the difference of two outputs, which would cancel.
        error += _square(tokens @ off.t())
        norm += _square(tokens @ dense.t())
    output = {"output_error": error**0.5, "output_error_pct": _percent(error**0.5, norm**0.5)}
    return metrics | output


def _square(x: Tensor) -> float:
    """Return the sum of squares, in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _percent(part: float, whole: float) -> float:
    if whole == 0.0:
        return math.inf if part else 0.0
    return 100 * part / whole
