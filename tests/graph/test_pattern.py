"""The matcher of patterns, on graphs traced from small functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4pass.graph.inductor.pattern import (
    Either,
    Narrow,
    Var,
    Wide,
    add,
    call,
    dtype_of,
    match,
    mul,
)

aten = torch.ops.aten
A, B = Var("a"), Var("b")
DIMS = Var("dims")
VARIANCE = call(operator.getitem, call(aten.var_mean.correction, A, DIMS), 0)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, dtype)


def traced(function: Callable[..., Tensor], dtype: torch.dtype) -> fx.Graph:
    inputs = [torch.randn(3, 4).to(dtype) for _ in range(2)]
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def matches(
    pattern: Any, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32
) -> list[dict[str, Any]]:
    """Every match of the result of a function of two tensors x and y, by the names of nodes."""
    graph = traced(function, dtype)
    names = {node: name for node, name in zip(graph.nodes, "xy", strict=False)}
    (output,) = graph.find_nodes(op="output")
    found = match(pattern, output.args[0])
    return [{k: names.get(v, v) for k, v in each.items()} for each in found]


# A pattern, a function, and what the variables stand for in every match.
MATCHES: dict[str, tuple[Any, Callable[..., Tensor], list[dict[str, Any]]]] = {
    "a variable": (A, lambda x, y: x, [{"a": "x"}]),
    "one node twice": (mul(A, A), lambda x, y: x * x, [{"a": "x"}] * 2),
    "two nodes for one variable": (mul(A, A), lambda x, y: x * y, []),
    "either order": (mul(A, B), lambda x, y: x * y, [{"a": "x", "b": "y"}, {"a": "y", "b": "x"}]),
    "either order below": (add(mul(A, 2), A), lambda x, y: x + x * 2, [{"a": "x"}]),
    "no order but its own": (
        call(aten.sub.Tensor, call(aten.neg.default, A), B),
        lambda x, y: x - y.neg(),
        [],
    ),
    "another operator": (mul(A, B), lambda x, y: x / y, []),
    "a number": (mul(A, 0.5), lambda x, y: 0.5 * x, [{"a": "x"}]),
    "another number": (mul(A, 0.5), lambda x, y: 0.25 * x, []),
    "a tensor for a number": (mul(A, 0.5), lambda x, y: x * y, []),
    "a number for a variable": (
        call(aten.rsqrt.default, add(A, B)),
        lambda x, y: (x + 1e-6).rsqrt(),
        [{"a": "x", "b": 1e-6}, {"a": 1e-6, "b": "x"}],
    ),
    "the first of two": (
        Either((mul(A, A), call(aten.pow.Tensor_Scalar, A, 2))),
        lambda x, y: x.pow(2),
        [{"a": "x"}],
    ),
    "none of two": (Either((add(A, B), call(aten.neg.default, A))), lambda x, y: x * y, []),
    "lists": (
        add(call(aten.mean.dim, A, DIMS), call(aten.sum.dim_IntList, A, DIMS)),
        lambda x, y: x.mean([-1]) + x.sum([-1]),
        [{"a": "x", "dims": [-1]}],
    ),
    "other lists": (
        add(call(aten.mean.dim, A, DIMS), call(aten.sum.dim_IntList, A, DIMS)),
        lambda x, y: x.mean([-1]) + x.t().sum([0]),
        [],
    ),
    "an option": (add(A, B), lambda x, y: torch.add(x, y, alpha=2), []),
    "more arguments": (call(aten.mean.dim, A, DIMS), lambda x, y: x.mean([-1], True), []),
    "an option that changes nothing": (
        VARIANCE,
        lambda x, y: torch.ops.aten.var_mean(x, [-1], correction=0, keepdim=True)[0],
        [{"a": "x", "dims": [-1]}],
    ),
    "a correction": (
        VARIANCE,
        lambda x, y: torch.ops.aten.var_mean(x, [-1], correction=1, keepdim=True)[0],
        [],
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("name", MATCHES)
def test_every_way_to_match_is_found(name: str) -> None:
    pattern, function, expected = MATCHES[name]
    assert matches(pattern, function) == expected


SQUARE = Narrow(mul(Wide(A), Wide(A)))
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.core
@pytest.mark.parametrize(
    ("dtype", "wide", "result", "found"),
    [
        (BF16, F32, BF16, True),
        (F16, F32, F16, True),
        # The pattern does not ask that both ends are equal; a check does.
        (BF16, F32, F16, True),
        (F32, None, None, True),
        (BF16, F32, None, True),
        # Computed in the narrow dtype, or in another than float32.
        (BF16, None, None, False),
        (BF16, F64, BF16, False),
        (F64, F32, F64, False),
    ],
    ids=str,
)
def test_casts_to_float32_and_back(
    dtype: torch.dtype, wide: torch.dtype | None, result: torch.dtype | None, found: bool
) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x = x if wide is None else cast(x, wide)
        x = x * x
        return x if result is None else cast(x, result)

    ways = matches(SQUARE, function, dtype)
    assert any(each == {"a": "x"} for each in ways) if found else not ways


@pytest.mark.core
def test_what_is_bound_already_must_agree() -> None:
    graph = traced(lambda x, y: x * y, torch.float32)
    x, y, product, _ = graph.nodes
    assert list(match(mul(A, B), product, {"a": y})) == [{"a": y, "b": x}]
    assert list(match(mul(A, B), product, {"a": product})) == []


def test_dtypes_of_nodes() -> None:
    graph = traced(lambda x, y: torch.ops.aten.var_mean(x, correction=0)[0] * y, torch.bfloat16)
    (both,) = graph.find_nodes(op="call_function", target=aten.var_mean.correction)
    assert dtype_of(next(iter(graph.nodes))) == torch.bfloat16
    assert dtype_of(both) is None and dtype_of(0.5) is None
