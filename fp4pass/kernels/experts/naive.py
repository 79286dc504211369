"""Multiply the rows of a mixture and their experts in a loop over the chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import Format
from ...core.packing import PackedInput, PackedWeight, empty_rows
from ..dequantize.naive import dequantize_ref
from ..linear.naive import linear_quantized_ref, linear_ref
from ..quantize.naive import ACTIVATIONS, Quantize, quantize_ref
from ..statistics.naive import observe_full_ref, observe_ref


@dataclass(frozen=True)
class Gate:
    """The step between two products: `activation(gate) * (up + shift)`."""

    activation: str  # a name of ACTIVATIONS
    interleaved: bool = False  # gates are the even columns of a product, else its first half
    slope: float = 1.0  # of the activation: activation(slope * gate) / slope
    shift: float = 0.0  # added to the other half
    limit: float | None = None  # largest gate, and magnitude of the other half; None for any

    def __call__(self, both: Tensor) -> Tensor:
        """Return the gate [..., I] of products [..., 2 I]."""
        halves = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        gate, up = halves
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.slope == 1.0:
            active = ACTIVATIONS[self.activation](gate)
        else:
            active = ACTIVATIONS[self.activation](gate * self.slope) / self.slope
        return active * (up + self.shift) if self.shift else active * up


def experts_linear_ref(x: Tensor, ids: Tensor, weight: PackedWeight, fmt: Format) -> Tensor:
    """Return the rows of x times the packed weights [E, N, K] of their experts, [T, k, N]."""
    out = x.new_zeros((*ids.shape, weight.packed.shape[1]))
    for index, pairs in chosen(ids, len(weight.packed)):
        out[pairs] = linear_ref(rows_of(x, pairs), weight_of(weight, index), fmt)
    return out


def experts_linear_quantized_ref(
    x: Tensor, x_rows: PackedInput, ids: Tensor, weight: PackedWeight, fmt: Format, inputs: str = ""
) -> Tensor:
    """Return quantized rows times the packed weights of their experts, [T, k, N]."""
    # Of x only the dtype is read, and only the gradient computed (`linear_quantized_ref`).
    out = x.new_zeros((*ids.shape, weight.packed.shape[1]))
    for index, pairs in chosen(ids, len(weight.packed)):
        codes, scales = (rows_of(each, pairs) for each in x_rows[:2])
        rows = PackedInput(codes, scales, of_expert(x_rows.global_scale, index))
        own = weight_of(weight, index)
        out[pairs] = linear_quantized_ref(x, rows, own, fmt, inputs=inputs)
    return out


def experts_quantize_ref(
    x: Tensor,
    ids: Tensor,
    global_scale: Tensor,
    fmt: Format,
    scale_method: str = "naive",
    *,
    quantize: Quantize = quantize_ref,
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of each expert by its own global scale [E]: [T, k, P], [T, k, K / b]."""
    # Of pairs that no expert here has, codes and scales are 0.
    packed, scale = (each.zero_() for each in empty_rows(x, ids.shape, fmt))
    for index, pairs in chosen(ids, len(global_scale)):
        own = global_scale[index : index + 1]
        packed[pairs], scale[pairs] = quantize(rows_of(x, pairs), own, fmt, scale_method)
    return packed, scale


def experts_mixture_ref(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    weight: PackedWeight,
    down_weight: PackedWeight,
    gate: Gate,
    fmt: Format,
    *,
    linear: Callable[..., Tensor] = experts_linear_ref,
) -> Tensor:
    """Return the sums over k of what experts ids [T, k] make of x [T, H], times weights [T, k]."""
    y = linear(gate(linear(x, ids, weight, fmt)), ids, down_weight, fmt)
    return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)


def experts_dense_ref(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the rows of x times the weights [E, N, K] of their experts, [T, k, N]."""
    out = x.new_zeros((*ids.shape, weight.shape[1]))
    for index, pairs in chosen(ids, len(weight)):
        own = None if bias is None else bias[index].to(x.dtype)
        out[pairs] = F.linear(rows_of(x, pairs), weight[index].to(x.dtype), own)
    return out


def experts_outer_ref(grad: Tensor, x: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Return the sums of grad^T x over the rows of each expert, [E, N, K]: a gradient."""
    out = grad.new_zeros((experts, grad.shape[-1], x.shape[-1]))
    for index, pairs in chosen(ids, experts):
        out[index] = grad[pairs].mT @ rows_of(x, pairs)
    return out


def experts_linear_transposed_ref(
    grad: Tensor, ids: Tensor, weight: PackedWeight, fmt: Format
) -> Tensor:
    """Return rows [T, k, N] times the weights [N, K] of their experts, [T, k, K]: a gradient."""
    out = grad.new_zeros((*ids.shape, fmt.columns(weight.packed.shape[-1])))
    for index, pairs in chosen(ids, len(weight.packed)):
        own = weight_of(weight, index)
        out[pairs] = grad[pairs] @ dequantize_ref(*own[:3], fmt, grad.dtype)
    return out


def weight_of(stack: PackedWeight, index: int) -> PackedWeight:
    """Return the packed weight of one expert."""
    packed, scale, global_scale, bias = stack
    own_bias = None if bias is None else bias[index]
    return PackedWeight(packed[index], scale[index], of_expert(global_scale, index), own_bias)


def of_expert(global_scale: Tensor | None, index: int) -> Tensor | None:
    """Return the global scale [1] of one expert, of those of all [E] or one for all [1]."""
    if global_scale is None or len(global_scale) == 1:
        return global_scale
    return global_scale[index : index + 1]


def chosen(ids: Tensor, experts: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each expert that ids [T, k] name, and where: its tokens, and their places in k."""
    for index in ids.unique().tolist():
        if 0 <= index < experts:
            yield index, pairs_of(ids, index)


def pairs_of(ids: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Return where ids [T, k] name an expert: its tokens, and their places in k."""
    # By the place first and then by token, as transformers gathers them: the order of rows may tell
    # how a product sums.
    place, token = torch.where((ids == index).t())
    return token, place


def rows_of(x: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the rows of pairs, of x [T, ...], one for all of a token, or [T, k, ...]."""
    token, place = pairs
    return x[token] if x.ndim == 2 else x[token, place]


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
