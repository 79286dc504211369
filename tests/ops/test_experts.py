"""The operators of packed experts: against the loop of transformers, gradients, tracing, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import ALL
from kernel_cases import covering, seeded
from torch import Tensor

from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.errors import DtypeError, ShapeError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# Of k = 2, with five experts: no tokens, one, one that is never chosen, one for all, and ids that
# are no experts'.
ROUTINGS = {
    "none": torch.empty(0, 2, dtype=torch.int64),
    "one": torch.tensor([[4, 1]]),
    "top-1": torch.tensor([[2], [0], [2]]),
    "never": torch.tensor([[0, 4], [4, 1], [1, 2], [2, 0], [0, 1], [4, 0]]),
    "all": torch.full((7, 2), 3),
    "outside": torch.tensor([[5, 0], [-1, 5], [3, 700]]),
}


def stack(fmt: Format, experts: int = 5, n: int = 6, k: int = 64) -> tuple[Any, ...]:
    """Weights of experts whose global scales differ and are no powers of two."""
    weight = torch.randn(experts * n, k, generator=seeded(7))
    g = 2.0**-8 if fmt.has_global_scale else 1.0
    packed, scale = ops.search(weight, None, g, fmt.key, "naive")
    divisors = torch.linspace(0.3, 3.0, experts) * 256 if fmt.has_global_scale else None
    return packed.view(experts, n, -1), scale.view(experts, n, -1), divisors


def dense(fmt: Format, weights: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    packed, scale, divisors = weights
    if divisors is None:
        return ops.dequantize(packed, scale, None, fmt.key, dtype)
    each = zip(packed, scale, divisors.split(1), strict=True)
    return torch.stack([ops.dequantize(*one, fmt.key, dtype) for one in each])


def rows_of(ids: Tensor, k: int, dtype: torch.dtype, each: bool) -> Tensor:
    """Inputs for each pair, or for each token."""
    shape = (*ids.shape, k) if each else (len(ids), k)
    return torch.randn(shape, generator=seeded(1)).to(dtype)


def eager(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The products of transformers' own loop, kept apart for each pair."""
    experts = len(weight)
    out = x.new_zeros((*ids.shape, weight.shape[1]))
    inside = torch.where((ids < 0) | (ids > experts), experts, ids)
    mask = F.one_hot(inside, num_classes=experts + 1).permute(2, 1, 0)
    for expert in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
        if expert < experts:
            place, token = torch.where(mask[expert])
            rows = x[token] if x.ndim == 2 else x[token, place]
            each_bias = None if bias is None else bias[expert].to(x.dtype)
            out = out.index_put((token, place), F.linear(rows, weight[expert], each_bias))
    return out


@covering(
    ("fmt", "routing", "dtype", "each"),
    [get_format("nvfp4").with_multiplier(), *ALL], list(ROUTINGS), DTYPES, (False, True),
)  # fmt: skip
def test_the_loop_of_transformers(
    fmt: Format, routing: str, dtype: torch.dtype, each: bool
) -> None:
    """To the bit, for numbers and for codes, with a bias and without."""
    columns = max(64, fmt.block)
    ids, weights = ROUTINGS[routing], stack(fmt, k=columns)
    x, weight = rows_of(ids, columns, dtype, each), dense(fmt, weights, dtype)
    divisor = torch.tensor([3.0]) if fmt.has_global_scale else None
    codes = (*ops.quantize(x, divisor, fmt.key), divisor)
    exact = torch.float32 if dtype == torch.float16 else dtype
    rounded = ops.dequantize(*codes, fmt.key, exact)
    for bias in (None, torch.randn(5, 6, generator=seeded(2))):
        y = ops.experts_linear(x, ids, *weights, bias, fmt.key)
        assert y.dtype == dtype
        assert torch.equal(y, eager(x, ids, weight, bias))
        y = ops.experts_linear_quantized(x, *codes, ids, *weights, bias, fmt.key)
        expected = eager(rounded, ids, dense(fmt, weights, exact), bias).to(dtype)
        assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_gradients(each: bool, quantized: bool) -> None:
    """Those of the dense loop, as if rounding x were the identity, and zero where there is none."""
    fmt = get_format("nvfp4")
    weights = stack(fmt)
    weight = dense(fmt, weights, torch.float64)
    for ids in ROUTINGS.values():
        x = rows_of(ids, 64, torch.float64, each).requires_grad_()
        bias = torch.randn(5, 6, generator=seeded(2), dtype=torch.float64, requires_grad=True)
        if quantized:
            divisor = torch.tensor([3.0])
            codes = (*ops.quantize(x.detach(), divisor, fmt.key), divisor)
            y = ops.experts_linear_quantized(x, *codes, ids, *weights, bias, fmt.key)
        else:
            y = ops.experts_linear(x, ids, *weights, bias, fmt.key)
        expected = eager(x, ids, weight, bias)
        grad = torch.randn(y.shape, generator=seeded(4), dtype=torch.float64)
        if not len(ids):
            expected = expected + 0 * (x.sum() + bias.sum())
        for a, b in zip(
            torch.autograd.grad(y, (x, bias), grad),
            torch.autograd.grad(expected, (x, bias), grad, allow_unused=True),
            strict=True,
        ):
            assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=1e-12)


@pytest.mark.core
def test_biases_keep_their_dtype() -> None:
    ids, fmt = ROUTINGS["never"], get_format("mxfp4")
    x, bias = rows_of(ids, 64, torch.bfloat16, False), torch.ones(5, 6, requires_grad=True)
    y = ops.experts_linear(x, ids, *stack(fmt), bias, fmt.key)
    (grad,) = torch.autograd.grad(y.sum(), bias)
    assert grad.dtype == torch.float32
    assert torch.equal(grad, torch.bincount(ids.flatten(), minlength=5)[:, None].expand(5, 6))


@pytest.mark.core
def test_errors_name_the_argument() -> None:
    fmt = get_format("nvfp4")
    packed, scale, divisors = stack(fmt)
    ids, x = torch.tensor([[0, 1]]), torch.randn(1, 64)
    good = dict(x=x, ids=ids, packed=packed, scale=scale, global_scale=divisors, bias=None)
    for kind, changed, match in (
        (DtypeError, {"x": x.int()}, "expected float32"),
        (DtypeError, {"ids": ids.int()}, r"ids: expected int64.* got torch.int32"),
        (ShapeError, {"ids": ids[0]}, r"ids: expected .*\[T, k\].* and \[2\]"),
        (ShapeError, {"x": x[0]}, r"x and ids: expected \[T, K\] .* got \[64\] and \[1, 2\]"),
        (ShapeError, {"x": x[None].expand(1, 3, 64)}, r"x .* got \[1, 3, 64\] and \[1, 2\]"),
        (ShapeError, {"x": x[:, :48]}, r"x: expected 64 columns.* got \[1, 48\]"),
        (ShapeError, {"packed": packed[0]}, r"packed: expected \[E, N, P\].* got \[6, 32\]"),
        (ShapeError, {"scale": scale[:4]}, r"scale: expected \[5, 6, 4\], got \[4, 6, 4\]"),
        (ShapeError, {"global_scale": divisors[:1]}, r"global_scale: expected \[5\], got \[1\]"),
        (ShapeError, {"bias": x[0, :6]}, r"bias: expected \[5, 6\], got \[6\]"),
    ):
        with pytest.raises(kind, match=match):
            ops.experts_linear(*(good | changed).values(), fmt.key)
    codes = ops.quantize(torch.randn(2, 64), None, fmt.key)
    with pytest.raises(ShapeError, match=r"x and ids: expected .* got \[2, 32\] and"):
        ops.experts_linear_quantized(x, *codes, None, ids, packed, scale, divisors, None, fmt.key)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(4, 16), (4, 2, 16)], ids=["a row a token", "a row a pair"])
def test_dense_experts_have_derivatives(shape: tuple[int, ...]) -> None:
    """In x, the weights and the biases; an id beyond them gives nothing."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 2], [2, 1], [3, 0], [1, 2]])
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in (shape, (3, 5, 16), (3, 5))
    )
    found = ops.experts_dense(x, ids, weight, bias)
    rows = x[:, None].expand(4, 2, 16) if x.ndim == 2 else x
    wanted = torch.einsum("tkc,tknc->tkn", rows, weight[ids.clamp(max=2)]) + bias[ids.clamp(max=2)]
    torch.testing.assert_close(found, wanted * (ids < 3)[..., None])
    assert torch.autograd.gradcheck(
        lambda *each: ops.experts_dense(each[0], ids, *each[1:]), (x, weight, bias)
    )
