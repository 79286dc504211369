"""The passes for norms before products, and for residual sums in the launches of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph.test_gates import GATE, UP, K, equal, numbers, product, weight
from post_grad import run_passes
from torch import Tensor, fx
from torch.nn import functional as F

from fp4pass import ops
from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.merge import group_linears
from fp4pass.graph.inductor.products import fuse_gates, fuse_norms, fuse_residuals, is_one_row

pytestmark = pytest.mark.usefixtures("fresh_graphs")


# The weight of a product as wide as its input.
SQUARE = weight(K, seed=6)
BIAS = numbers(K, dtype=torch.bfloat16)
ROW = torch.randn(K, generator=torch.Generator().manual_seed(5)).bfloat16()


def rms_norm(x: Tensor, row: Tensor = ROW) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return row.to(x.dtype) * (wide * inverse).to(x.dtype)


def every_gate(graph: fx.Graph) -> int:
    return fuse_gates(graph, lambda node: True)


def run(
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    eligible: Any = lambda node, normed: True,
    **options: Any,
) -> tuple[Any, list[int], Any]:
    passes = (every_gate, group_linears, lambda graph: fuse_residuals(graph, eligible))
    return run_passes(function, args, *passes, **options)


def layer(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum behind a product."""
    return residual + product(x, SQUARE, bias)


# Functions of two rows, and the calls that are left.
NORMS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "one product": (lambda x, y: product(rms_norm(layer(x, y)), GATE), {"linear_group": 2}),
    "a sum that is read later, the other way around": (
        lambda x, y: ((s := product(x, SQUARE) + y), product(rms_norm(s), GATE), s + 1),
        {"linear_group": 2},
    ),
    "a bias": (lambda x, y: product(rms_norm(layer(x, y, BIAS)), GATE), {"linear_group": 2}),
    "several products": (
        lambda x, y: (product(n := rms_norm(layer(x, y)), GATE), product(n, UP)),
        {"linear_group": 2},
    ),
    "a gate": (
        lambda x, y: F.silu(product(n := rms_norm(layer(x, y)), GATE)) * product(n, UP),
        {"linear_group": 2},
    ),
    "the sum of several processes": (
        lambda x, y: product(rms_norm(y + ops.all_reduce(product(x, SQUARE), "", False)), GATE),
        {"linear": 1, "all_reduce_add": 1, "linear_group": 1},
    ),
}

NO_NORMS: dict[str, Callable[..., Any]] = {
    "a norm that is read": lambda x, y: ((n := rms_norm(layer(x, y))), product(n, GATE)),
    "a product that is read": lambda x, y: (
        (p := product(x, SQUARE)),
        product(rms_norm(p + y), GATE),
    ),
    "a norm of no sum": lambda x, y: product(rms_norm(x), GATE),
    "a sum of no product": lambda x, y: product(rms_norm(x + y), GATE),
    "twice a product": lambda x, y: product(rms_norm((p := product(x, SQUARE)) + p), GATE),
    "a sum with a factor": lambda x, y: product(
        rms_norm(torch.add(y, product(x, SQUARE), alpha=2)), GATE
    ),
    "a residual for each": lambda x, y: product(rms_norm(y[:, :1] + product(x, SQUARE)), GATE),
    "the largest of several processes": lambda x, y: product(
        rms_norm(y + ops.all_reduce(product(x, SQUARE), "", True)), GATE
    ),
    "another norm": lambda x, y: product(F.layer_norm(layer(x, y), (K,), ROW), GATE),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_computed_in_launches_of_products(name: str) -> None:
    function, expected = NORMS[name]
    x, y = numbers(1, 1, K), 2 * numbers(1, 1, K).flip(-1)
    found, counts, left = run(function, (x, y))
    assert counts == [1, 0] and left == expected
    wanted = function(x, y)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for a, b in pairs:
        # Squares are added in another order.
        assert (a.float() - b.float()).norm() <= 2.0**-7 * b.float().norm()


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_such_norm_stays(name: str) -> None:
    x, y = numbers(1, K), 2 * numbers(1, K).flip(-1)
    found, counts, left = run(NO_NORMS[name], (x, y))
    assert counts == [0, 0] and not {"linear_group", "all_reduce_add"} & left.keys()
    assert equal(found, NO_NORMS[name](x, y))


def test_more_rows_other_dtypes_and_dynamic_shapes_stay() -> None:
    function = NORMS["one product"][0]
    for rows, dtype in ((2, torch.bfloat16), (1, torch.float32)):
        x = numbers(rows, K, dtype=dtype)
        assert run(function, (x, x.flip(-1)))[1] == [0, 0]
    x = numbers(3, K)
    assert run(function, (x, x.flip(-1)), dynamic=True)[1] == [0, 0]


def test_on_a_cpu_nothing_changes() -> None:
    x = numbers(1, K)
    _, counts, left = run(NORMS["one product"][0], (x, x.flip(-1)), is_one_row)
    assert counts == [0, 0] and left == {"linear": 2}


def test_a_product_that_is_not_eligible_keeps_its_sum() -> None:
    x = numbers(1, K)
    for kept in (False, True):
        found = run(NORMS["one product"][0], (x, x.flip(-1)), lambda _, normed, k=kept: normed != k)
        assert found[1] == [0, 0]


def normed(
    function: Callable[..., Any], args: Any, eligible: Any = lambda node: True, **options: Any
) -> tuple[Any, list[int], Any]:
    return run_passes(function, args, lambda graph: fuse_norms(graph, eligible), **options)


# Functions of two tensors, and the operator that they call.
ROWS: dict[str, tuple[Callable[..., Any], str]] = {
    "a norm": (lambda x, y: product(rms_norm(x), GATE), "rms_norm"),
    "of a sum": (lambda x, y: product(rms_norm(x + y), GATE), "add_rms_norm"),
    "of a sum that is read later": (
        lambda x, y: ((s := x + y), product(rms_norm(s), GATE), s + 1),
        "add_rms_norm",
    ),
    "read by others too": (lambda x, y: ((n := rms_norm(x)), product(n, GATE)), "rms_norm"),
    "read by two": (
        lambda x, y: (product(n := rms_norm(x + y), GATE), product(n, UP)),
        "add_rms_norm",
    ),
}

NOT_ROWS: dict[str, Callable[..., Any]] = {
    "read by no product": lambda x, y: rms_norm(x) + 1,
    "the norm of torch": lambda x, y: product(F.rms_norm(x, (K,), ROW, 1e-6), GATE),
    "of columns": lambda x, y: product(rms_norm(x.t(), ROW[: x.shape[0]]).t().contiguous(), GATE),
    "a weight for each row": lambda x, y: product(rms_norm(x, y), GATE),
    "a layer norm": lambda x, y: product(F.layer_norm(x, (K,), ROW), GATE),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_norm_before_products_is_one_call_with_the_bits_of_eager(name: str) -> None:
    function, operator = ROWS[name]
    args = numbers(3, K), numbers(3, K) / 2
    found, counts, left = normed(function, args)
    assert counts == [1, 0] and left[operator] == 1
    assert equal(found, function(*args))


@pytest.mark.parametrize("name", NOT_ROWS)
def test_what_is_no_norm_before_products_stays(name: str) -> None:
    _, counts, left = normed(NOT_ROWS[name], (numbers(3, K), numbers(3, K)))
    assert counts == [0, 0] and set(left) <= {"linear"}


def test_a_sum_that_is_read_before_the_weight_is_there_stays() -> None:
    """The operator that adds could not stand before what reads the sum."""

    def function(x: Tensor, y: Tensor) -> Any:
        total = x + y
        early = total.relu()
        return early, product(rms_norm(total, early[0].exp()), GATE)

    args = numbers(3, K), numbers(3, K) / 2
    found, counts, left = normed(function, args)
    assert counts == [1, 0] and left == {"rms_norm": 1, "linear": 1}
    assert equal(found, function(*args))


def test_norms_of_dynamic_shapes_and_on_a_cpu() -> None:
    args = numbers(3, K), numbers(3, K) / 2
    function, _ = ROWS["of a sum"]
    assert normed(function, args, dynamic=True)[1] == [0, 0]
    _, counts, left = normed(function, args, on_gpu)
    assert counts == [0, 0] and left == {"linear": 1}
