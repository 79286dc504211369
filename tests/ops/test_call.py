"""Calls of operators that pass the dispatcher by, and those that must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp4pass import ops
from fp4pass.ops import registration

WEIGHT = ops.search(torch.linspace(-1, 1, 5 * 64).view(5, 64), None, 2.0**-8, "nvfp4", "naive")
NUMBER = torch.tensor([2.0**8])


class Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


# What wants to see a call, or changes what it does: to an input, and around the call.
WATCHED: dict[str, Callable[..., Tensor]] = {
    "a gradient": lambda run, x: run(x.requires_grad_()),
    "a mode": lambda run, x: _under(Noting(), run, x),
    "a profiler": lambda run, x: _under(torch.autograd.profiler.profile(), run, x),
    "a transform": lambda run, x: torch.vmap(run)(x[None])[0],
    "a tangent": lambda run, x: torch.func.jvp(run, (x,), (x,))[0],
    "a subclass": lambda run, x: run(x.as_subclass(Own)),
    "another sign": lambda run, x: run(torch.complex(x, -x).conj().imag),
    "a trace": lambda run, x: torch.jit.trace(run, x, check_trace=False)(x),
}


def _under(context: Any, run: Any, x: Tensor) -> Tensor:
    with context:
        return run(x)


def _linear_called(x: Tensor) -> Tensor:
    return ops.call(ops.linear, x, *WEIGHT, NUMBER, None, "nvfp4")


@pytest.mark.parametrize("watched", ["nothing", "no gradient", *WATCHED])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_on_a_cpu_passes_the_dispatcher_by_where_nothing_watches(
    watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 64)
    expected = _linear_called(x)
    ran: list[str] = []
    plain = registration.only_calls_kernel

    def noting(*args: Any) -> bool:
        found = plain(*args)
        ran.append("kernel" if found else "dispatcher")
        return found

    monkeypatch.setattr(registration, "only_calls_kernel", noting)
    if watched == "no gradient":
        y = _under(torch.no_grad(), _linear_called, x.requires_grad_())
    else:
        y = WATCHED.get(watched, lambda run, x: run(x))(_linear_called, x)
    assert torch.equal(y, expected)
    assert set(ran) == {"dispatcher" if watched in WATCHED else "kernel"}
    assert y.requires_grad == (watched == "a gradient")
