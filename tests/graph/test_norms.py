"""The pass for norms before products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph.test_gates import GATE, UP, K, equal, numbers, product
from post_grad import run_passes
from torch import Tensor
from torch.nn import functional as F

from fp4pass.graph.inductor.fusions import on_gpu
from fp4pass.graph.inductor.residuals import fuse_norms

pytestmark = pytest.mark.usefixtures("fresh_graphs")


ROW = torch.randn(K, generator=torch.Generator().manual_seed(5)).bfloat16()


def rms_norm(x: Tensor, row: Tensor = ROW) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return row.to(x.dtype) * (wide * inverse).to(x.dtype)


def run(
    function: Callable[..., Any], args: Any, eligible: Any = lambda node: True, **options: Any
) -> tuple[Any, list[int], Any]:
    return run_passes(function, args, lambda graph: fuse_norms(graph, eligible), **options)


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
