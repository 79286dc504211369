"""The largest number of long rows: ties, NaN, zeros and infinities as torch.argmax has them."""

from __future__ import annotations

import pytest
import torch

from fp4pass.kernels.argmax.naive import last_argmax_ref
from fp4pass.kernels.argmax.triton import last_argmax_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [1, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_every_kind(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, size).to(DEVICE, dtype)
    # Of few values, so that many are equal; all negative; all equal.
    x[0] = x[0].round()
    x[1] = -x[1].abs() - 1
    x[2] = 0.5
    # The zeros are equal, and infinities no more than numbers.
    x[3] = -0.0
    x[3, size // 2 :] = 0.0
    x[4] = -torch.inf
    x[5, size // 3] = torch.inf
    x[6, size // 2 :] = torch.nan
    x[7, size - 1] = -torch.nan
    x[7, 0] = torch.inf
    assert torch.equal(last_argmax_triton(x), last_argmax_ref(x))
    # Rows that are not next to each other, and columns.
    for y in (x[::2], x[:, :20].mT):
        assert torch.equal(last_argmax_triton(y), last_argmax_ref(y))
