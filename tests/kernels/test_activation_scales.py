"""Scales of activations by squared error: the best of all on a CPU, of a few in the kernels."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from blocks import VARIANTS, check_optimal
from kernel_cases import (
    DEVICE,
    DTYPES,
    cases,
    divisor,
    divisor_of,
    formats,
    quiet,
    seeded,
)
from kernels.test_quantize import INPUTS
from oracle import errors_at, near_scales
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.quantize.naive import quantize_ref
from fp4pass.kernels.quantize.triton import quantize_triton

pytestmark = quiet


@formats
@pytest.mark.parametrize("name", INPUTS)
def test_the_reference_has_the_best_of_all_scales(fmt: Format, name: str) -> None:
    x = INPUTS[name](seeded())
    g = fmt.global_scale_for(x.abs().max().item())
    found = quantize_ref(x, divisor_of(fmt, g), fmt, "sse")
    rows = x.float()
    residual = oracle.residuals(rows.view(len(x), -1, fmt.block), fmt.name, g)
    check_optimal(rows, residual, fmt, found, None)
    codes = oracle.codes(
        rows
        / (oracle.scales(fmt.name)[found[1].long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    )
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(found[0].long(), packed)


def worst_of(least: Tensor, naive: Tensor, g: float, fmt: Format, dtype: torch.dtype) -> Tensor:
    """What the error of the best candidate may become by the arithmetic in which they compete."""
    if dtype != torch.bfloat16:
        return least * (1 + 1e-4)
    # Steps up to twice the naive one are rounded to 8 bits, and so is what 6 of them leave; sums
    # of a quarter of the block lose a rounding with each element. Both candidates have that.
    step = oracle.scales(fmt.name)[naive.long() - 1] * (2 * g)
    off = fmt.block**0.5 * 6 * step * 2.0**-8
    return (least.sqrt() * (1 + fmt.block / 4 * 2.0**-8) + 2 * off) ** 2


def spread(rows: int, columns: int) -> Tensor:
    """Heavy tails, rows of many sizes, and blocks of the kinds that go wrong."""
    x = torch.randn(rows, columns, generator=seeded()) ** 3
    x *= 2.0 ** torch.randint(-12, 8, (rows, 1), generator=seeded(1))
    x[0] = 0
    x[1] = -0.0
    x[2, ::32] = 1e-30
    x[3] *= 2.0**-100
    x[4] = 3.0
    return x


# Global scales: None for that of x; 3 is no power of two, and 2^-9 saturates.
SCALED = [
    (get_format("nvfp4"), torch.bfloat16, None),
    (get_format("nvfp4"), torch.bfloat16, 2.0**-9),
    (get_format("nvfp4:32"), torch.float16, 3.0),
    (get_format("mxfp4"), torch.float32, None),
    (get_format("mxfp4:16"), torch.bfloat16, None),
]
ALL_SCALED = [
    (fmt, dtype, g)
    for fmt, dtype, g in itertools.product(VARIANTS, DTYPES, (None, 3.0, 2.0**-9))
    if fmt.has_global_scale or g is None
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("fmt", "dtype", "g"), cases(SCALED, ALL_SCALED))
def test_the_kernel_has_the_best_of_its_candidates(
    fmt: Format, dtype: torch.dtype, g: float | None
) -> None:
    x = spread(24, 96).to(dtype)
    g = fmt.global_scale_for(x.abs().max().item()) if g is None else g
    packed, scale = (
        each.cpu() for each in quantize_triton(x.to(DEVICE), divisor(fmt, g), fmt, "sse")
    )
    naive = quantize_ref(x, divisor_of(fmt, g), fmt)[1].int()
    near = near_scales(x, naive, g, fmt)
    assert torch.stack([each == scale for each in near]).any(0).all()
    least = torch.stack([errors_at(x, each, g, fmt) for each in near]).amin(0)
    found = errors_at(x, scale, g, fmt)
    assert (found <= worst_of(least, naive, g, fmt, dtype)).all()
    # The naive scale wins a tie, as that of row 4 where 3 is an element times two candidates.
    exact = errors_at(x, naive, g, fmt) == 0
    assert exact.any() and torch.equal(scale[exact].int(), naive[exact])
    # The codes are those of rounding to nearest at the scale.
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float()
    codes = oracle.codes(x.float() / step.repeat_interleave(fmt.block, 1))
    assert torch.equal(packed.long(), codes[:, ::2] | codes[:, 1::2] << 4)
