"""The input cache: never a stale value, nothing kept alive, and as few quantizations as inputs."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from small_models import tokens
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fp4pass
from fp4pass.nn import linear as linear_module
from fp4pass.nn.input_cache import compute_once, share_among
from fp4pass.quantization.observers import observer as observer_module

K = 64


class Reader(nn.Module):
    """Asks for the sum of an input, and counts how often it is computed."""

    computed = 0
    # Of all readers of a test.
    caller = nn.Module()

    def __init__(self) -> None:
        super().__init__()
        readers = [*Reader.caller.children(), self]
        Reader.caller.add_module(str(len(readers)), self)
        first = vars(readers[0])
        if len(readers) == 1:
            share_among(Reader.caller, [self])
        vars(self).update({key: each for key, each in first.items() if "fp4pass" in key})

    def forward(self, x: Tensor, key: object = "sum", also: Tensor | None = None) -> Tensor:
        def compute() -> Tensor:
            Reader.computed += 1
            return x.detach().double().sum() + (0 if also is None else also)

        return compute_once(x, key, self, compute, also)


@contextmanager
def running(caller: nn.Module) -> Iterator[None]:
    """While a forward of a module runs."""
    (before,), (after,) = caller._forward_pre_hooks.values(), caller._forward_hooks.values()
    before(caller, ())
    try:
        yield
    finally:
        after(caller, (), None)


@pytest.fixture(autouse=True)
def one_forward() -> Iterator[None]:
    Reader.computed, Reader.caller = 0, nn.Module()
    Reader()
    with running(Reader.caller):
        yield


@pytest.mark.core
def test_readers_of_one_input_share_what_is_computed() -> None:
    x, readers = torch.ones(3), [Reader() for _ in range(4)]
    assert [float(each(x)) for each in readers[:3]] == [3.0] * 3 and Reader.computed == 1
    readers[3](x, key="other")
    assert Reader.computed == 2
    # Another input, and back: one slot.
    readers[0](torch.ones(4)), readers[3](x)
    assert Reader.computed == 4


def test_a_reader_that_asks_again_starts_over() -> None:
    """Writes that no version counts, as through numpy, come between forwards."""
    array = torch.ones(3).numpy()
    x, a, b = torch.from_numpy(array), Reader(), Reader()
    for value in (1.0, 2.0, 3.0):
        array[:] = value
        assert float(a(x)) == float(b(x)) == 3 * value
    assert Reader.computed == 3


WRITES: dict[str, Callable[[Tensor], object]] = {
    "through a view": lambda x: x.view(-1)[3:5].zero_(),
    "other data": lambda x: x.__setattr__("data", torch.full((4, 4), 7.0)),
    "other strides": lambda x: x.__setattr__("data", x.data.t()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.core
def test_writes_between_readers_are_seen(write: Callable[[Tensor], object]) -> None:
    x = torch.arange(16.0).view(4, 4)
    first, second = Reader(), Reader()
    first(x)
    write(x)
    assert torch.equal(second(x), x.double().sum()) and Reader.computed == 2


def test_an_input_is_one_tensor_and_not_what_looks_like_it() -> None:
    x, readers = torch.ones(4, 4), [Reader() for _ in range(5)]
    for reader, same in zip(readers, (x, x[:], x.view_as(x), x.detach(), x.clone()), strict=True):
        reader(same)
    assert Reader.computed == 5


def test_nothing_is_kept_longer_than_the_input() -> None:
    gc.disable()
    try:
        x = torch.ones(3)
        result = weakref.ref(Reader()(x))
        alive = weakref.ref(x)
        assert result() is not None
        del x
        assert alive() is None and result() is None
        # Nor after another input.
        x, y = torch.ones(3), torch.ones(3)
        result = weakref.ref(Reader()(x))
        Reader()(y)
        assert result() is None
    finally:
        gc.enable()


@pytest.mark.core
def test_another_tensor_that_decides_counts_as_itself_and_its_version() -> None:
    x, scale = torch.ones(3), torch.ones(())
    a, b, c, d = (Reader() for _ in range(4))
    assert float(a(x, also=scale)) == float(b(x, also=scale)) == 4 and Reader.computed == 1
    scale.add_(1)
    assert float(c(x, also=scale)) == 5
    assert float(d(x, also=torch.ones(()))) == 4


def test_each_thread_has_its_own() -> None:
    x, here = torch.ones(3), Reader()
    here(x)
    results: list[float] = []
    barrier = threading.Barrier(4)

    def work(value: float) -> None:
        own, readers = torch.full((1000,), value), [Reader() for _ in range(3)]
        barrier.wait()
        for i in range(50):
            own.fill_(value + i)
            with running(Reader.caller):
                results.extend(float(each(own)) - 1000 * (value + i) for each in readers)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, map(float, range(4))))
    assert len(results) == 4 * 150 and not any(results)
    before = Reader.computed
    Reader()(x)
    assert Reader.computed == before


def test_it_is_off_where_operators_are_recorded_or_versions_not_counted() -> None:
    first, second = Reader(), Reader()

    def both(x: Tensor) -> Tensor:
        return first(x) + second(x)

    def count(run: Callable[[], object]) -> int:
        Reader.computed = 0
        run()
        return Reader.computed

    x = torch.ones(3)
    with torch.inference_mode():
        inside = torch.ones(3)
        assert count(lambda: both(x)) == 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert count(lambda: both(x)) == 2
    assert count(lambda: both(inside)) == count(lambda: both(nn.Parameter(x))) == 2
    assert count(lambda: torch.func.vmap(both)(torch.ones(2, 3))) == 2
    assert count(lambda: make_fx(both)(x)) == 2
    assert count(lambda: both(x)) == 1
    # What was computed before is no constant of a graph.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        graph = torch.jit.trace(both, (x,), check_trace=False)
    assert float(graph(2 * x)) == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_results_stay_on_their_stream_and_out_of_captures() -> None:
    """Nothing would make another stream wait for them, nor a replay compute them again."""
    x, readers = torch.ones(3, device="cuda"), [Reader() for _ in range(5)]
    readers[0](x), readers[1](x)
    assert Reader.computed == 1
    with torch.cuda.stream(torch.cuda.Stream()):
        readers[2](x)
    assert Reader.computed == 2
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = readers[3](x) + readers[4](x)
    assert Reader.computed == 4
    for value in (2.0, 3.0):
        x.fill_(value)
        captured.replay()
        assert float(y) == 6 * value


# Layers.


class Attention(nn.Module):
    """Three layers read one input, a fourth what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(K, K) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Twice(Attention):
    """One layer, called twice on one tensor, and one that is called between."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) * self.q(x)) + self.v(x)


@contextmanager
def unshared() -> Iterator[None]:
    """Without the cache: each layer quantizes and observes for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp4pass.nn.input_cache._is_tracked", lambda x: False)
        yield


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """The inputs that are quantized."""
    seen: list[Tensor] = []
    quantize = linear_module.quantize_input

    def watch(x: Tensor, *how: Any) -> Any:
        seen.append(x)
        return quantize(x, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "quantize_input", watch)
        yield seen


def batch(i: int = 0) -> Tensor:
    return torch.randn(2, 6, K, generator=torch.Generator().manual_seed(i))


def converted(make: Callable[[], nn.Module] = Attention, fmt: str = "nvfp4", **options: Any) -> Any:
    """Converted, with a static scale if `static`."""
    torch.manual_seed(0)
    model = make().eval()
    if options.pop("static", False):
        fp4pass.prepare(model, "naive")
        with unshared(), torch.no_grad():
            model(batch(9))
    return fp4pass.convert(model, fmt, "naive", **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"static": True},
    "mxfp4": {"fmt": "mxfp4"},
    "rotated": {"rotation": 32},
    "rotated weights only": {"rotation": 32, "weight_only": True},
    "searched": {"activation_scales": "sse"},
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of an input and of all biases, and the output."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [Attention, Twice])
def test_layers_compute_the_same_bits(make: type[nn.Module]) -> None:
    for name, options in OPTIONS.items():
        models = [converted(make, **options) for _ in range(2)]
        for i in (0, 0, 1):
            with torch.no_grad():
                got = models[0](batch(i))
                with unshared():
                    expected = models[1](batch(i))
            assert torch.equal(got, expected), name
        found = gradients(models[0], batch(2))
        with unshared():
            wanted = gradients(models[1], batch(2))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


@pytest.mark.core
def test_layers_with_other_options_do_not_share() -> None:
    rules = [("k", {"fmt": "mxfp4"}), ("v", {"activation_scales": "sse"})]
    model = converted(rules=rules)
    with unshared():
        expected = model(batch())
    with counted() as seen:
        assert torch.equal(model(batch()), expected)
    assert len(seen) == 4
    with counted() as seen:
        converted()(batch())
    assert len(seen) == 2


@pytest.mark.core
def test_a_static_scale_is_shared_only_while_it_is_one_tensor() -> None:
    model = converted(static=True)
    for change, inputs in (
        (lambda: None, 2),
        (lambda: model.k.input_global_scale.mul_(4), 2),
        (lambda: setattr(model.k, "input_global_scale", model.k.input_global_scale * 4), 3),
    ):
        change()
        with unshared():
            expected = model(batch())
        with counted() as seen:
            assert torch.equal(model(batch()), expected)
        assert len(seen) == inputs


def test_copies_and_pickles_have_nothing_of_it() -> None:
    model, x = converted(), batch()
    before = set(vars(model.q))
    expected = model(x)
    assert set(vars(model.q)) == before
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        other.q.bias = nn.Parameter(model.q.bias + 1)
        assert not torch.equal(other(x), expected) and torch.equal(model(x), expected)


def test_graphs_have_nothing_of_what_was_computed_before() -> None:
    """A result that is a constant of a graph would be that of the first input for ever."""
    model, x = converted(fmt="mxfp4"), batch()
    with torch.no_grad():
        model.q(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
        made = make_fx(model)(x)
        program = torch.export.export(model, (x,), strict=False).module()
        for run in (compiled, made, program):
            assert torch.equal(run(batch(1)), model(batch(1)))
    graph = made.graph.find_nodes(op="call_function", target=torch.ops.fp4pass.quantize.default)
    assert len(graph) == 4
    torch.compiler.reset()


def test_models_quantize_and_observe_every_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    # Linear layers of two blocks, and the inputs that they read.
    layers, inputs = 14, 8
    model = next(case.build() for case in zoo.CASES if case.name == "llama")
    observed: list[Tensor] = []
    observe = observer_module.ops.observe
    monkeypatch.setattr(
        observer_module.ops, "observe", lambda x, *state: observed.append(x) or observe(x, *state)
    )

    def run() -> Tensor:
        return zoo.tensor_of(model(input_ids=tokens() % 96))

    fp4pass.prepare(model, "hessian")
    with torch.no_grad():
        run(), run()
        assert len(observed) == 2 * inputs
        fp4pass.convert(model, "nvfp4", "naive")
        with unshared(), counted() as seen:
            expected = run()
        assert len(seen) == layers
        with counted() as seen:
            got = run()
        assert len(seen) == inputs
        assert torch.equal(got, expected)
        with torch.inference_mode(), counted() as seen:
            assert torch.equal(run(), expected)
        assert len(seen) == layers


def test_no_value_outlives_a_forward() -> None:
    """Between models, forwards, layers without one of their model: after a write it is computed."""
    one, other = converted(), converted()
    for first, second in ((one, other), (one, one), (one.q, one.k), (one, one.k)):
        x = batch()
        with torch.no_grad():
            first(x)
            x.data.copy_(100 * batch(1))
            assert torch.equal(second(x), second(x.clone()))


@pytest.mark.core
def test_no_value_outlives_a_forward_that_fails() -> None:
    class Failing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            self.q(x)
            raise ValueError

    model, x = converted(Failing), batch()
    with pytest.raises(ValueError):
        model(x)
    x.data.mul_(2)
    assert torch.equal(model.k(x), model.k(x.clone()))


def test_what_reads_no_quantized_input_has_no_hooks() -> None:
    model = converted(weight_only=True, static=True)
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert not any("called_by" in key for key in vars(model.q))
