"""Collect the statistics of each expert of a mixture, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..statistics.naive import observe_full_ref, observe_ref
from .naive import chosen, pairs_of, rows_of


def observe_experts_ref(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    hessian: Tensor,
    count: Tensor,
    amax: Tensor,
    routing: Tensor,
    *,
    observe: Callable[..., None] = observe_ref,
) -> None:
    """Add the rows of each expert to its Hessian [E, ...], count and routing weight, in place."""
    # hessian: of blocks [E, J, 32, 32] or whole [E, K, K]; amax [1] is that of all.
    add = observe_full_ref if hessian.ndim == 3 else observe
    for index, pairs in chosen(ids, len(hessian)):
        add(rows_of(x, pairs), hessian[index], count[index : index + 1], amax)
        routing[index] += weights[pairs].sum()


def expert_hessian(
    inputs: Sequence[tuple[Tensor, Tensor]], index: int, device: torch.device
) -> Tensor:
    """Return the whole Hessian [K, K] of what one expert reads of pairs of x and ids."""
    rows = (rows_of(x, pairs_of(ids, index)) for x, ids in inputs)
    return _sum_of(rows, inputs[0][0].shape[-1], device)


def hessian_of_all(
    inputs: Sequence[tuple[Tensor, Tensor]], experts: int, device: torch.device
) -> Tensor:
    """Return the sum [K, K] of the whole Hessians of all experts."""
    columns = inputs[0][0].shape[-1]
    total = torch.zeros(columns, columns, device=device)
    for x, ids in inputs:
        is_expert = (ids >= 0) & (ids < experts)
        if x.ndim == 3:
            total += _sum_of([x[is_expert]], columns, device)
            continue
        # A token counts once for each of its experts.
        counts = is_expert.sum(-1)
        for count in counts.unique().tolist():
            total += count * _sum_of([x[counts == count]], columns, device)
    return total


def _sum_of(rows: Iterable[Tensor], columns: int, device: torch.device) -> Tensor:
    """Return the whole Hessian [K, K] of rows [..., K]."""
    total, count = torch.zeros(columns, columns, device=device), torch.zeros(1, dtype=torch.int64)
    for each in rows:
        observe_full_ref(each.to(device), total, count, torch.zeros(1, device=device))
    return total
