"""The pass that rounds inputs of FP8 products outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from post_grad import compiled, run_passes
from torch import Tensor, fx

from fp4pass import ops
from fp4pass.graph.inductor.products import round_rows

ROWS, K, N = 70, 64, 32


pytestmark = pytest.mark.usefixtures("fresh_graphs")


def weight(rows: int, seed: int = 0) -> tuple[Any, ...]:
    dense = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    return (*ops.search(dense, None, 2.0**-8, "nvfp4", "naive"), torch.tensor([256.0]))


QUERY, KEY, SQUARE = weight(N), weight(2 * N, seed=1), weight(K, seed=3)
BIAS = torch.randn(N, generator=torch.Generator().manual_seed(2))


def product(x: Tensor, of: tuple[Any, ...] = QUERY, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, *of, bias, "nvfp4", "fp8")


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(2, rows // 2, K, generator=torch.Generator().manual_seed(3)).to(dtype)
    # A row of zeros, one of small numbers, and one that is not finite.
    x[0, 0], x[0, 1], x[1, 2, 5] = 0, x[0, 1] * 2.0**-120, float("inf")
    return x


def every_row(graph: fx.Graph) -> int:
    return round_rows(graph, lambda node, rows: True)


def run(function: Callable[..., Any], *given: Tensor) -> tuple[Any, int, dict[str, int]]:
    """The result of a compiled function, how many products the pass changed, and the calls."""
    found, counts, left = run_passes(function, given, every_row)
    assert counts[1] == 0
    return found, counts[0], left


ALIKE: dict[str, tuple[int, Callable[..., Any]]] = {
    "one": (1, product),
    "with a bias": (1, lambda x: product(x, QUERY, BIAS)),
    "two of one input": (2, lambda x: [product(x), product(x, KEY)]),
    "two inputs": (2, lambda x: [product(x), product(F.silu(x), KEY)]),
    "of an activation": (1, lambda x: product(F.silu(x))),
    "one behind another": (2, lambda x: product(product(x, SQUARE), KEY)),
    "one that is read, too": (2, lambda x: [product(y := product(x, SQUARE), KEY), y + x]),
    "of a norm that is read": (
        1,
        lambda x: [product(y := rms_norm(x, torch.ones(K, dtype=x.dtype))), y + 1],
    ),
    "of a gate that is read": (1, lambda x: [product(y := F.silu(x) * x), y + 1]),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rounded_inputs_give_the_bits_of_eager(name: str) -> None:
    count, function = ALIKE[name]
    x = inputs()
    found, changed, left = run(function, x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0, equal_nan=True)
    assert changed == count and left == {"linear_group": count}


def test_a_gate_is_rounded_with_its_factor() -> None:
    def function(x: Tensor) -> list[Tensor]:
        gated = F.silu(x) * (x + 1)
        return [product(gated), product(gated, KEY)]

    x = inputs()
    found, changed, left = run(function, x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0, equal_nan=True)
    assert changed == 2 and left == {"activate_round": 1, "linear_group": 2}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normal.to(x.dtype)


@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_is_rounded_with_the_sum_before(adds: bool) -> None:
    row = torch.randn(K, generator=torch.Generator().manual_seed(4)).bfloat16()

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x + y if adds else x
        normal = rms_norm(total, row)
        total = total + product(normal, SQUARE)
        return [product(normal), total, product(rms_norm(total, row), KEY)]

    x, y = inputs(), inputs().flip(0)
    found, changed, left = run(function, x, y)
    torch.testing.assert_close(found, function(x, y), rtol=0, atol=0, equal_nan=True)
    assert changed == 3 and left == {"norm_round": 2, "linear_group": 3}


def test_a_norm_of_wide_rows_is_rounded_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4pass.graph.inductor.products.WIDEST", K - 1)
    row = torch.ones(K, dtype=torch.bfloat16)
    found, changed, left = run(lambda x: product(rms_norm(x, row)), inputs())
    torch.testing.assert_close(
        found, product(rms_norm(inputs(), row)), rtol=0, atol=0, equal_nan=True
    )
    assert changed == 1 and left == {"linear_group": 1}


def test_one_input_is_rounded_once() -> None:
    casts: list[fx.Node] = []

    def change(graph: fx.Graph) -> None:
        round_rows(graph, lambda node, rows: True)
        casts.extend(node for node in graph.nodes if node.args[1:] == (torch.float8_e4m3fn,))

    compiled(lambda x: [product(x), product(x, KEY)], change)(inputs())
    assert len(casts) == 1


def in_order(x: Tensor) -> Tensor:
    return ops.linear(x, *QUERY, None, "nvfp4", "input")


@pytest.mark.parametrize(
    ("function", "x"),
    [(product, inputs(62)), (product, inputs(dtype=torch.float32)), (in_order, inputs())],
    ids=["few rows", "float32", "not fp8"],
)
def test_other_products_stay(function: Callable[..., Any], x: Tensor) -> None:
    found, changed, _ = run(function, x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0, equal_nan=True)
    assert changed == 0


def test_a_dynamic_number_of_rows_stays() -> None:
    counts: list[int] = []

    def change(graph: fx.Graph) -> None:
        counts.append(round_rows(graph, lambda node, rows: True))

    compiled(product, change, dynamic=True)(inputs())
    assert counts == [0]
