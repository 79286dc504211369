"""RMSNorm of rows and of sums, against eager's."""

from __future__ import annotations

import pytest
import torch
from kernels.test_linear_triton import numbers
from torch import Tensor

from fp4pass.kernels.norm.naive import add_rms_norm_ref, rms_norm_ref
from fp4pass.kernels.norm.triton import add_rms_norm_triton, rms_norm_triton

# numpy, in the interpreter, says when infinity is multiplied by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# K is no power of two, one, more than a row that a program holds, and rows of none.
SHAPES = [(3, 2, 80), (1, 256), (2, 20000), (0, 64), (5,)]


def check(found: Tensor, expected: Tensor) -> None:
    """Equal but for a rounding where squares were added in another order."""
    assert found.is_contiguous() and found.dtype == expected.dtype
    differs = found != expected
    eps = max(torch.finfo(found.dtype).eps, 2.0**-21)
    assert differs.sum() <= found.numel() * (1 if found.dtype == torch.float32 else 0.01)
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=1e-30)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_norms(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, residual = (numbers(*shape, dtype=dtype, seed=i) for i in range(2))
        weight = numbers(shape[-1], dtype=dtype, seed=2)
        check(rms_norm_triton(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
        total, normal = add_rms_norm_triton(x, residual, weight, 1e-6)
        expected = add_rms_norm_ref(x, residual, weight, 1e-6)
        assert torch.equal(total, expected[0])
        check(normal, expected[1])


def test_strides_and_an_eps_that_counts() -> None:
    x, residual = (numbers(64, 3, seed=i).bfloat16().t() for i in range(2))
    weight = numbers(128, seed=2).bfloat16()[::2]
    expected = add_rms_norm_ref(x, residual, weight, 3.0)
    for a, b in zip(add_rms_norm_triton(x, residual, weight, 3.0), expected, strict=True):
        assert torch.equal(a, b)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = numbers(3, 64, dtype=torch.bfloat16), numbers(64).bfloat16()
    x[1, 5] = float("inf")
    found, expected = rms_norm_triton(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
