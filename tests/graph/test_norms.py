"""The pass for norms before products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from graph.test_gates import GATE, UP, K, equal, numbers, product
from post_grad import calls, compiled, fresh
from torch import Tensor, fx
from torch.nn import functional as F

import fp4pass
from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.gates import fuse_gates
from fp4pass.graph.inductor.merge import group_linears
from fp4pass.graph.inductor.residuals import fuse_norms


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


ROW = torch.randn(K, generator=torch.Generator().manual_seed(5)).bfloat16()


def rms_norm(x: Tensor, row: Tensor = ROW) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return row.to(x.dtype) * (wide * inverse).to(x.dtype)


def run(
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    eligible: Any = lambda node: True,
    **options: Any,
) -> tuple[Any, list[int], Any]:
    """What the compiled function returns, what two runs of the pass did, and the calls left."""
    counts, left = [], []

    def change(graph: fx.Graph) -> None:
        counts.extend(fuse_norms(graph, eligible) for _ in range(2))
        left.append(calls(graph))

    torch._dynamo.reset()
    found = compiled(function, change, **options)(*args)
    return found, counts, left[-1]


# Functions of two tensors, and the operator that they call.
NORMS: dict[str, tuple[Callable[..., Any], str]] = {
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

NO_NORMS: dict[str, Callable[..., Any]] = {
    "read by no product": lambda x, y: rms_norm(x) + 1,
    "the norm of torch": lambda x, y: product(F.rms_norm(x, (K,), ROW, 1e-6), GATE),
    "of columns": lambda x, y: product(rms_norm(x.t(), ROW[: x.shape[0]]).t().contiguous(), GATE),
    "a weight for each row": lambda x, y: product(rms_norm(x, y), GATE),
    "a layer norm": lambda x, y: product(F.layer_norm(x, (K,), ROW), GATE),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_call_with_the_bits_of_eager(name: str) -> None:
    function, operator = NORMS[name]
    args = numbers(3, K), numbers(3, K) / 2
    found, counts, left = run(function, args)
    assert counts == [1, 0] and left[operator] == 1
    assert equal(found, function(*args))


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm_stays(name: str) -> None:
    _, counts, left = run(NO_NORMS[name], (numbers(3, K), numbers(3, K)))
    assert counts == [0, 0] and set(left) <= {"linear"}


def test_a_sum_that_is_read_before_the_weight_is_there_stays() -> None:
    """The operator that adds could not stand before what reads the sum."""

    def function(x: Tensor, y: Tensor) -> Any:
        total = x + y
        early = total.relu()
        return early, product(rms_norm(total, early[0].exp()), GATE)

    args = numbers(3, K), numbers(3, K) / 2
    found, counts, left = run(function, args)
    assert counts == [1, 0] and left == {"rms_norm": 1, "linear": 1}
    assert equal(found, function(*args))


def test_dynamic_shapes_and_a_cpu() -> None:
    args = numbers(3, K), numbers(3, K) / 2
    function, _ = NORMS["of a sum"]
    assert run(function, args, dynamic=True)[1] == [0, 0]
    _, counts, left = run(function, args, on_gpu)
    assert counts == [0, 0] and left == {"linear": 1}


# Of two layers: two norms each, of which the first of all is of no sum.
MODELS = {
    "llama": {"linear_gated": 2, "linear_group": 2, "linear": 4, "rms_norm": 1, "add_rms_norm": 3},
    "qwen3": {"linear_gated": 2, "linear_group": 2, "linear": 4, "rms_norm": 1, "add_rms_norm": 3},
    "phi3": {"linear_gated": 2, "linear": 6, "rms_norm": 1, "add_rms_norm": 3},
    # Norms multiply by 1 + weight in float32, and stand before the residuals.
    "gemma3": {"linear": 4, "linear_gated": 2, "linear_group": 2},
}


@pytest.mark.parametrize(
    "name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_models(name: str) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in zoo.CASES if case.name == name)
    model = fp4pass.convert(case.build().bfloat16(), "nvfp4", "naive", weight_only=True)
    model.config.use_cache = False
    left = []

    def change(graph: fx.Graph) -> None:
        for each in (fuse_gates, fuse_norms):
            each(graph, lambda node: True)
        group_linears(graph)
        left.append(calls(graph))

    x = {"input_ids": torch.arange(2, 9).view(1, 7)}
    found = zoo.tensor_of(compiled(model, change)(**x)).float()
    assert left == [MODELS[name]]
    eager = zoo.tensor_of(model(**x)).float()
    assert (found - eager).norm() <= 0.02 * eager.norm()
