"""Packed buffers of a layer: they move, pickle and load without a changed bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from layers import KINDS, N, assert_same_layer, batch, empty, linear, made
from small_models import bits
from torch import Tensor, nn
from torch.nn import functional as F

from fp4pass.nn.packed_linear import swap_class

every_kind = pytest.mark.parametrize("kind", KINDS)
one_of_each = pytest.mark.parametrize("kind", ["nf4", "nvfp4", "mxfp4", "int8"])

MOVES = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "device-and-dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float16),
    "there-and-back": lambda m: m.bfloat16().float(),
    "train": lambda m: m.train().eval(),
    "shared-memory": lambda m: m.share_memory(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@one_of_each
@pytest.mark.parametrize("move", MOVES)
def test_no_move_changes_the_packed_buffers(kind: str, move: str) -> None:
    layer = made(kind)
    before = copy.deepcopy(layer)
    after: Any = MOVES[move](layer)
    for name, tensor in before.named_buffers():
        assert after.get_buffer(name).dtype == tensor.dtype
        assert torch.equal(bits(tensor), bits(after.get_buffer(name)))
    x = batch().to(after.bias.dtype)
    assert after(x).dtype == after.weight.dtype == x.dtype
    if before.bias.equal(after.bias):
        assert torch.equal(after(x), before(x))


def test_other_buffers_are_cast() -> None:
    layer = made("nvfp4")
    layer.register_buffer("mask", torch.ones(N))
    assert layer.half().mask.dtype == torch.float16
    assert pickle.loads(pickle.dumps(layer)).mask.dtype == torch.float16


@pytest.mark.core
@one_of_each
def test_layers_go_to_meta_and_come_back(kind: str) -> None:
    layer = made(kind)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.is_meta and meta(batch().to("meta")).shape == (2, 5, N)
    back = meta.to_empty(device="cpu")
    back.load_state_dict(layer.state_dict())
    assert_same_layer(layer, back)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer_has_its_buffers_while_it_moves(is_compiled: bool) -> None:
    """Another thread may run it."""
    layer = made("nvfp4")
    run = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    expected, found = run(batch()), []

    def move(tensor: Tensor) -> Tensor:
        found.append(run(batch()))
        return tensor.clone()

    layer._apply(move)
    assert len(found) > 2 and all(torch.equal(each, expected) for each in found)


def test_a_move_that_fails_loses_nothing() -> None:
    layer = made("nvfp4")
    before = copy.deepcopy(layer)

    def fails(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float32:
            raise RuntimeError("out of memory")
        return tensor.clone()

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(fails)
    assert_same_layer(before, layer)


@pytest.mark.core
@pytest.mark.parametrize(
    "kind, dtype", [*((kind, torch.float32) for kind in KINDS), ("nvfp4", torch.bfloat16)], ids=str
)
def test_a_state_dict_makes_a_new_layer_quantized(kind: str, dtype: torch.dtype) -> None:
    layer, fresh = made(kind, dtype=dtype), empty(kind, dtype=dtype)
    state = layer.state_dict()
    assert not any(t.requires_grad for t in state.values()) and "weight" not in state
    fresh.load_state_dict(state)
    x = batch().to(dtype)
    assert fresh.is_quantized and fresh.weight.dtype == dtype
    assert torch.equal(fresh(x), layer(x))
    again = made(kind, dtype=dtype, scale=3.0)
    again.load_state_dict(state)
    assert torch.equal(again(x), layer(x))
    waiting = empty(kind, dtype=dtype, device="meta")
    waiting.load_state_dict(state, assign=True)
    assert torch.equal(waiting(x), layer(x))


def test_a_state_dict_of_another_layer_is_refused() -> None:
    nf4, mxfp4 = made("nf4").state_dict(), made("mxfp4").state_dict()
    codes = {"weight_packed": mxfp4["weight_packed"]}
    cases = {
        "expected weight_codebook to be fp4": (empty("fp4"), nf4),
        r"weight_absmax of \(30,\) .*got \(60,\)": (empty("nf4", block_size=128), nf4),
        r"weight_packed of \(40, 48\) torch.uint8, got \(1920,\)": (made("nvfp4"), nf4),
        r"weight_scale of \(40, 6\) torch.float8_e4m3fn, got \(40, 3\)": (made("nvfp4"), mxfp4),
        "expected weight_scale, weight_global_scale beside": (empty("nvfp4"), codes),
        "expected packed buffers, got a dense weight": (made("nf4"), linear().state_dict()),
    }
    for message, (layer, state) in cases.items():
        before = copy.deepcopy(layer)
        with pytest.raises(RuntimeError, match=message):
            nn.Sequential(layer).load_state_dict({f"0.{n}": t for n, t in state.items()})
        assert_same_layer(layer, before)
        assert layer.is_quantized == before.is_quantized
    with pytest.raises(RuntimeError, match=r"0 \(in_features=96.*nvfp4"):
        nn.Sequential(empty("nvfp4")).load_state_dict({"0.weight_packed": torch.zeros(3)})
    # Bits of the right shape would be cast, and be other numbers.
    as_bits = made("nvfp4").state_dict()
    as_bits["weight_scale"] = as_bits["weight_scale"].view(torch.uint8)
    with pytest.raises(RuntimeError, match=r"got .* torch.uint8"):
        made("nvfp4").load_state_dict(as_bits)


def test_a_quantized_layer_loads_the_shards_of_a_state_dict() -> None:
    layer, other = made("nvfp4"), made("nvfp4", scale=3.0)
    for name, tensor in layer.state_dict().items():
        other.load_state_dict({name: tensor}, strict=False)
    assert_same_layer(layer, other)


@every_kind
def test_a_packed_layer_becomes_dense_again(kind: str) -> None:
    layer, dense = made(kind), linear()
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    bias, weight = layer.bias, layer.weight
    swap_class(layer, nn.Linear, weight=nn.Parameter(weight))
    assert type(layer) is nn.Linear and vars(layer).keys() == vars(dense).keys()
    assert list(layer.state_dict()) == ["weight", "bias"] and layer.bias is bias
    assert torch.equal(layer(batch()), F.linear(batch(), weight, bias)) and calls == [1]
