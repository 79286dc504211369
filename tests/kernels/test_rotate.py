"""Rotations by Hadamard matrices: exact where they should be, and the kernels as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from blocks import ALL
from kernel_cases import DEVICE, codes_at, divisor, divisor_of, dtypes, formats, quiet, seeded
from oracle import errors_at, near_scales
from stable_codes import assert_agree
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.kernels.quantize.naive import quantize_ref
from fp4pass.kernels.rotate.naive import (
    ROTATIONS,
    rotate_blocks,
    rotate_hessian,
    rotate_quantize_ref,
    rotate_ref,
    rotate_weight,
    rotate_wide,
)
from fp4pass.kernels.rotate.triton import rotate_quantize_triton, rotate_triton
from fp4pass.kernels.statistics.naive import diagonal_blocks

pytestmark = quiet


sizes = pytest.mark.parametrize("rotation", ROTATIONS[1:])


def matrix(rotation: int, columns: int) -> Tensor:
    """D in float64, element by element: (-1)^(the bits that i and j have in common) / sqrt(k)."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(rotation)] for i in range(rotation)]
    block = torch.tensor(signs, dtype=torch.float64) / math.sqrt(rotation)
    return torch.block_diag(*[block] * (columns // rotation))


def spread(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Heavy tails, of many sizes, and a row of zeros."""
    x = torch.randn(rows, columns, generator=seeded()) ** 3
    x *= 2.0 ** torch.randint(-6, 6, (rows, 1), generator=seeded(1))
    x[0] = 0
    return x.to(dtype)


@pytest.mark.core
@sizes
def test_products_are_those_without_a_rotation(rotation: int) -> None:
    x, w = (torch.randn(n, 256, generator=seeded(n), dtype=torch.float64) for n in (7, 5))
    assert (rotate_ref(x, rotation) - x @ matrix(rotation, 256)).abs().max() < 1e-14
    product = rotate_ref(x, rotation) @ rotate_ref(w, rotation).t()
    assert (product - x @ w.t()).abs().max() < 1e-13
    assert (rotate_ref(rotate_ref(x, rotation), rotation) - x).abs().max() < 1e-14


@sizes
@dtypes
def test_there_is_one_rounding(rotation: int, dtype: torch.dtype) -> None:
    x = spread(9, 256, dtype)
    exact = x.double() @ matrix(rotation, 256)
    total = x.double().abs().view(9, -1, rotation).sum(-1).repeat_interleave(rotation, -1)
    wide = rotate_wide(x, rotation)
    assert wide.dtype == torch.float32
    assert ((wide - exact).abs() <= total * 2.0**-22).all()
    assert torch.equal(rotate_ref(x, rotation), wide.to(dtype))
    weight = rotate_weight(x, rotation)
    assert weight.dtype == torch.float32 and ((weight - exact).abs() <= exact.abs() * 2**-23).all()


@pytest.mark.core
@sizes
def test_hessians_are_those_of_rotated_inputs(rotation: int) -> None:
    x = torch.randn(400, 256, generator=seeded()) @ torch.randn(256, 256, generator=seeded(1))
    rotated = rotate_ref(x.double(), rotation)
    expected = rotated.t() @ rotated
    size = expected.diagonal().sqrt()
    close = 1e-5 * torch.outer(size, size)
    hessian = (x.double().t() @ x.double()).float()
    assert ((rotate_hessian(hessian, rotation) - expected).abs() <= close).all()
    # Without what is beside the diagonal blocks, that counts as zero.
    blocks = diagonal_blocks(hessian)
    if rotation > 32:
        d = matrix(rotation, 256)
        expected = d @ torch.block_diag(*blocks).double() @ d
    found = rotate_blocks(blocks, rotation)
    assert ((found - diagonal_blocks(expected)).abs() <= diagonal_blocks(close)).all()


@pytest.mark.core
@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.key)
def test_what_is_quantized_is_not_rounded_before(fmt: Format) -> None:
    x = torch.randn(6, 2 * math.lcm(128, fmt.block), generator=seeded()).bfloat16()
    d = divisor_of(fmt, 0.25)
    for scales in ("naive", "sse"):
        found = rotate_quantize_ref(x, 128, d, fmt, scales)
        wanted = quantize_ref(rotate_wide(x, 128), d, fmt, scales)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@sizes
@dtypes
def test_the_kernel_rotates(rotation: int, dtype: torch.dtype) -> None:
    for shape in ((33, 2 * rotation), (rotation,), (0, rotation), (2, 3, rotation)):
        x = torch.randn(shape, generator=seeded()).to(DEVICE, dtype)
        found = rotate_triton(x, rotation)
        assert found.dtype == dtype and found.shape == x.shape
        exact = x.double().view(-1, rotation).cpu() @ matrix(rotation, rotation)
        total = x.double().abs().view(-1, rotation).sum(-1, keepdim=True).cpu()
        off = (found.double().view(-1, rotation).cpu() - exact).abs()
        eps = torch.finfo(dtype).eps
        assert (off <= exact.abs() * eps / 2 * 1.01 + total * 2.0**-20).all()
    # Transposed in memory.
    x = spread(2 * rotation, 5, dtype).t().to(DEVICE)
    assert torch.equal(rotate_triton(x, rotation), rotate_triton(x.contiguous(), rotation))


@pytest.mark.quick(2)
@formats
@dtypes
def test_the_kernel_quantizes_what_it_rotates(fmt: Format, dtype: torch.dtype) -> None:
    for rotation in ROTATIONS[1:]:
        x = spread(21, 2 * rotation, dtype)
        y = rotate_wide(x, rotation)
        g = fmt.global_scale_for(y.abs().max().item())
        found = rotate_quantize_triton(x.to(DEVICE), rotation, divisor(fmt, g), fmt)
        total = x.double().abs().view(21, 2, rotation).sum(-1).repeat_interleave(rotation, -1)
        d = divisor_of(fmt, g)
        assert_agree((found[0].cpu(), found[1].cpu()), y, total * 2.0**-20, d, fmt)


@formats
def test_the_kernel_searches_scales_of_what_it_rotates(fmt: Format) -> None:
    """Inputs whose rotation is exact: multiples of 1/2 of little size, by 64."""
    x = (torch.randint(-6, 7, (16, 128), generator=seeded()) / 2) ** 3
    # Rotated, the largest element everywhere: a scale of 1 is exact, and maybe another one, too.
    x[0], x[0, ::64] = 0, 8 * fmt.element.max
    y = rotate_wide(x, 64)
    assert torch.equal(y.double(), x.double() @ matrix(64, 128))
    g = fmt.global_scale_for(y.abs().max().item())
    found = rotate_quantize_triton(x.to(DEVICE), 64, divisor(fmt, g), fmt, "sse")
    packed, scale = (t.cpu() for t in found)
    naive = quantize_ref(y, divisor_of(fmt, g), fmt)[1].int()
    options = near_scales(y, naive, g, fmt)
    assert torch.stack([each == scale for each in options]).any(0).all()
    assert (scale != naive).any()
    assert torch.equal(scale[0].int(), naive[0])
    errors = torch.stack([errors_at(y, each, g, fmt) for each in (*options, scale)])
    assert (errors[-1] <= errors[:-1].amin(0) * (1 + 1e-5)).all()
    assert torch.equal(packed, codes_at(y, scale, g, fmt))
