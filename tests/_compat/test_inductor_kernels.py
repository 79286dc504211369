"""Kernels that Inductor writes for graphs with our operators: they wait before all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from post_grad import fresh
from torch import Tensor
from torch._inductor import async_compile, config
from torch._inductor.exc import InductorError

from fp4pass import ops
from fp4pass._compat import inductor as compat
from fp4pass.graph.inductor import install_passes

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


class Written(Exception):
    """Raised in place of compiling a kernel, which takes a GPU."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        install_passes()
        yield


def kernel_of(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *args: Tensor) -> str:
    """The source of the first Triton kernel that Inductor writes for a function, on a CPU."""
    sources: list[str] = []

    def stop(self: object, name: str, source: str, *args: object, **kwargs: object) -> None:
        sources.append(source)
        raise Written

    monkeypatch.setattr(async_compile.AsyncCompile, "triton", stop)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "none")
    torch._dynamo.reset()
    with config.patch(cpu_backend="triton", compile_threads=1), pytest.raises(InductorError):
        torch.compile(function, fullgraph=True)(*args)
    return sources[0]


PACKED = torch.zeros(16, 32, dtype=torch.uint8), torch.full((16, 2), 120, dtype=torch.uint8)


def product(x: Tensor) -> Tensor:
    return ops.linear(x, *PACKED, None, None, "mxfp4")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a pointwise kernel": lambda x: product(x.sigmoid()).tanh(),
    "a sum in a loop": lambda x: product(x * x.expand(3, -1).sum(1, keepdim=True)),
    "nothing is read": lambda x: product(torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_wait_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_can_start_early", lambda graph, kernel: True)
    source = kernel_of(FUNCTIONS[name], monkeypatch, torch.randn(3, 64))
    _, _, body = source.partition("def triton_")
    before, _, after = body.partition(WAIT)
    assert "tl.load" not in before and "tl.store" not in before and "tl.store" in after
    assert after.strip().startswith(LAUNCH) and "'launch_pdl': True" in source
    assert source.count(WAIT) == source.count(LAUNCH) == 1


def test_kernels_of_other_graphs_and_gpus_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel_of(FUNCTIONS["a pointwise kernel"], monkeypatch, torch.randn(3, 64))
    assert WAIT not in source and "'launch_pdl': True" not in source
    monkeypatch.setattr(compat, "_can_start_early", lambda graph, kernel: True)
    source = kernel_of(lambda x: x.sigmoid().tanh(), monkeypatch, torch.randn(3, 64))
    assert WAIT not in source and "'launch_pdl': True" not in source
