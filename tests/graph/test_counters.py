"""The pass that adds to counters in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from post_grad import compiled, fresh
from torch import Tensor, fx
from torch._inductor import config

from fp4pass.graph.inductor.counters import join_counters

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


def run(step: Callable[..., Any], kept: list[Tensor]) -> tuple[Any, int, list[Any]]:
    """A compiled step: its result, the number of calls that the pass removed, the calls left."""
    counts, targets = [], []

    def change(graph: fx.Graph) -> None:
        counts.extend(join_counters(graph, lambda node: True) for _ in range(2))
        graph.lint()
        targets.extend(node.target for node in graph.nodes)

    torch._dynamo.reset()
    found = compiled(step, change)(kept)
    assert counts[1] == 0
    return found, counts[0], targets


def counters(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def test_counters_are_added_to_in_one_call() -> None:
    def step(kept: list[Tensor]) -> list[Tensor]:
        before = [each + 10 for each in kept]
        for each in kept:
            each.add_(1)
        return before

    kept = counters(3, 5, 7)
    found, removed, targets = run(step, kept)
    assert kept == counters(4, 6, 8) and found == counters(13, 15, 17)
    assert removed == 2 and targets.count(aten._foreach_add.Scalar) == 1


@pytest.mark.slow
def test_generated_code_adds_to_them_and_reads_them() -> None:
    def step(kept: list[Tensor]) -> list[Tensor]:
        for each in kept:
            each.add_(1)
        return [kept[0] * 2, kept[2] + kept[1]]

    removed: list[int] = []

    def change(graph: fx.Graph) -> None:
        removed.append(join_counters(graph, lambda node: True))

    kept = counters(3, 5, 7)
    with config.patch(post_grad_custom_pre_pass=change):
        code = torch.compile(step, fullgraph=True)
        assert code(kept) == counters(8, 14) and code(kept) == counters(10, 16)
    assert removed == [2] and kept == counters(5, 7, 9)


def test_each_number_has_a_call() -> None:
    def step(kept: list[Tensor]) -> None:
        for i, each in enumerate(kept):
            each.add_(1 + i % 2)

    kept = counters(3, 5, 7, 9, 11)
    _, removed, targets = run(step, kept)
    assert kept == counters(4, 7, 8, 11, 12)
    assert removed == 3 and targets.count(aten._foreach_add.Scalar) == 2


def of_floats(kept: list[Tensor]) -> None:
    for each in kept:
        each.add_(0.5)


def of_another_counter(kept: list[Tensor]) -> None:
    kept[0].copy_(kept[1] + 1)
    kept[1].copy_(kept[0] + 1)


def alone(kept: list[Tensor]) -> None:
    kept[0].add_(1)


@pytest.mark.parametrize("step", [of_floats, of_another_counter, alone])
def test_what_is_no_such_counter_stays(step: Callable[..., None]) -> None:
    kept = [torch.tensor(3.0), torch.tensor(5.0)] if step is of_floats else counters(3, 5)
    eager = [each.clone() for each in kept]
    step(eager)
    _, removed, _ = run(step, kept)
    assert removed == 0 and kept == eager
