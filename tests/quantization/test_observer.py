"""Observers that share what they have seen collect the bits of observers by themselves."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nn.test_input_cache import Attention, K, Twice, batch, unshared
from torch import nn

import fp4pass
from fp4pass import ops
from fp4pass.quantization.observers.observer import OBSERVERS, Observer, collect

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def prepared(make: Callable[[], nn.Module] = Attention, method: str = "hessian") -> Any:
    torch.manual_seed(0)
    return fp4pass.prepare(make().eval(), method)


def observers(model: nn.Module) -> Iterator[tuple[str, Observer]]:
    for name, module in model.named_modules():
        for observer in module.__dict__.get(OBSERVERS, ()):
            yield name, observer


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    found, expected = dict(observers(a)), dict(observers(b))
    assert found and found.keys() == expected.keys()
    for name, observer in found.items():
        for x, y in zip(observer.state, expected[name].state, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y), name


def shared(model: nn.Module) -> int:
    """How many different statistics its observers have."""
    return len({id(observer.state[0]) for _, observer in observers(model)})


@pytest.mark.parametrize("method", ["hessian", "gptq"])
@pytest.mark.parametrize("make", [Attention, Twice])
def test_the_bits_are_those_of_one_observer_for_each_layer(
    make: type[nn.Module], method: str
) -> None:
    model, alone = prepared(make, method), prepared(make, method)
    for i in (0, 1, 1, 2):
        with torch.no_grad():
            model(batch(i))
            with unshared():
                alone(batch(i))
    assert_same_bits(model, alone)
    assert shared(alone) == 4
    assert shared(model) == 2 if make is Attention else shared(model) > 1


@pytest.mark.core
def test_layers_that_see_other_inputs_too_go_their_own_way() -> None:
    def run(model: Any) -> None:
        x, y = batch(1), batch(2)
        model(batch(0))
        model.q(x), model.q(x), model.k(x), model.q(y), model.v(x), model.k(y)
        model(batch(3))

    model, alone = prepared(), prepared()
    run(model)
    with unshared():
        run(alone)
    assert_same_bits(model, alone)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.core
def test_copies_go_on_by_themselves(through: Callable[[nn.Module], nn.Module]) -> None:
    model, x = prepared(), batch(1)
    model(batch(0))
    model.q(x)
    other = through(model)
    # The copy's layers have the histories of the originals, and read the same input.
    other.k(x), model.v(x), other.v(x)
    alone = prepared()
    with unshared():
        alone(batch(0))
        alone.q(x), alone.v(x)
        assert_same_bits(model, alone)
        alone.k(x)
        assert_same_bits(other, alone)
    for i in range(3):
        other(batch(i))
    assert collect([model.q], "").tokens == 24
    assert collect([other.q], "").tokens == 60


@pytest.mark.core
def test_threads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, so that the order of the sums does not matter."""
    observe = ops.observe

    def slowly(*arguments: Any) -> None:
        # Others run between copying what was seen and adding to it.
        time.sleep(1e-4)
        observe(*arguments)

    monkeypatch.setattr(ops, "observe", slowly)
    model = prepared()
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        for j in range(10):
            model(batch(10 * i + j).mul(4).round())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.cat([batch(i).mul(4).round().reshape(-1, K) for i in range(40)])
    blocks = x.view(len(x), -1, 32)
    for name in "qkv":
        stats = collect([getattr(model, name)], name).matrix(0)
        assert stats.tokens == len(x) and stats.input_amax == float(x.abs().max())
        assert torch.equal(stats.block_hessian, torch.einsum("tji,tjk->jik", blocks, blocks))


def test_compiled_and_eager_calls_add_up() -> None:
    model, alone, graphs = prepared(), prepared(), []

    def backend(graph_module: Any, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for runs in ((compiled, compiled, compiled), (model, model), (compiled, compiled, model)):
            for i, run in enumerate(runs):
                run(batch(i))
                with unshared():
                    alone(batch(i))
            assert_same_bits(model, alone)
            if run is compiled:
                assert len(graphs) == 1
    # Once more where layers have shared what they saw.
    assert len(graphs) <= 3
    torch.compiler.reset()


@pytest.mark.core
def test_nothing_of_them_is_left_after_convert() -> None:
    model, x = prepared(), batch()
    model.q(x)
    state = [weakref.ref(tensor) for _, observer in observers(model) for tensor in observer.state]
    model.k(x), model.v(x), model.o(x)
    fp4pass.convert(model, "nvfp4", method="naive")
    assert not any(each() is not None for each in state)


def test_inference_mode_at_any_step() -> None:
    """Calibrated and converted within inference mode, used outside of it, and the reverse."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(10, 64)
    fp4pass.prepare(model)
    with torch.inference_mode():
        model(x)
    model(x)
    with torch.inference_mode():
        fp4pass.convert(model, "nvfp4")
        inside = model(x)
    assert {row.tokens for row in fp4pass.report(model).converted} == {20}
    x.requires_grad_()
    outside = model(x)
    outside.sum().backward()
    assert torch.equal(inside, outside)
    assert x.grad is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_statistics_are_float32_and_may_be_added_to_anywhere(device: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = prepared()
    finally:
        torch.set_default_dtype(torch.float32)
    model, x = model.float().to(device), batch().to(device)
    with torch.inference_mode():
        model(x)
    model(x)
    for _, observer in observers(model):
        stats = observer.stats().matrix(0)
        assert stats.tokens == 24
        assert stats.block_hessian is not None and stats.block_hessian.dtype is torch.float32


def test_what_was_seen_of_an_input_does_not_outlive_a_forward() -> None:
    """Of one buffer, written where torch does not count it."""
    first, second = prepared(), prepared()
    x, new = batch(), 100 * batch(1)
    first(x)
    x.data.copy_(new)
    second(x)
    seen = [collect([layer], "").matrix(0) for layer in (second.q, second.k)]
    assert all(stats.input_amax == float(new.abs().max()) for stats in seen)
