"""Latent weights: float numbers that round to the codes of a packed weight.

A latent is in cells. The values of an element lie at whole numbers, 0, 1, 2, ... with a sign, in
the order of its codes; between two of them a latent stands for the numbers between their values.
The cell of a code, the interval that rounds to it, is then one wide for every code, so a step of an
optimizer means the same for small and large weights. E2M1, in units of the block's step:

    latent   0    1    2    3    4    5    6    7
    value    0   .5    1  1.5    2    3    4    6

Ties go to the even code, as everywhere: a latent of 2.5 is code 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.elements import Element
from ...core.formats import Format
from ...core.packing import pack_codes, unpack_codes
from ...kernels.common.rounding import scale_values
from ...methods import search_scales
from ...nn.experts import parts_of
from ...nn.linear import StoredWeight

# A latent that begins in a cell stays this far from its boundaries, from where any step leaves it.
_MARGIN = 2.0**-10


@lru_cache(maxsize=64)
def _magnitudes(element: Element, device: torch.device) -> Tensor:
    """Return the magnitudes float32 [L + 1], and one more behind the last, a step away."""
    *_, before, last = element.magnitudes
    values = (*element.magnitudes, 2 * last - before)
    return torch.tensor(values, dtype=torch.float32, device=device)


def to_cells(quotient: Tensor, element: Element) -> Tensor:
    """Return the latents of float32 numbers in units of the block's step, each with its sign.

    Numbers that saturate lie at the far end of the last cell.
    """
    values = _magnitudes(element, quotient.device)
    magnitude = quotient.abs()
    below = torch.bucketize(magnitude, values, right=True, out_int32=True)
    below = below.sub_(1).clamp_(max=len(values) - 2)
    low, high = values[below], values[below + 1]
    cells = (magnitude - low).div_(high - low).add_(below)
    # There is no cell behind the last code, whose index is len(values) - 2.
    return cells.clamp_(max=len(values) - 1.5).copysign_(quotient)


def from_cells(latent: Tensor, element: Element) -> Tensor:
    """Return the values of latents in units of the block's step: the inverse of `to_cells`."""
    values = _magnitudes(element, latent.device)
    magnitude = latent.abs()
    below = magnitude.int().clamp_(max=len(values) - 2)
    low, high = values[below], values[below + 1]
    return torch.addcmul(low, magnitude.sub_(below), high - low).copysign_(latent)


def cell_width(latent: Tensor, element: Element) -> Tensor:
    """Return how wide a cell is where latents lie, in units of the block's step.

    That is the distance of the two values around a latent: .5 to 2 for E2M1.
    """
    values = _magnitudes(element, latent.device)
    below = latent.abs().int().clamp_(max=len(values) - 2)
    return values[below + 1] - values[below]


def rounded(latent: Tensor, element: Element) -> Tensor:
    """Return the values of the codes of latents, in units of the block's step."""
    values = _magnitudes(element, latent.device)
    return values[_indices(latent, element)].copysign_(latent)


def codes_of(latent: Tensor, element: Element) -> Tensor:
    """Return the packed codes [..., P] that latents [..., K] round to."""
    sign = torch.signbit(latent).to(torch.uint8) << (element.bits - 1)
    codes = sign.bitwise_or_(_indices(latent, element).to(torch.uint8))
    return pack_codes(codes, element.bits)


def _indices(latent: Tensor, element: Element) -> Tensor:
    """Return the indices int32 of the magnitudes that latents round to."""
    # torch.round, too, takes ties to even.
    return latent.abs().round_().clamp_(max=len(element.magnitudes) - 1).int()


def steps_of(stored: StoredWeight, fmt: Format) -> Tensor:
    """Return the steps of blocks, scale times global scale: float32 [..., N, K / block].

    A stack [E, N, K] may have a global scale for each expert, or for parts of its rows.
    """
    step = scale_values(stored.scale, fmt.scale)
    if stored.global_scale is None:
        return step
    # By the arithmetic of `dequantize`.
    factor = stored.global_scale
    if step.ndim == 3:
        rows = step.shape[1] // parts_of(stored)
        factor = factor.view(len(step), -1).repeat_interleave(rows, 1).unsqueeze(-1)
    return step.mul_(factor) if fmt.multiplies else step.div_(factor)


def latent_weight(
    packed: Tensor, steps: Tensor, target: Tensor, fmt: Format, share: float = 0.5
) -> Tensor:
    """Return the latents of a packed weight, on the way to a float weight: float32 [..., N, K].

    They round to the codes that are there. Each lies between the value of its code and what is
    nearest to the float weight in the cell of that code.

    Args:
        packed: uint8 [..., N, P].
        steps: float32 [..., N, K / block], as `steps_of` returns them.
        target: [..., N, K], the float weight as it is stored: rotated if the layer is.
        fmt: the format.
        share: of that way, from 0 to 1. At 1 a latent is the float weight wherever that has the
            code.
    """
    element = fmt.element
    codes = unpack_codes(packed, element.bits)
    sign_bit = 1 << (element.bits - 1)
    sign = 1.0 - 2.0 * (codes >> (element.bits - 1))
    center = (codes & (sign_bit - 1)).float()
    quotient = target.float().unflatten(-1, (-1, fmt.block)) / steps.unsqueeze(-1)
    half = 0.5 - _MARGIN
    offset = to_cells(quotient.flatten(-2), element).mul_(sign).sub_(center).clamp_(-half, half)
    # A zero keeps the sign of its code.
    return center.add_(offset, alpha=share).clamp_(min=0.0).copysign_(sign)


@torch.no_grad()
def lean(latent: Tensor, share: float) -> None:
    """Leave latents a share of their distance from the values of their codes, in place."""
    center = latent.abs().round_()
    sign = torch.copysign(torch.ones_like(latent), latent)
    offset = latent.abs().sub_(center)
    latent.copy_(center.add_(offset, alpha=share).mul_(sign))


class _Round(torch.autograd.Function):
    """The weight that latents round to; its gradient counts as that of the unrounded weight."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, steps: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(latent, steps)
        ctx.fmt = fmt
        return _in_steps(rounded(latent, fmt.element), steps, fmt).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        latent, steps = ctx.saved_tensors
        width = _in_steps(cell_width(latent, ctx.fmt.element), steps, ctx.fmt)
        return width.mul_(grads[0]), None, None, None


def _in_steps(quotient: Tensor, steps: Tensor, fmt: Format) -> Tensor:
    """Multiply numbers [..., K] by the steps of their blocks [..., K / block], in place."""
    quotient.unflatten(-1, (-1, fmt.block)).mul_(steps.unsqueeze(-1))
    return quotient


def round_latent(latent: Tensor, steps: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [..., N, K] that latents round to, in a dtype.

    Rounding is straight-through: in the backward the weight counts as what the latents stand for.
    """
    found: Tensor = _Round.apply(latent, steps, fmt, dtype)
    return found


def unrounded(latent: Tensor, steps: Tensor, fmt: Format) -> Tensor:
    """Return the weight float32 [..., N, K] that latents stand for."""
    return _in_steps(from_cells(latent, fmt.element), steps, fmt)


@torch.no_grad()
def search_again(
    latent: Tensor, stored: StoredWeight, fmt: Format, block_hessian: Tensor | None = None
) -> Tensor:
    """Search the block scales again for the values of latents, exactly, over all of the format.

    Args:
        latent: [N, K], or [E, N, K] of a stack; it is expressed in the new steps, in place.
        stored: the scales that it is in now.
        fmt: the format.
        block_hessian: float32 [ceil(K / 32), 32, 32] of the inputs, or [E, ...]; None to search by
            squared errors.

    Returns:
        The bits of the new scales, uint8 [..., N, K / block].
    """
    weight = unrounded(latent, steps_of(stored, fmt), fmt)
    scale = torch.empty_like(stored.scale)
    # Matrices of a stack that have a global scale each; parts of an expert's rows may, too.
    parts = parts_of(stored) * (1 if weight.ndim == 2 else len(weight))
    matrices, found = (each.view(parts, -1, each.shape[-1]) for each in (weight, scale))
    numbers = [1.0] * parts
    if stored.global_scale is not None:
        numbers = list(map(fmt.global_scale_of, stored.global_scale.flatten().tolist()))
    objective = "sse" if block_hessian is None else "hessian"
    for i, matrix in enumerate(matrices):
        hessian = block_hessian
        if hessian is not None and weight.ndim == 3:
            hessian = hessian[i * len(weight) // parts]
        found[i] = search_scales(matrix, fmt, numbers[i], objective, hessian).scale
    steps = steps_of(stored._replace(scale=scale), fmt)
    quotient = weight.unflatten(-1, (-1, fmt.block)).div_(steps.unsqueeze(-1)).flatten(-2)
    latent.copy_(to_cells(quotient, fmt.element))
    return scale
