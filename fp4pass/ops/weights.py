"""Operators on weights: the search for scales, its errors and statistics, and the way back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.formats import get_format
from ..errors import NonFiniteError, ShapeError, unknown_name
from ..kernels.dequantize.reference import dequantize_ref
from ..kernels.search.reference import OBJECTIVES, search_ref
from ..kernels.statistics.errors_reference import errors_ref
from ..kernels.statistics.reference import HESSIAN_BLOCK, observe_full_ref, observe_ref
from .dispatch import empty_blocks, operator, run


def _fake_search(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: str, objective: str
) -> tuple[Tensor, Tensor]:
    return empty_blocks(weight, fmt)


@operator(_fake_search)
def search(
    weight: Tensor, hessian: Tensor | None, global_scale: float, fmt: str, objective: str
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K] with the block scales that minimize `objective`.

    hessian: [ceil(K / 32), 32, 32] float32 for "hessian", else None. Returns packed uint8
    [N, P] and scale bits [N, K / block].
    """
    if objective not in OBJECTIVES:
        raise unknown_name("Objective", objective, OBJECTIVES)
    if objective == "hessian":
        _require_hessian(hessian, weight.shape[1])
    form = get_format(fmt)
    return run(search_ref, weight, form, weight, hessian, global_scale, form, objective)


def _fake_errors(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: str,
) -> Tensor:
    return weight.new_empty(4, dtype=torch.float64)


@operator(_fake_errors)
def errors(
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    hessian: Tensor | None,
    fmt: str,
) -> Tensor:
    """Squared errors of a quantized weight and what they are relative to (kernels/statistics).

    Returns float64 [4]: |W - Q|^2, |W|^2, tr (W - Q) H (W - Q)^T and tr W H W^T.
    """
    form = get_format(fmt)
    if hessian is not None:
        _require_hessian(hessian, weight.shape[1])
    quantized = (packed, scale, global_scale)
    return run(errors_ref, weight, form, weight, *quantized, hessian, form)


def _fake_observe(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    return None


@operator(_fake_observe, mutates=("hessian", "count", "amax"))
def observe(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """Add the tokens of x [..., K] to a layer's input statistics (kernels/statistics)."""
    groups = math.ceil(x.shape[-1] / HESSIAN_BLOCK)
    if len(hessian) not in (0, groups):
        raise ShapeError(
            f"The block Hessian has {len(hessian)} blocks of {HESSIAN_BLOCK}; inputs of "
            f"{x.shape[-1]} columns have {groups}."
        )
    run(observe_ref, x, None, x, hessian, count, amax)


@operator(_fake_observe, mutates=("hessian", "count", "amax"))
def observe_full(x: Tensor, hessian: Tensor, count: Tensor, amax: Tensor) -> None:
    """The same for the whole Hessian, float32 [K, K]: one product, which needs no kernel."""
    if len(hessian) != x.shape[-1]:
        raise ShapeError(
            f"The Hessian is {tuple(hessian.shape)}; inputs of {x.shape[-1]} columns need "
            f"{(x.shape[-1], x.shape[-1])}."
        )
    observe_full_ref(x, hessian, count, amax)


def _fake_dequantize(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: str, dtype: torch.dtype
) -> Tensor:
    columns = get_format(fmt).columns(packed.shape[-1])
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


@operator(_fake_dequantize)
def dequantize(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: str, dtype: torch.dtype
) -> Tensor:
    """The tensor [..., K] in `dtype` that packed codes [..., P] and scale bits stand for."""
    form = get_format(fmt)
    return run(dequantize_ref, packed, form, packed, scale, global_scale, form, dtype)


def _require_hessian(hessian: Tensor | None, columns: int) -> None:
    groups = math.ceil(columns / HESSIAN_BLOCK)
    wanted = (groups, HESSIAN_BLOCK, HESSIAN_BLOCK)
    if hessian is None or tuple(hessian.shape) != wanted:
        found = "None" if hessian is None else f"of shape {tuple(hessian.shape)}"
        raise ShapeError(
            f"The block Hessian is {found}; for a weight of {columns} columns {wanted} is wanted."
        )
    if not hessian.isfinite().all():
        raise NonFiniteError("The block Hessian holds NaN or infinity. Calibrate on finite inputs.")
