"""One tensor to packed codes and back, in any format or codebook."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..core.codebooks import Codebook, get_scheme
from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import DtypeError, NonFiniteError, OptionError, ShapeError
from ..methods import Stats, resolve_method, weight_amax


def quantize(
    x: Tensor,
    scheme: str = "nf4",
    block_size: int | None = None,
    *,
    method: object = "sse",
    global_scale: float | str = "auto",
) -> QuantState:
    """Quantize a tensor in blocks.

    x: float32, bfloat16, float16 or float64, of any shape. scheme: a format such as "nvfp4",
    whose blocks run along the last dimension, or a codebook such as "nf4", whose blocks run over
    the flattened tensor; either way the last block may be shorter. block_size: elements to a
    block, None for the scheme's own. Of formats only: method chooses block scales, "naive" or
    "sse"; global_scale is the multiplier of all, 2^-126 to 2^126, or "auto" for the power of two
    that x asks for.
    Raises OptionError, DtypeError, ShapeError for an empty x, and NonFiniteError.
    """
    found = get_scheme(scheme, "default" if block_size is None else block_size)
    if x.dtype not in ops.FLOATS:
        raise DtypeError(
            f"The tensor to quantize is {x.dtype}; float32, bfloat16, float16 or float64 is "
            "wanted. Cast it before the call."
        )
    if not x.numel():
        raise ShapeError(f"The tensor to quantize has shape {tuple(x.shape)}, which is empty.")
    x = x.detach()
    if isinstance(found, Codebook):
        if global_scale != "auto":
            raise OptionError(f"global_scale={global_scale!r}; a codebook, {found.key}, has none.")
        resolve_method(method)
        qdata, absmax = ops.quantize_codebook(x, found.key)
        if not absmax.isfinite().all():
            raise _not_finite()
        return QuantState(qdata, absmax, 1.0, found, tuple(x.shape), x.dtype)
    return _quantize_format(x, found, method, global_scale)


def _quantize_format(
    x: Tensor, fmt: Format, method: object, global_scale: float | str
) -> QuantState:
    chosen, options = resolve_method(method)
    if chosen.needs:
        raise OptionError(
            f"Method {chosen.name!r} needs what calibration collects, which a single tensor has "
            "not. Choose 'naive' or 'sse'."
        )
    amax = weight_amax(x)
    if not math.isfinite(amax):
        raise _not_finite()
    factor = fmt.global_scale_for(amax)
    if global_scale != "auto":
        try:
            factor = math.nan if isinstance(global_scale, str) else float(global_scale)
        except (TypeError, ValueError, RuntimeError):
            factor = math.nan
        # Where it is a normal float32, and the scales times it are finite where they are of use.
        if not 2.0**-126 <= factor <= 2.0**126:
            raise OptionError(
                f"global_scale={global_scale!r}; 'auto' or a number from 2^-126 to 2^126 is wanted."
            )
    if factor != 1.0 and not fmt.has_global_scale:
        raise OptionError(f"global_scale={global_scale!r}; {fmt.key} has none.")
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    rows = F.pad(rows, (0, -rows.shape[1] % fmt.block))  # [N, whole blocks]
    state = chosen.function(rows, Stats(), fmt, factor, options)
    leading = x.shape[:-1]
    return dataclasses.replace(
        state,
        qdata=state.qdata.view(*leading, -1),
        scale=state.scale.view(*leading, -1),
        shape=tuple(x.shape),
        dtype=x.dtype,
    )


def _not_finite() -> NonFiniteError:
    return NonFiniteError(
        "The tensor to quantize holds NaN or infinity, in float32. Repair or scale it before."
    )


def dequantize(state: QuantState) -> Tensor:
    """The tensor that a QuantState stands for, in its shape and dtype.

    Computed in float32 and rounded once. In formats each value is code * scale * global_scale.
    """
    if isinstance(state.scheme, Codebook):
        key = state.scheme.key
        return ops.dequantize_codebook(state.qdata, state.scale, key, state.shape, state.dtype)
    global_scale, key = None, state.scheme.key
    if state.global_scale != 1.0:
        # The multiplier itself, which need not have an exact reciprocal.
        global_scale = torch.tensor([state.global_scale], device=state.qdata.device)
        key = state.scheme.with_multiplier().key
    rows = ops.dequantize(state.qdata, state.scale, global_scale, key, state.dtype)
    columns = state.shape[-1] if state.shape else 1
    return rows[..., :columns].reshape(state.shape).contiguous()
