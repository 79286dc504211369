"""Prepared models under torch.compile: one observation for each input, statistics of all layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from post_grad import compiled, fresh
from test_zoo import statistics
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.graph.inductor.merge import share_observers
from fp4pass.methods import Stats
from fp4pass.quantization.observers.observer import OBSERVERS


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh():
        yield


class Gated(nn.Module):
    """Two linears that read one tensor; the one behind them reads its own twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(x)
        z = F.silu(self.left(y)) * self.up(y)
        return self.down(z) + self.down(z)


def observed(model: nn.Module) -> dict[str, Stats]:
    named = model.named_modules()
    return {name: statistics(module) for name, module in named if OBSERVERS in module.__dict__}


def assert_same_statistics(a: nn.Module, b: nn.Module) -> None:
    one, other = observed(a), observed(b)
    assert list(one) == list(other) and one
    for name, stats in one.items():
        assert stats.tokens == other[name].tokens > 0, name
        assert stats.input_amax == pytest.approx(other[name].input_amax, rel=1e-5)
        for x, y in (
            (stats.block_hessian, other[name].block_hessian),
            (stats.hessian, other[name].hessian),
        ):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                size = x.diagonal(dim1=-2, dim2=-1).sqrt()
                bound = 1e-5 * size.unsqueeze(-1) * size.unsqueeze(-2)
                assert ((x - y).abs() <= bound).all(), name


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("method", "grad"),
    [
        ("hessian", True),
        ("gptq", False),
        pytest.param("hessian", False, marks=pytest.mark.slow),
        pytest.param("naive", False, marks=pytest.mark.slow),
    ],
)
def test_an_input_is_observed_once(method: str, grad: bool) -> None:
    eager, model = (fp4pass.prepare(Gated(), method) for _ in range(2))
    code = compiled(model)
    with torch.set_grad_enabled(grad):
        # The batches come as they do: states are read and written, and shapes become dynamic.
        for i in (4, 5, 6):
            x = torch.randn(i, 64, generator=torch.Generator().manual_seed(i))
            torch.testing.assert_close(code(x), eager(x))
    assert_same_statistics(eager, model)
    assert statistics(eager.left).tokens == 15 and statistics(eager.down).tokens == 30
    name = "observe_full" if method == "gptq" else "observe"
    first, *_ = fp4pass.compile_report().graphs
    assert first.before == {name: 4} and first.after == {name: 2}
    assert first.changes["share_observers"] == 2


def test_a_second_run_changes_nothing() -> None:
    counts = []
    model = fp4pass.prepare(Gated())
    with torch.no_grad():
        code = compiled(model, lambda graph: counts.extend(share_observers(graph) for _ in "ab"))
        code(torch.randn(4, 64))
    assert counts == [2, 0]
