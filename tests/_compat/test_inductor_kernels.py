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
from fp4pass.graph.inductor import install_passes, launches
from fp4pass.graph.inductor.install import SWITCH

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


class Written(Exception):
    """Raised in place of compiling a kernel, which takes a GPU."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compat, "_has_early_launches", lambda device: True)
    monkeypatch.setattr(launches, "EARLY", (ops.linear,))
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


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a pointwise kernel": lambda x: product(x.sigmoid()).tanh(),
    "a sum in a loop": lambda x: product(x * x.expand(3, -1).sum(1, keepdim=True)),
    "nothing is read": lambda x: product(torch.zeros_like(x)),
    "bytes are written": lambda x: (product(x), x.sigmoid().mul(255).to(torch.uint8)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_wait_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel_of(FUNCTIONS[name], monkeypatch, torch.randn(3, 64))
    _, _, body = source.partition("def triton_")
    before, _, after = body.partition(WAIT)
    assert "tl.load" not in before and "tl.store" not in before and "tl.store" in after
    assert "'launch_pdl': True" in source and source.count(WAIT) == 1
    # A product of one row may read bytes, as weights are, before it waits.
    launches = name != "bytes are written"
    assert after.strip().startswith(LAUNCH) == launches and source.count(LAUNCH) == launches


def is_plain(source: str) -> bool:
    return WAIT not in source and LAUNCH not in source and "'launch_pdl': True" not in source


def test_kernels_of_other_graphs_and_gpus_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    other, x = (lambda x: x.sigmoid().tanh()), torch.randn(3, 64)
    ours = FUNCTIONS["a pointwise kernel"]
    assert not is_plain(kernel_of(ours, monkeypatch, x))
    assert is_plain(kernel_of(other, monkeypatch, x))
    with monkeypatch.context() as patch:
        patch.setenv(SWITCH, "launch_early")
        assert is_plain(kernel_of(ours, monkeypatch, x))
    with monkeypatch.context() as patch:
        patch.setattr(launches, "EARLY", (ops.linear_add,))
        assert is_plain(kernel_of(ours, monkeypatch, x))
    monkeypatch.setattr(compat, "_has_early_launches", lambda device: False)
    assert is_plain(kernel_of(ours, monkeypatch, x))


def test_kernels_that_several_are_joined_to_wait_if_they_start_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's own option starts them early, with parts that belong to our graphs."""

    def function(x: Tensor) -> Any:
        return product(x), *torch._foreach_mul([x, x + 1], 2.0)

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *args: (9, 0))
    source = kernel_of(function, monkeypatch, torch.randn(3, 64))
    assert "'launch_pdl': True" not in source
    assert source.count(WAIT) == source.count("tl.store") > 1
