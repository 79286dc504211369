"""Operands of products with packed weights, the exact products, and how far kernels may be off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fp4pass.core.formats import Format
from fp4pass.core.packing import PackedWeight
from fp4pass.kernels.dequantize.naive import dequantize_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")]


def weight(fmt: Format, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Packed codes and scale bits around 1; of scales with mantissas, subnormal ones as well."""
    generator = torch.Generator().manual_seed(seed)
    first, last = (1, 90) if fmt.scale.subnormal else (110, 135)
    packed = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
    shape = (n, k // fmt.block)
    scale = torch.randint(first, last, shape, dtype=torch.uint8, generator=generator)
    return packed.to(DEVICE), scale.to(DEVICE)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def products(x: Tensor, ids: Tensor, stack: PackedWeight, fmt: Format) -> tuple[Tensor, Tensor]:
    """Products [T, k, N] of x [T, K] or [T, k, K] and experts in float64, and of magnitudes."""
    rows = x.double() if x.ndim == 3 else x.double().unsqueeze(1).expand(*ids.shape, -1)
    y = rows.new_zeros((*ids.shape, stack.packed.shape[1]))
    mass = y.clone()
    for expert in range(len(stack.packed)):
        pairs = torch.where(ids == expert)
        dense = dequantize_ref(stack.packed[expert], stack.scale[expert], None, fmt, torch.float64)
        if stack.global_scale is not None:
            dense = dense * fmt.global_scale_of(stack.global_scale[expert].item())
        own = dense.new_zeros(len(dense)) if stack.bias is None else stack.bias[expert].double()
        y[pairs] = rows[pairs] @ dense.t() + own
        mass[pairs] = rows[pairs].abs() @ dense.abs().t() + own.abs()
    return y, mass


def assert_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Assert that y is x W^T + bias, summed in float32 and rounded once to the dtype of x.

    The largest error of K products that are summed in any order is K rounding errors of float32 of
    the sum of their magnitudes.
    """
    assert y.dtype == x.dtype
    x, weight = x.detach().double(), weight.detach().double()
    exact, size = F.linear(x, weight), F.linear(x.abs(), weight.abs())
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    eps = 2.0**-53 if y.dtype == torch.float64 else 2.0**-24
    bound = (x.shape[-1] + 2) * eps * size + torch.finfo(y.dtype).eps / 2 * 1.01 * exact.abs()
    error = (y.double() - exact).abs()
    assert not (error > bound).any(), f"{(error / bound).max():.3g} times the largest error"


def assert_rounded(y: Tensor, exact: Tensor, mass: Tensor, k: int) -> None:
    """Assert one rounding to the dtype of y of float32 sums of k products."""
    assert y.is_contiguous() and y.shape == exact.shape
    # Tensor cores truncate what float32 would round.
    sums = (k + 4) * 2.0**-23 * mass
    limits = torch.finfo(y.dtype)
    least = limits.smallest_normal * limits.eps
    rounding = (limits.eps / 2 * (exact.abs() + sums)).clamp(min=least)
    error = (y.double() - exact).abs()
    assert (error <= sums + rounding).all(), (error / (sums + rounding)).max()


def assert_each_kernel_waits(chain: Callable[[Callable[[], None]], Tensor], eager: bool) -> None:
    """Assert that a chain of launches, which calls its argument between them, needs no waiting."""
    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(lambda: None)
    for _ in range(5):
        graph.replay()
    assert torch.equal(y, expected)
    if eager:
        assert torch.equal(chain(lambda: None), expected)
