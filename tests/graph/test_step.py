"""Passes for what a decode step does beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from post_grad import compiled, fresh
from torch import Tensor, fx

from fp4pass.graph.inductor.step import join_counters, split_argmax

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


class Changed:
    """A change that runs a pass as on a GPU, twice, and counts."""

    def __init__(self, change: Callable[..., int]) -> None:
        self.change, self.count = change, 0
        self.targets: list[Any] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.count += self.change(graph, lambda node: True)
        assert self.change(graph, lambda node: True) == 0
        self.targets = [node.target for node in graph.nodes]


def counters(count: int = 3) -> list[Tensor]:
    return [torch.tensor(i) for i in range(count)]


def test_counters_advance_in_one_call() -> None:
    """What reads a counter before reads what it was."""

    def step(x: Tensor, *counts: Tensor) -> list[Tensor]:
        read = [x + each for each in counts]
        for each in counts:
            each.add_(len(x))
        return read

    passed = Changed(join_counters)
    code, found, expected = compiled(step, passed), counters(), counters()
    for _ in range(2):
        results = code(torch.arange(4), *found), step(torch.arange(4), *expected)
        assert all(map(torch.equal, *results)) and found == expected
    assert passed.count == 3
    assert passed.targets.count(aten._foreach_add.Scalar) == 1


@pytest.mark.parametrize("case", ["one", "another step", "read behind", "of numbers in a row"])
def test_counters_that_are_left(case: str) -> None:
    def step(*counts: Tensor) -> Tensor:
        for i, each in enumerate(counts):
            each.add_(i + 1 if case == "another step" else 1)
        return counts[0] * 2 + counts[-1] if case == "read behind" else torch.ones(1)

    passed = Changed(join_counters)
    found, expected = (counters(1 if case == "one" else 2) for _ in range(2))
    if case == "of numbers in a row":
        found, expected = ([each.expand(3).clone() for each in some] for some in (found, expected))
    assert torch.equal(compiled(step, passed)(*found), step(*expected))
    assert all(map(torch.equal, found, expected))
    assert passed.count == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_the_largest_of_a_long_row(keeps: bool) -> None:
    """Of equal ones the first; NaN is larger than all."""
    x = torch.randint(-50, 50, (6, 17920), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 1000] = x[1, 9000] = x[1, 17919] = 60
    x[2, 17919], x[3, 5000], x[3, 7000] = 60, torch.inf, torch.nan
    x[4], x[5] = -0.0, -torch.inf
    x[4, 8960:] = 0.0
    expected = x.argmax(-1, keepdim=keeps)
    passed = Changed(split_argmax)
    code = compiled(lambda x: x.argmax(-1, keepdim=keeps), passed)
    assert torch.equal(code(x), expected)
    assert passed.count == 1 and passed.targets.count(aten.argmax.default) == 2


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda x: x[:, :1024].argmax(-1), id="a short row"),
        pytest.param(lambda x: x.argmax(), id="of all"),
        pytest.param(lambda x: x.argmax(0), id="of columns"),
        pytest.param(lambda x: x[:, :16411].argmax(-1), id="a prime"),
    ],
)
def test_choices_that_are_left(choose: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 17920)
    passed = Changed(split_argmax)
    assert torch.equal(compiled(choose, passed)(x), choose(x)) and passed.count == 0
