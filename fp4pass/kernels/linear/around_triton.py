"""Gates, norms and residuals, as kernels of products compute them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import rounded, wait
from ..quantize.triton import activate, narrow


class RowNorm(NamedTuple):
    """An RMSNorm of a row [K] whose squares are added already."""

    squares: Tensor  # float32 [K / SQUARES]
    weight: Tensor  # [K]
    eps: float


class Around(NamedTuple):
    """Options of a launch of products: what it computes beside them."""

    activation: str | None = None  # of a gate, whose factor is the product with the other weight
    norm: RowNorm | None = None  # that the row still needs
    residual: Tensor | None = None  # [N], that is added to the result of one weight
    squares: Tensor | None = None  # [N / SQUARES], where sums of the squares of that go


NOTHING = Around()


@triton.constexpr_function
def power_of_two(count):
    """Return the least power of two from `count` on."""
    return 1 << max(count - 1, 0).bit_length()


@triton.jit
def inverse_root(square_sum, K: tl.constexpr, eps):
    """Return 1 / the root mean square of K numbers."""
    return tl.math.rsqrt(tl.math.div_rn(square_sum, K) + eps)


@triton.jit
def normed(x, inverse, weight, DTYPE: tl.constexpr):
    """Return x times an inverse and a weight, rounded to DTYPE after each."""
    normal = narrow(x.to(tl.float32) * inverse, DTYPE)
    return rounded(normal * weight.to(tl.float32), DTYPE)


@triton.jit
def gate_times_up(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the activation of a gate times its factor, rounded where eager rounds but at last."""
    active = activate((narrow(gate, DTYPE),), ACTIVATION, DTYPE)[0]
    return narrow(active, DTYPE) * narrow(up, DTYPE)


@triton.jit
def gate_kernel(
    gate, up, out, N, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Multiply the activation of a part of a row and its factors."""
    wait(OVERLAP, RELEASES)
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_stride + n, mask=n < N, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + n, mask=n < N, other=0.0).to(tl.float32)
    y = gate_times_up(x, factor, ACTIVATION, DTYPE)
    tl.store(out + row * N + n, rounded(y, DTYPE), mask=n < N)
