"""The pass that looks for the largest of a long row in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from post_grad import compiled
from torch import Tensor, fx

from fp4pass.graph.inductor.merge import split_argmax

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("fresh_graphs")


def run(choose: Callable[[Tensor], Any], x: Tensor, **options: Any) -> tuple[Any, int, list[Any]]:
    """What the compiled function returns, how often the pass split, and the calls that are left."""
    counts, targets = [], []

    def change(graph: fx.Graph) -> None:
        counts.extend(split_argmax(graph, lambda node: True) for _ in range(2))
        targets.extend(node.target for node in graph.nodes)

    torch._dynamo.reset()
    found = compiled(choose, change, **options)(x)
    assert counts[1] == 0
    return found, counts[0], targets


def rows_of_every_kind(size: int, count: int = 10) -> Tensor:
    """Rows [count, size]: of equal numbers the first is the largest, and NaN is larger than all."""
    x = torch.randn(count, size, generator=torch.Generator().manual_seed(0))
    x[0] = x[0].round()
    x[1] = -x[1].abs() - 1
    x[2] = 0.5
    x[3] = -0.0
    x[3, size // 2 :] = 0.0
    x[4] = -torch.inf
    x[5] = -torch.inf
    x[5, size - 1] = -1e4
    x[6, size // 3] = x[6, size // 3 * 2] = torch.inf
    x[7, size // 2 :] = torch.nan
    x[8, size - 1] = -torch.nan
    x[8, 0] = torch.inf
    x[9, size - 1] = 100
    return x


@pytest.mark.quick(3)
# Of 128 parts that are full, and with a rest that fills the last part, and none of some parts.
@pytest.mark.parametrize("size", [128 * 140, 16411, 128 * 129 + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_every_kind(dtype: torch.dtype, size: int) -> None:
    x = rows_of_every_kind(size).to(dtype)
    found, count, targets = run(lambda x: x.argmax(-1, keepdim=True), x)
    assert torch.equal(found, x.argmax(-1, keepdim=True)) and count == 1
    assert targets.count(aten.argmax.default) == 2
    assert (aten.constant_pad_nd.default in targets) == bool(size % 128)


CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "the last token": lambda x: x[:, -1].argmax(-1, keepdim=True),
    "all tokens": lambda x: x.argmax(2),
    "one row": lambda x: x[0, 0].argmax(0),
    "in float32": lambda x: x[:, -1].float().argmax(-1),
    "of numbers that are read later": lambda x: ((y := x + 1), y.argmax(-1), y.exp()),
    "of columns of a transposed tensor": lambda x: x.mT.contiguous().mT.argmax(-1),
}

NO_CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "a short row": lambda x: x[..., :1024].argmax(-1),
    "of all": lambda x: x.argmax(),
    "of all, in a row": lambda x: x.argmax(None, keepdim=True),
    "of columns": lambda x: x.argmax(1),
    "many rows": lambda x: x.expand(50, 2, 3, -1).argmax(-1),
    "whole numbers": lambda x: x.to(torch.int32).argmax(-1),
    "the least": lambda x: x.argmin(-1),
}


def equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", [*CHOICES, *NO_CHOICES])
def test_what_is_split(name: str) -> None:
    choose = CHOICES.get(name) or NO_CHOICES[name]
    x = torch.randn(2, 3, 17920, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, count, _ = run(choose, x)
    assert equal(found, choose(x)) and count == (name in CHOICES)


def test_dynamic_rows_stay() -> None:
    x = torch.randn(3, 17920)
    found, count, _ = run(lambda x: x.argmax(-1), x, dynamic=True)
    assert torch.equal(found, x.argmax(-1)) and count == 0


def test_cpus_keep_theirs() -> None:
    counts: list[int] = []
    x = torch.randn(2, 17920)
    choose = compiled(lambda x: x.argmax(-1), lambda graph: counts.append(split_argmax(graph)))
    assert torch.equal(choose(x), x.argmax(-1)) and counts == [0]
