"""Quantize one tensor in any format, and dequantize it."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..core.formats import get_format
from ..core.quant_state import OtherRecord, QuantState, TensorRecord, load_state, other_record
from ..errors import NonFiniteError, OptionError, ShapeError, expected
from ..kernels.statistics.naive import weight_amax
from ..methods import Method, Stats, resolve_method
from ..methods.base import MethodChoice
from ..methods.search import exact_global_scale, may_be_exact
from ..record.schemes import weight_format
from .functional import read_global_scale, require_float

__all__ = ["QuantState", "load_state", "quantize"]

# Half of the largest number in float32, the dtype that values are computed in.
_WIDE = torch.float32
_HALF = torch.finfo(_WIDE).max / 2


def quantize(
    x: Tensor,
    scheme: str = "nvfp4",
    block_size: int | None = None,
    *,
    method: MethodChoice = "sse",
    global_scale: float | Literal["auto"] = "auto",
) -> QuantState | OtherRecord:
    """Quantize a tensor in blocks.

    Args:
        x: a finite tensor of any shape; float32, bfloat16, float16 or float64.
        scheme: a format such as "nvfp4", whose blocks run along the last dimension. A scheme for
            weights only, such as "nvfp4a16", is its format: a tensor has no inputs. After
            `import fp4pass.parity` also a codebook such as "nf4", whose blocks run over the
            flattened tensor. The last block may be shorter.
        block_size: elements that share a scale; None for the scheme's own block size.
        method: how block scales of a format are chosen, "naive" or "sse".
        global_scale: the multiplier of all block scales of a format, 2^-126 to 2^126, or "auto"
            for the smallest power of two with which the largest magnitude is within reach; of
            numbers that were quantized before, the next if "sse" keeps them only with that.

    Tiles of several rows, as of "fp8_block", are of the last two dimensions.

    Returns:
        A QuantState for a format, a `fp4pass.parity.CodebookState` for a codebook.

    Raises:
        OptionError: an option is unknown or does not fit the scheme.
        DtypeError: x is not floating point.
        ShapeError: x is empty.
        NonFiniteError: x holds NaN or infinity, in float32, or a number that is rounded to it.

    Example:
        >>> x = torch.randn(4, 64)
        >>> state = fp4pass.quantize(x, "nvfp4")
        >>> (fp4pass.dequantize(state) - x).norm() / x.norm() < 0.1
        tensor(True)
    """
    if isinstance(x, nn.Module | str | os.PathLike):
        raise OptionError(
            f"{expected('quantize: x', 'a torch.Tensor', type(x).__name__)} For a model, call "
            "fp4pass.convert(model); for a folder, fp4pass.quantize_checkpoint(source, directory)."
        )
    name, block = weight_format(scheme), "default" if block_size is None else block_size
    other = other_record(name)
    require_float("quantize", "x", x)
    if not x.numel():
        raise ShapeError(f"quantize: expected a tensor with elements, got shape {tuple(x.shape)}.")
    x = x.detach()
    if other is not None:
        return other.quantize(x, name, block, method, global_scale)
    fmt = get_format(name, block)
    chosen, options = without_statistics(method)
    amax = weight_amax(x)
    if not math.isfinite(amax):
        raise not_finite()
    factor = read_global_scale("quantize", fmt, global_scale, amax)
    leading, columns = x.shape[:-1], x.shape[-1] if x.ndim else 1
    # Matrices of a stack share no tile of several rows.
    height = x.shape[-2] if fmt.rows != 1 and x.ndim > 1 else x.numel() // columns
    padding = 0 if fmt.fits(columns) else -columns % fmt.block
    matrices = F.pad(x.reshape(-1, height, columns), (0, padding))
    if global_scale == "auto" and all(may_be_exact(each, fmt) for each in matrices):
        factor = exact_global_scale(list(matrices), fmt, factor)
    states = [chosen.quantize(each, Stats(), fmt, factor, options) for each in matrices]
    scale_rows: tuple[int, ...] = leading
    if fmt.rows != 1 and leading:
        scale_rows = (*leading[:-1], fmt.scale_rows(height))
    found = dataclasses.replace(
        states[0],
        qdata=torch.cat([state.qdata for state in states]).view(*leading, -1),
        scale=torch.cat([state.scale for state in states]).view(*scale_rows, -1),
        shape=tuple(x.shape),
    )
    # Rounding at most doubles a number.
    if amax > _HALF and not dequantize(dataclasses.replace(found, dtype=_WIDE)).isfinite().all():
        raise NonFiniteError(
            f"quantize: x reaches {amax:.3g}, which {fmt.key} rounds to what float32 cannot hold. "
            "Scale x before."
        )
    return found


def without_statistics(method: object) -> tuple[Method, Any]:
    """Return a method and its options. Raises OptionError for one that needs statistics."""
    chosen, options = resolve_method(method)
    if chosen.needs:
        raise OptionError(
            f"quantize: method {chosen.name!r} needs calibration statistics, which a single tensor "
            "does not have. Choose 'naive' or 'sse'."
        )
    return chosen, options


def not_finite() -> NonFiniteError:
    """Return the error for a tensor with NaN or infinity."""
    return NonFiniteError(
        "quantize: expected finite float32 numbers, got NaN or infinity. Repair or scale x before."
    )


def dequantize(state: TensorRecord) -> Tensor:
    """Return the dense tensor of what `quantize` returned (`fp4pass.dequantize`)."""
    if isinstance(state, OtherRecord):
        return state.dequantize()
    assert isinstance(state, QuantState)
    global_scale, fmt = None, state.format
    if state.global_scale != 1.0:
        # The multiplier itself, which need not have an exact reciprocal.
        global_scale = torch.tensor([state.global_scale], device=state.qdata.device)
        fmt = fmt.with_multiplier()
    rows = ops.dequantize(state.qdata, state.scale, global_scale, fmt.key, state.dtype)
    columns = state.shape[-1] if state.shape else 1
    return rows[..., :columns].reshape(state.shape).contiguous()
