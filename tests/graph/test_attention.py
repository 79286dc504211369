"""Attention of few queries in graphs: what is fused, with what before it, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from post_grad import calls, compiled, fresh
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fp4pass.graph.inductor.attention import fuse_attention, fuse_rotary

aten = torch.ops.aten
LAYERS = 2


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    counters.clear()
    with fresh(), torch.no_grad():
        yield


class Fused:
    """A change that runs both passes as on a GPU, twice, and counts."""

    def __init__(self) -> None:
        self.attention = self.rotary = 0
        self.calls: dict[str, int] = {}
        self.targets: list[Any] = []
        self.copies: list[fx.Node] = []
        self.places: list[Tensor] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, graph: fx.Graph) -> None:
        self.attention += fuse_attention(graph, lambda node: True)
        self.rotary += fuse_rotary(graph, lambda node: True)
        assert fuse_attention(graph, lambda node: True) == 0
        assert fuse_rotary(graph, lambda node: True) == 0
        self.calls = dict(calls(graph))
        self.targets = [node.target for node in graph.nodes]
        self.copies = [node for node in graph.nodes if node.target is aten.clone.default]
        called = graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
        )
        self.places = [n.kwargs["places"].meta["val"] for n in called if "places" in n.kwargs]
        read = (each for n in called for each in n.kwargs.values() if isinstance(each, fx.Node))
        self.shapes = {tuple(each.meta["val"].shape) for each in read}
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("fp4pass."):
                found = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
                expected = node.meta["val"]
                if isinstance(found, Tensor):
                    found, expected = (found,), (expected,)
                for a, b in zip(found, expected, strict=True):
                    assert a.shape == b.shape and a.stride() == b.stride()


def decoder(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, vocab_size=50)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        # The weights of norms too.
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def decode(model: Any, change: Callable[[fx.Graph], Any] | None, rows: int = 2) -> Tensor:
    """Logits of three steps behind a prompt of five tokens, in a cache of 12; None: eager."""
    import caches
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=12)
    ids = torch.arange(rows * 8).view(rows, 8) % 50

    def step(token: Tensor, position: Tensor) -> Tensor:
        options = {**caches.given(cache), "position_ids": position[None]}
        return model(token, cache_position=position, **options).logits

    step(ids[:, :5], torch.arange(5))
    run = step if change is None else compiled(step, change)
    return torch.stack([run(ids[:, i : i + 1], torch.tensor([i])) for i in range(5, 8)])


# Whether heads are normed, rotated and written in one call: not Gemma's norm, or half a rotation.
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "rotary", "changes"),
    [
        ("qwen3", LAYERS, {}),
        ("llama", LAYERS, {}),
        pytest.param("llama", LAYERS, {"num_key_value_heads": 4}, marks=pytest.mark.slow),
        ("gemma3_text", 0, {"sliding_window": 6}),
        pytest.param(
            *("phi3", 0, {"partial_rotary_factor": 0.5, "pad_token_id": 0}), marks=pytest.mark.slow
        ),
    ],
)
def test_steps_of_decoders_read_their_cache_in_place(
    kind: str, rotary: int, changes: dict[str, Any]
) -> None:
    model = decoder(kind, torch.float32, **changes)
    change = Fused()
    found, expected = decode(model, change), decode(model, None)
    # A window that is full makes another graph.
    graphs = 2 if "sliding_window" in changes else 1
    assert (change.attention, change.rotary) == (LAYERS * graphs, rotary)
    assert change.calls.get("attention", 0) == LAYERS - rotary
    # The cache is written in place.
    assert not counters["inductor"]["possible_missed_reinplacing_opportunities"]
    # A mask is looked at once, and there are no copies of keys or values.
    assert change.calls["attention_span"] == 1
    assert aten.index_put.default not in change.targets or not rotary
    assert aten._scaled_dot_product_flash_attention_for_cpu.default not in change.targets
    assert all(node.meta["val"].ndim < 5 for node in change.copies)
    # Counters are read as they are, where there is no window.
    counted = [each.ndim == 0 for each in change.places]
    assert bool(counted) == bool(rotary)
    assert all(counted) or "sliding_window" in changes
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_norm_with_weights_for_each_head_stays_before_the_call() -> None:
    model = decoder("qwen3", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight = torch.nn.Parameter(torch.randn(4, 16))
    change = Fused()
    found, expected = decode(model, change), decode(model, None)
    assert change.rotary == LAYERS and (16,) in change.shapes and (4, 16) not in change.shapes
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def tensors(heads: int = 4, groups: int = 2, queries: int = 1, size: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, 16), (2, groups, size, 16), (2, groups, size, 16)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def repeated(x: Tensor, count: int) -> Tensor:
    batch, groups, size, width = x.shape
    return x[:, :, None].expand(batch, groups, count, size, width).reshape(batch, -1, size, width)


MASK = (torch.arange(20) < 13)[None, None, None]
BIAS = torch.randn(2, 4, 1, 20, generator=torch.Generator().manual_seed(1))

FUSED: dict[str, Callable[..., Tensor]] = {
    "a bool mask": lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2), MASK),
    "a mask that is added": lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2), BIAS),
    "another scale": lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2), MASK, scale=0.3),
    "a result that is transposed": lambda q, k, v: (
        attend(q, repeated(k, 2), repeated(v, 2), MASK).transpose(1, 2).reshape(2, 1, 64)
    ),
}


@pytest.mark.quick(2)
@pytest.mark.core
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    arguments, change = tensors(), Fused()
    found = compiled(FUSED[name], change)(*arguments)
    assert change.attention == 1
    expected = FUSED[name](*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found.stride() == expected.stride()


def many(queries: int, heads: int) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.repeat(1, heads // 4, queries, 1)
        return attend(q, repeated(k, heads // 2), repeated(v, heads // 2), MASK)

    return run


UNFUSED: dict[str, Callable[..., Any]] = {
    "no mask": lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2)),
    "causal": lambda q, k, v: attend(q, repeated(k, 2), repeated(v, 2), is_causal=True),
    "17 queries": many(17, 4),
    "many rows": many(16, 128),
}


@pytest.mark.quick(2)
@pytest.mark.core
@pytest.mark.parametrize("name", UNFUSED)
def test_not_fused(name: str) -> None:
    change = Fused()
    compiled(UNFUSED[name], change)(*tensors())
    assert change.attention == 0


def test_a_graph_with_gradients_is_left() -> None:
    change = Fused()
    with torch.enable_grad():
        arguments = [each.requires_grad_() for each in tensors()]
        compiled(FUSED["a bool mask"], change)(*arguments).sum().backward()
    assert change.attention == 0 and arguments[0].grad is not None


def other_copies(k: Tensor) -> Tensor:
    """Heads in another order: each one of k, then each again."""
    return k[:, None].expand(2, 2, 2, 20, 16).reshape(2, 4, 20, 16)


@pytest.mark.core
def test_heads_that_are_copied_in_another_order_keep_their_copies() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, other_copies(k), other_copies(v), MASK)

    change = Fused()
    found = compiled(run, change)(*tensors())
    assert change.attention == 1
    torch.testing.assert_close(found, run(*tensors()), rtol=1e-5, atol=1e-6)


# How PyTorch calls attention with a mask on a GPU: the mask is a bias, padded for its strides.
def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grad: bool = False) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, grad)[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grad: bool = False) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, grad)[0]


def padded(mask: Tensor) -> Tensor:
    bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    return F.pad(bias, (0, 12))[..., :20].expand(2, 4, 1, 20)


def lowered(mask: Tensor) -> Tensor:
    """What stands for -inf before cuDNN."""
    return torch.where(mask, 0.0, -65536.0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("attention", "bias"), [(efficient, padded), (cudnn, lowered)])
def test_calls_of_a_gpu(
    attention: Callable[..., Tensor], bias: Callable[..., Tensor], grad: bool
) -> None:
    """Traced without a GPU."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, repeated(k, 2), repeated(v, 2), bias(mask), grad)

    arguments = [*tensors(), MASK]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in arguments]
        traced = make_fx(run, decomposition_table=select_decomp_table())(*fake)
    compile_fx.view_to_reshape(traced)
    traced.graph.eliminate_dead_code()
    change = Fused()
    change(traced.graph)
    assert change.attention == (not grad)
    if not grad:
        assert aten.where.self not in change.targets
        traced.recompile()
        q, k, v, mask = arguments
        expected = attend(q, repeated(k, 2), repeated(v, 2), mask)
        torch.testing.assert_close(traced(*arguments), expected, rtol=1e-5, atol=1e-6)
