"""A residual in the launch of a product of few rows, against a sum of both."""

from __future__ import annotations

import pytest
import torch
from kernels.test_linear_triton import DEVICE, numbers, weight

from fp4pass.core.formats import get_format
from fp4pass.kernels.linear.fused import linear_add_triton
from fp4pass.kernels.linear.triton import linear_triton


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_bits_of_a_product_and_a_sum(fmt: str, dtype: torch.dtype) -> None:
    record = get_format(fmt)
    # One launch, its last rows, more than few rows, a sum of several programs, and no rows.
    for m, n, k in ((1, 35, 512), (7, 19, 544), (9, 35, 64), (9, 35, 2080), (0, 8, 64)):
        packed, scale = weight(record, n, k)
        x, residual = numbers(m, k, dtype=dtype), numbers(m, n, dtype=dtype, seed=2)
        stored = torch.tensor([3.7], device=DEVICE) if record.has_global_scale else None
        of = (packed, scale, stored, numbers(n, seed=3), record)
        expected = residual + linear_triton(x, *of)
        assert torch.equal(linear_add_triton(x, residual, *of), expected)


def test_shapes_and_strides() -> None:
    record = get_format("mxfp4")
    of = (*weight(record, 6, 64), None, None, record)
    x, residual = numbers(2, 2, 64).bfloat16(), numbers(6, 2, 2).bfloat16().permute(1, 2, 0)
    found = linear_add_triton(x, residual, *of)
    assert torch.equal(found, residual + linear_triton(x, *of))
    assert torch.equal(linear_add_triton(x, residual.contiguous(), *of), found)
