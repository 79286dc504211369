"""A residual sum and a norm in the launches of products of one row, against products and eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.cases import DEVICE, GPU
from kernels.exact import GPU as GPU_MARKS
from kernels.exact import assert_each_kernel_waits, numbers
from kernels.test_linear_gated import rows, weights
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.linear import fused
from fp4pass.kernels.linear.naive import linear_add_ref
from fp4pass.kernels.linear.triton import linear_group_triton, linear_triton
from fp4pass.kernels.norm.naive import rms_norm_of_squares_ref, rms_norm_ref, square_sums_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Weights are cut in 16, warps share K in steps of 128 columns, and a norm's row may have an end.
SHAPES = [(35, 1024), (2560, 4096), (64, 9728), (16, 128)] if GPU else [(35, 1024), (16, 128)]
FORMATS = [get_format(name) for name in ("nvfp4", "mxfp4")]


def near(found: Tensor, expected: Tensor, share: float = 0.02) -> bool:
    """Equal but for few results that are one rounding away."""
    step = expected.float().abs() * 2.0**-7 + 1e-6
    differs = found != expected
    distance = (found.float() - expected.float()).abs()
    return bool((differs.sum() <= 1 + share * found.numel()) and (distance <= step).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("m", [1, 3])
def test_a_sum_has_the_bits_of_a_product_and_eager(m: int, fmt: Format) -> None:
    for n, k in SHAPES:
        x, (weight, _) = rows(m, k, fmt), weights(fmt, n, k)
        residual = numbers(m, n, seed=5).bfloat16()
        total, squares = fused.linear_add_triton(x, weight, residual, fmt)
        expected = residual + linear_triton(x, weight, fmt)
        assert torch.equal(total, expected)
        torch.testing.assert_close(squares, square_sums_ref(total), rtol=1e-6, atol=0)
        reference, _ = linear_add_ref(x, weight, residual, fmt)
        assert (total.float() - reference.float()).norm() <= 0.01 * reference.float().norm()


@pytest.mark.quick(1)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("m", [1, 3])
def test_products_of_a_norm(m: int, fmt: Format) -> None:
    for n, k in SHAPES:
        if k > 8192:
            continue
        x, of = numbers(m, k, seed=7).bfloat16(), weights(fmt, n, k, bias=False)
        gain = (numbers(k, seed=8) * 2.0 ** (-6 if fmt.scale.subnormal else -12)).bfloat16()
        row = (x, square_sums_ref(x), gain, 1e-6)
        # Of one row and the kernel's own sum of the sums, a few numbers may round otherwise.
        normed = rms_norm_of_squares_ref(*row)
        assert near(normed, rms_norm_ref(x, gain, 1e-6))
        found = fused.linear_normed_group_triton(*row, of, fmt)
        for a, b in zip(found, linear_group_triton(normed, of, fmt), strict=True):
            assert (a.float() - b.float()).norm() <= 2.0**-7 * b.float().norm()
        gated = fused.linear_normed_gated_triton(*row, of, "silu", fmt)
        expected = fused.linear_gated_triton(normed, of, "silu", fmt).float()
        assert (gated.float() - expected).norm() <= 2.0**-6 * expected.norm()
        again = fused.linear_normed_gated_triton(*row, of, "silu", fmt)
        assert torch.equal(gated, again)


def test_a_norm_of_tiny_and_huge_rows() -> None:
    """Sums that underflow are made again from the normed row; NaN and infinity stay."""
    fmt = get_format("nvfp4")
    of = weights(fmt, 32, 256, bias=False)
    gain = torch.full((256,), 2.0**-60, device=DEVICE, dtype=torch.bfloat16)
    x = numbers(1, 256, seed=9).bfloat16()
    row = (x, square_sums_ref(x), gain, 1e-6)
    (found, _), normed = (
        fused.linear_normed_group_triton(*row, of, fmt),
        rms_norm_ref(x, gain, 1e-6),
    )
    expected = linear_group_triton(normed, of, fmt)[0].float()
    assert (found.float() - expected).norm() <= 2.0**-7 * expected.norm() and expected.norm() > 0
    x[0, 3] = float("inf")
    assert (
        not fused.linear_normed_group_triton(x, square_sums_ref(x), gain, 1e-6, of, fmt)[0]
        .isfinite()
        .any()
    )


class TestGpu:
    pytestmark = GPU_MARKS

    def test_each_kernel_waits_for_the_one_before(self) -> None:
        """Layers of one row, each of which reads what the last one wrote."""
        fmt = get_format("nvfp4")
        up, down = weights(fmt, 9728, 2560, bias=False), weights(fmt, 2560, 9728, bias=False)[0]
        gain = (numbers(2560, seed=8) * 2.0**-6).bfloat16()
        first = numbers(1, 2560, seed=7).bfloat16()

        def chain(wait: Callable[[], None]) -> Tensor:
            total, squares = first.clone(), square_sums_ref(first)
            wait()
            for _ in range(8):
                row = (total, squares, gain, 1e-6)
                gated = fused.linear_normed_gated_triton(*row, up, "silu", fmt)
                wait()
                total, squares = fused.linear_add_triton(gated * 2.0**-6, down, total, fmt)
                wait()
                for each in fused.linear_normed_group_triton(total, squares, *row[2:], up, fmt):
                    total = total + each[:, :2560]
                squares = square_sums_ref(total)
                wait()
            return total

        assert_each_kernel_waits(chain, eager=True)
