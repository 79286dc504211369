"""A conversion that is cut off: as before while nothing is packed, then refused by everything."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import bits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import StateError
from fp4pass.methods import METHODS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def batch() -> Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(1))


def build(how: str) -> Any:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    model: Any = nn.Sequential(nn.Linear(32, 32), blocks).eval()
    if how == "graph":
        model = fp4pass.trace(model, batch())
    method = "gptq" if how == "cross" else "hessian"
    rules = [] if how != "cross" else [("0", {"method": "gptq"}), ("1.0.*", None)]
    if how == "cross":
        method = fp4pass.Gptq(target="cross")  # type: ignore[assignment]
    fp4pass.prepare(model, method, rules=rules, sequential=how in ("sequential", "cross"))
    return fp4pass.calibrate(model, [batch(), batch() * 2], progress=False)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, type[BaseException]], None]:
    """Have the search after `count` others raise an error, once."""

    def at(count: int, error: type[BaseException]) -> None:
        left = [count]
        for name in ("hessian", "gptq"):
            method = METHODS[name]

            def function(*args: Any, search: Any = method.function) -> Any:
                left[0] -= 1
                if left[0] == -1:
                    raise error("cut off")
                return search(*args)

            monkeypatch.setitem(METHODS, name, dataclasses.replace(method, function=function))

    return at


@pytest.mark.quick(1)
@pytest.mark.core
@pytest.mark.parametrize("how", ["live", "graph", "sequential", "cross"])
def test_before_the_first_packed_weight_nothing_has_changed(how: str, cut: Any) -> None:
    expected = fp4pass.convert(build(how), "nvfp4").state_dict()
    model = build(how)
    before = copy.deepcopy(model.state_dict())
    cut(0, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4pass.convert(model, "nvfp4")
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert fp4pass.report(model).converted
    found = fp4pass.convert(model, "nvfp4").state_dict()
    assert all(torch.equal(bits(x), bits(expected[name])) for name, x in found.items())


def test_calibration_goes_on_after_it(cut: Any) -> None:
    for how in ("live", "sequential"):
        model, other = build(how), build(how)
        cut(0, MemoryError)
        with pytest.raises(MemoryError):
            fp4pass.convert(model, "nvfp4")
        for each in (model, other):
            fp4pass.calibrate(each, [batch() * 3], progress=False)
        found, expected = (fp4pass.convert(each, "nvfp4").state_dict() for each in (model, other))
        assert all(torch.equal(bits(x), bits(expected[name])) for name, x in found.items())


@pytest.mark.core
@pytest.mark.parametrize("how", ["live", "graph", "sequential"])
def test_behind_it_everything_refuses(how: str, cut: Any, tmp_path: Path) -> None:
    model = build(how)
    cut(2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4pass.convert(model, "nvfp4")
    message = "^The model is interrupted: .* Start again from the float model; .*resume="
    calls: list[Callable[[nn.Module], object]] = [
        fp4pass.report,
        fp4pass.convert,
        fp4pass.prepare,
        lambda m: fp4pass.calibrate(m, [batch()], progress=False),
        lambda m: fp4pass.save(m, tmp_path / "q"),
        lambda m: fp4pass.convert(nn.Sequential(m), "nvfp4", method="sse"),
    ]
    for call in calls:
        with pytest.raises(StateError, match=message):
            call(model)
    assert not (tmp_path / "q").exists()


@pytest.mark.core
def test_a_search_goes_on_where_it_was_cut_off(cut: Any, tmp_path: Path) -> None:
    expected = fp4pass.convert(build("live"), "nvfp4").state_dict()
    cut(2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4pass.convert(build("live"), "nvfp4", resume=tmp_path)
    found = fp4pass.convert(build("live"), "nvfp4", resume=tmp_path).state_dict()
    assert all(torch.equal(bits(x), bits(expected[name])) for name, x in found.items())
