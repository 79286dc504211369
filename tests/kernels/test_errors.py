"""Errors of a quantized weight: against float64, and the kernel against the reference."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from blocks import VARIANTS, spectrum
from kernels.cases import cases
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.search.reference import search_ref
from fp4pass.kernels.statistics.reference import errors_ref
from fp4pass.kernels.statistics.triton import errors_triton

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KEYS = [fmt.key for fmt in VARIANTS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# One block, columns that do not fill 32, several steps of rows, and whole tiles.
SHAPES = [(1, 1), (5, 3), (150, 4), (64, 2)]
CASES = [
    ("nvfp4", torch.float32, (5, 3)),
    ("nvfp4", torch.bfloat16, (1, 1)),
    ("nvfp4:32", torch.bfloat16, (64, 2)),
    ("mxfp4", torch.float16, (150, 4)),
    ("mxfp4:16", torch.float64, (5, 3)),
]


def quantized(
    fmt: Format, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).mul(0.02).to(dtype)
    g = fmt.global_scale_for(weight.abs().max().item())
    divisor = torch.tensor([1 / g]) if fmt.has_global_scale else None
    return weight, *search_ref(weight, None, g, fmt, "sse"), divisor


@pytest.mark.parametrize(
    ("key", "dtype", "shape"), cases(CASES, itertools.product(KEYS, DTYPES, SHAPES))
)
def test_errors(key: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    fmt, (rows, count) = get_format(key), shape
    columns = count * fmt.block
    weight, packed, scale, divisor = quantized(fmt, rows, columns, dtype)
    g = 1.0 if divisor is None else 1 / divisor.item()
    hessian = spectrum(0.9)[: math.ceil(columns / 32)]
    dense = weight.float().double()
    rest = dense - oracle.dequantize(packed, scale, g, fmt.name, fmt.block)
    padding = 32 * len(hessian) - columns
    expected = [rest.square().sum(), dense.square().sum()]
    for x in (rest, dense):
        blocks = torch.nn.functional.pad(x, (0, padding)).view(rows, -1, 32).transpose(0, 1)
        expected.append((blocks @ hessian.double() * blocks).sum())
    on = [None if t is None else t.to(DEVICE) for t in (weight, packed, scale, divisor, hessian)]
    found = [
        errors_ref(weight, packed, scale, divisor, hessian, fmt),
        errors_triton(*on, fmt).cpu(),  # type: ignore[arg-type]
    ]
    for sums in found:
        torch.testing.assert_close(sums, torch.stack(expected), rtol=2e-6, atol=0)
    multiplying = [None if t is None else 1 / t for t in on[3:4]]
    again = errors_triton(*on[:3], *multiplying, on[4], fmt.with_multiplier()).cpu()  # type: ignore[arg-type]
    assert torch.equal(again, found[1])
    without = errors_triton(*on[:4], None, fmt).cpu()  # type: ignore[arg-type]
    torch.testing.assert_close(without[:2], torch.stack(expected)[:2], rtol=1e-12, atol=0)
    assert (without[2:] == 0).all()


@pytest.mark.parametrize(("key",), cases([("nvfp4",)], itertools.product(KEYS)))
def test_a_hessian_of_any_size(key: str) -> None:
    fmt = get_format(key)
    weight, packed, scale, divisor = quantized(fmt, 8, 64, torch.float32)
    on = [None if t is None else t.to(DEVICE) for t in (weight, packed, scale, divisor)]
    for power in (-140, -126, 100, 120):
        hessian = spectrum(0.9)[:2].double().mul(2.0**power).float()
        expected = errors_ref(weight, packed, scale, divisor, hessian, fmt)
        found = errors_triton(*on, hessian.to(DEVICE), fmt).cpu()  # type: ignore[arg-type]
        # Subnormal float32 have few bits, but both read the same ones.
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
