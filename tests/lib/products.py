"""How far a product may be from the exact one, when its float32 sums have any order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
