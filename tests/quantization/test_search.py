"""Weights at the end of their dtype: codes stay within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4pass


@pytest.mark.parametrize(
    "fmt, method, dtype",
    [
        *(("nvfp4", method, torch.bfloat16) for method in ("naive", "sse")),
        ("nvfp4_ue5m3", "sse", torch.float16),
        *((fmt, "sse", torch.bfloat16) for fmt in ("mxfp4", "fp8", "fp8_block")),
    ],
)
def test_the_largest_weights_saturate(fmt: str, method: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(256, 128, bias=False)).to(dtype)
    largest = torch.finfo(dtype).max
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(128, 256, generator=torch.Generator().manual_seed(0)))
        model[0].weight[5, 7], model[0].weight[6, :32] = largest, -largest
    weight = model[0].weight.detach().double()
    packed = fp4pass.convert(model, f"{fmt}a16", method, progress=False)[0]
    assert packed.weight.isfinite().all()
    assert (packed.weight[6, :32] < 0).all()
    assert (packed.weight - weight).norm() < 0.35 * weight.norm()
