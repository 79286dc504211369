"""The token of greedy decoding in graphs: which argmax is an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from post_grad import calls, compiled, fresh
from torch import Tensor, fx

from fp4pass.graph.inductor.argmax import fuse_argmax, long_rows_on_gpu

CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "the last token": (lambda x: x[:, -1].argmax(-1, keepdim=True), 1),
    "all tokens": (lambda x: x.argmax(2), 1),
    "another dimension": (lambda x: x.argmax(1), 0),
    "all numbers": (lambda x: x.argmax(), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_argmax_of_rows(name: str) -> None:
    function, expected = CASES[name]
    found = []

    def change(graph: fx.Graph) -> None:
        found.append(fuse_argmax(graph, lambda node: True))
        assert fuse_argmax(graph, lambda node: True) == 0
        assert calls(graph).get("last_argmax", 0) == expected
        assert not any(map(long_rows_on_gpu, graph.find_nodes(op="placeholder")))

    x = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    with fresh(), torch.no_grad():
        assert torch.equal(compiled(lambda x: function(x + 1), change)(x), function(x + 1))
    assert found == [expected]
