"""Latents: a coordinate in which every cell is one wide, and its rounding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from blocks import ALL
from torch import Tensor

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import E2M1, FORMATS, Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.common.rounding import round_to_codes_, round_to_values_
from fp4pass.lab.learning.latent import (
    cell_width,
    codes_of,
    from_cells,
    latent_weight,
    round_latent,
    rounded,
    search_again,
    steps_of,
    to_cells,
    unrounded,
)
from fp4pass.methods import search_scales
from fp4pass.nn.linear import StoredWeight

ELEMENTS = {fmt.element.name: fmt.element for fmt in FORMATS.values()}


def numbers(fmt: Format, rows: int = 8, columns: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-1, 1, columns)


def quantized(fmt: Format, weight: Tensor, method: str = "sse") -> tuple[StoredWeight, Tensor]:
    """A packed weight, and its values."""
    number = fmt.global_scale_for(float(weight.abs().max()))
    state = search_scales(weight, fmt, number, method)
    divisor = torch.tensor([fmt.global_scale_of(number)]) if fmt.has_global_scale else None
    stored = StoredWeight(state.qdata, state.scale, divisor, None)
    return stored, ops.dequantize(*stored[:3], fmt.key, torch.float32)


@pytest.mark.core
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_rounding_is_that_of_the_element(element: fp4pass.core.elements.Element) -> None:
    """To nearest, ties to the even code, saturating: at every boundary and its neighbours."""
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(element.magnitudes)])
    values = torch.tensor(element.magnitudes)
    near = [torch.nextafter(middles, torch.tensor(end)) for end in (-math.inf, math.inf)]
    # So near to a boundary float32 latents cannot tell the two, except at small codes.
    near = [each + (each - middles) * 2**8 for each in near]
    past = torch.tensor([2.0, 1e30]) * element.max
    x = torch.cat((middles, values, *near, past, torch.linspace(0, element.max * 1.2, 999)))
    x = torch.cat((x, -x))
    if len(x) % 4:
        x = torch.cat((x, torch.zeros(4 - len(x) % 4)))
    latent = to_cells(x, element)
    assert torch.equal(rounded(latent, element), round_to_values_(x.clone(), element))
    codes = unpack_codes(codes_of(latent, element), element.bits)
    assert torch.equal(codes, round_to_codes_(x.clone(), element))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_cells_are_one_wide(element: fp4pass.core.elements.Element) -> None:
    values = torch.tensor(element.magnitudes)
    count = len(values)
    assert torch.equal(to_cells(values, element), torch.arange(float(count)))
    x = torch.linspace(-element.max, element.max, 777)
    torch.testing.assert_close(from_cells(to_cells(x, element), element), x)
    # The derivative of the map.
    latent = torch.arange(count - 1) + 0.25
    moved = from_cells(latent + 0.5, element) - from_cells(latent, element)
    torch.testing.assert_close(cell_width(latent, element) / 2, moved)


def test_a_cell_of_e2m1() -> None:
    latent = torch.tensor([0.2, -1.7, 3.2, 4.0, -5.5, 6.4, 7.0, 9.0])
    assert cell_width(latent, E2M1).tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert rounded(latent, E2M1).tolist() == [0.0, -1.0, 1.5, 2.0, -4.0, 4.0, 6.0, 6.0]


@pytest.mark.core
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)
def test_latents_begin_with_the_codes_that_are_there(fmt: Format, share: float) -> None:
    """Whatever the float weight: the one that was rounded, or quite another."""
    weight = numbers(fmt)
    stored, dense = quantized(fmt, weight)
    steps = steps_of(stored, fmt)
    for target in (weight, numbers(fmt, seed=1), torch.zeros_like(weight), -1e30 * weight):
        latent = latent_weight(stored.packed, steps, target, fmt, share)
        assert torch.equal(codes_of(latent, fmt.element), stored.packed)
        assert torch.equal(round_latent(latent, steps, fmt, torch.float32), dense)
    # The float weight is not forgotten.
    latent = latent_weight(stored.packed, steps, weight, fmt, share)
    left = (unrounded(latent, steps, fmt) - weight).norm()
    assert left <= (dense - weight).norm() * (1 - 0.6 * share)


def test_the_gradient_is_that_of_what_latents_stand_for() -> None:
    fmt = get_format("nvfp4")
    weight = numbers(fmt)
    stored, _ = quantized(fmt, weight)
    steps = steps_of(stored, fmt)
    latent = latent_weight(stored.packed, steps, weight, fmt).requires_grad_()
    target = numbers(fmt, seed=2)
    dense = round_latent(latent, steps, fmt, torch.float32)
    (found,) = torch.autograd.grad((dense * target).sum(), latent)
    twin = latent.detach().clone()
    moved = unrounded(twin + 2.0**-6, steps, fmt) - unrounded(twin - 2.0**-6, steps, fmt)
    away = (twin - twin.round()).abs() > 2.0**-5
    torch.testing.assert_close((found)[away], (moved * target * 2.0**5)[away], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("key", ["nvfp4", "mxfp4", "nvfp4:32:multiplier", "mxfp6_e2m3"])
def test_scales_are_searched_again_exactly(key: str) -> None:
    """The search of the method "hessian", of what the latents stand for."""
    fmt = get_format(key)
    weight = numbers(fmt)
    stored, _ = quantized(fmt, weight, "naive")
    half = torch.randn(8, 32, 32, generator=torch.Generator().manual_seed(3))
    hessian = half @ half.mT
    latent = latent_weight(stored.packed, steps_of(stored, fmt), weight, fmt, 0.9)
    before = unrounded(latent, steps_of(stored, fmt), fmt)
    number = fmt.global_scale_of(float(stored.global_scale)) if fmt.has_global_scale else 1.0
    wanted = search_scales(before, fmt, number, "hessian", hessian)
    scale = search_again(latent, stored, fmt, hessian)
    assert torch.equal(scale, wanted.scale) and not torch.equal(scale, stored.scale)
    assert torch.equal(codes_of(latent, fmt.element), wanted.qdata)
    # What is inside the last cell stands for the same number as before.
    steps = steps_of(stored._replace(scale=scale), fmt)
    inside = before.abs() < (steps * fmt.element.max).repeat_interleave(fmt.block, 1)
    torch.testing.assert_close(unrounded(latent, steps, fmt)[inside], before[inside])


def test_scales_of_a_stack_are_those_of_its_matrices() -> None:
    """A global scale for each expert, or for two parts of its rows."""
    fmt = get_format("nvfp4")
    weights = [numbers(fmt, seed=i) * 4.0**i for i in range(4)]
    parts = [quantized(fmt, weight, "naive")[0] for weight in weights]
    apart = [steps_of(part, fmt) for part in parts]
    half = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(3))
    hessian = half @ half.mT
    for rows, experts in ((1, 4), (2, 2)):
        packed, scale = (
            torch.stack([getattr(part, name) for part in parts]).unflatten(0, (experts, rows))
            .flatten(1, 2) for name in ("packed", "scale")
        )  # fmt: skip
        number = torch.cat([part.global_scale for part in parts]).view(experts, rows)
        stack = StoredWeight(packed, scale, number.flatten() if rows == 1 else number, None)
        steps = steps_of(stack, fmt)
        assert torch.equal(steps.flatten(0, 1), torch.cat(apart))
        target = torch.cat(weights).view(experts, -1, weights[0].shape[1])
        latent = latent_weight(packed, steps, target, fmt)
        found = search_again(latent, stack, fmt, hessian[:experts])
        for i, part in enumerate(parts):
            own = latent_weight(part.packed, apart[i], weights[i], fmt)
            wanted = search_again(own, part, fmt, hessian[i // rows])
            assert torch.equal(found.view(4, *wanted.shape)[i], wanted)
            assert torch.equal(latent.view(4, *own.shape)[i], own)
