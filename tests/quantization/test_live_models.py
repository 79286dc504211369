"""A live model runs its own code: what it holds, asks for and calls is looked up at each call."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4pass


class Tripled(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super().__call__(*args, **kwargs)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def __getattribute__(self, name: str) -> Any:
        return self.inner if name == "other" else super().__getattribute__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)  # type: ignore[no-any-return]


class Called(Looked):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 5 * super()._call_impl(*args, **kwargs)

    __call__ = _call_impl


class Odd(nn.Module):
    """Branches on exact types, and calls what is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.parts = nn.ModuleList([Looked(), Called(), nn.Sequential(nn.Linear(64, 64))])
        self.out = nn.Linear(64, 64)
        self.triple = Tripled(F.relu)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = {Looked: x, Called: 2 * x, nn.Sequential: -x}[type(part)] + part(self.act(x))
        return self.out(self.triple(x))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("references")
def test_its_code_is_followed_wherever_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    dense, x = Odd().eval(), torch.randn(4, 64)
    packed = copy.deepcopy(dense)
    before = dense(x)
    assert torch.equal(fp4pass.prepare(packed)(x), before)
    fp4pass.convert(packed, weight_only=True)
    for name, module in packed.named_modules():
        if isinstance(module, fp4pass.nn.linear.QuantizedLinear):
            dense.get_submodule(name).weight = nn.Parameter(module.weight)
    forward, outputs = nn.Sequential.forward, [dense(x)]
    for change in ("none", "partial", "class"):
        if change == "partial":
            dense.act.keywords["negative_slope"] = packed.act.keywords["negative_slope"] = 0.9
        if change == "class":
            monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: 2 * forward(self, x))
        outputs.append(dense(x))
        assert torch.equal(packed(x), outputs[-1]), change
    assert not torch.equal(outputs[1], outputs[2]) and not torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize("owner", [nn.Linear, F])
def test_what_is_observed_is_the_input_whatever_computes(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "forward" if owner is nn.Linear else "linear"
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(32, 64)
    wrapped = copy.deepcopy(plain)
    original = getattr(owner, name)
    for model in (fp4pass.prepare(plain), fp4pass.prepare(wrapped)):
        fp4pass.calibrate(model, [x], progress=False)
        monkeypatch.setattr(owner, name, lambda *args: 7 * original(*args))
    monkeypatch.undo()
    found = [fp4pass.convert(model, "nvfp4").state_dict() for model in (plain, wrapped)]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_its_source_is_not_read(tmp_path: Path) -> None:
    """A file that is edited meanwhile, a name of an outer function, a class that wants more."""
    path = tmp_path / "edited.py"
    path.write_text(
        """from torch import nn
class Wants(nn.Module):
    def __init_subclass__(cls, more, **options):
        super().__init_subclass__(**options)
class Counted(Wants, more=1):
    pass
def make():
    calls = 0
    class Net(Counted, more=2):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
        def forward(self, x):
            nonlocal calls
            calls += 1
            return self.linear(x)
    return Net()
"""
    )
    spec: Any = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text('class Net((\n  """')
    model = fp4pass.prepare(module.make().eval())
    fp4pass.calibrate(model, [torch.randn(8, 64)], progress=False)
    assert len(fp4pass.report(fp4pass.convert(model, "nvfp4")).converted) == 1
