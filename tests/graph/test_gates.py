"""The pass that computes the gate of an MLP in the launch of its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from post_grad import run_passes
from torch import Tensor

from fp4pass import ops
from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.products import fuse_gates

K, N = 64, 32


pytestmark = pytest.mark.usefixtures("fresh_graphs")


def weight(rows: int, fmt: str = "nvfp4", seed: int = 0) -> tuple[Any, ...]:
    dense = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    stored = torch.tensor([256.0]) if fmt == "nvfp4" else None
    return (*ops.search(dense, None, 2.0**-8 if fmt == "nvfp4" else 1.0, fmt, "naive"), stored)


GATE, UP, BOTH = weight(N), weight(N, seed=1), weight(2 * N)
OTHER, THREE = weight(N, "mxfp4"), weight(3 * N)
BIAS = torch.randn(N, generator=torch.Generator().manual_seed(2))


def product(x: Tensor, of: tuple[Any, ...], bias: Tensor | None = None, *rest: Any) -> Tensor:
    return ops.linear(x, *of, bias, *(rest or ("nvfp4",)))


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def mlp(activation: Callable[[Tensor], Tensor] = F.silu, *rest: Any) -> Callable[..., Any]:
    return lambda x: activation(product(x, GATE, None, *rest)) * product(x, UP, None, *rest)


def halves(x: Tensor) -> Tensor:
    gate, up = product(x, BOTH).chunk(2, -1)
    return up * F.silu(gate)


def slices(x: Tensor) -> Tensor:
    both = product(x, BOTH)
    return F.silu(both[..., :N]) * both[..., N:]


ALIKE: dict[str, Callable[..., Any]] = {
    "silu": mlp(),
    "gelu": mlp(F.gelu),
    "gelu by tanh": mlp(lambda x: F.gelu(x, approximate="tanh")),
    "gelu of gpt2": mlp(gelu_new),
    "the factor first": lambda x: product(x, UP) * F.silu(product(x, GATE)),
    "biases": lambda x: F.silu(product(x, GATE, BIAS)) * product(x, UP, 2 * BIAS),
    "a bias of one": lambda x: F.silu(product(x, GATE, BIAS)) * product(x, UP),
    "fp8": mlp(F.silu, "nvfp4", "fp8"),
    "halves": halves,
    "slices": slices,
    "a result that is read twice": lambda x: ((y := mlp()(x)), y.sum()),
}

UNLIKE: dict[str, Callable[..., Any]] = {
    "a gate that is read": lambda x: (F.silu(g := product(x, GATE)) * product(x, UP), g),
    "a factor that is read": lambda x: (F.silu(product(x, GATE)) * (u := product(x, UP)), u),
    "an activation that is read": lambda x: ((a := F.silu(product(x, GATE))) * product(x, UP), a),
    "other inputs": lambda x: F.silu(product(x, GATE)) * product(x + 1, UP),
    "another format": lambda x: F.silu(product(x, GATE)) * product(x, OTHER, None, "mxfp4"),
    "another arithmetic": lambda x: F.silu(product(x, GATE)) * product(x, UP, None, "nvfp4", "fp8"),
    "a square": lambda x: F.silu(y := product(x, GATE)) * y,
    "no activation": mlp(torch.relu),
    "halves the other way around": lambda x: halves_of_second(x),
    "halves of a dense product": lambda x: F.silu(x[..., :N]) * x[..., N:],
    "every second column": lambda x: F.silu((y := product(x, BOTH))[..., ::2]) * y[..., 1::2],
    "thirds": lambda x: F.silu((y := product(x, THREE))[..., :N]) * y[..., N : 2 * N],
    "a factor that is expanded": lambda x: F.silu(product(x, GATE)) * product(x[:1], UP),
}


def halves_of_second(x: Tensor) -> Tensor:
    gate, up = product(x, BOTH).chunk(2, -1)
    return F.silu(up) * gate


def run(
    function: Callable[..., Any], x: Tensor, eligible: Any = lambda node: True, **options: Any
) -> tuple[Any, list[int], Any]:
    return run_passes(function, (x,), lambda graph: fuse_gates(graph, eligible), **options)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def equal(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ALIKE)
def test_a_gate_is_one_call_with_the_bits_of_eager(name: str) -> None:
    x = numbers(3, K)
    found, counts, left = run(ALIKE[name], x)
    assert counts == [1, 0] and left == {"linear_group": 1}
    assert equal(found, ALIKE[name](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_and_more_dimensions(dtype: torch.dtype) -> None:
    x = numbers(2, 3, K, dtype=dtype)
    for function in (mlp(), halves):
        found, counts, _ = run(function, x)
        assert counts == [1, 0] and torch.equal(found, function(x))


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_no_gate_stays(name: str) -> None:
    x = numbers(3, K)
    _, counts, left = run(UNLIKE[name], x)
    assert counts == [0, 0] and "linear_group" not in left


def test_more_rows_and_dynamic_shapes_stay() -> None:
    assert run(mlp(), numbers(8, K))[1] == [1, 0]
    assert run(mlp(), numbers(9, K))[1] == run(mlp(), numbers(3, K), dynamic=True)[1] == [0, 0]


def test_on_a_cpu_nothing_changes() -> None:
    _, counts, left = run(mlp(), numbers(3, K), on_gpu)
    assert counts == [0, 0] and left == {"linear": 2}
