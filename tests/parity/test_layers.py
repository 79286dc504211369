"""Linear4bit and Linear8bitLt: what they compute, keep, move and load."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from exact_products import assert_product
from layers import DTYPES, KINDS, K, N, batch, empty, linear, made, seeded
from small_models import bits
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fp4pass
import fp4pass.parity
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError, StateError
from fp4pass.parity import Linear4bit, Linear8bitLt

every_kind = pytest.mark.parametrize("kind", KINDS)
one_of_each = pytest.mark.parametrize("kind", ["nf4", "int8"])


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "dtype", "bias"),
    [
        *((kind, torch.float32, True) for kind in ("nf4", "fp4")),
        *(("nf4", dtype, False) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_four_bits_are_a_linear_on_the_dense_weight(
    kind: str, dtype: torch.dtype, bias: bool
) -> None:
    layer, source = made(kind, dtype=dtype, bias=bias), linear(dtype=dtype, bias=bias)
    assert isinstance(layer, nn.Linear) and layer.weight.dtype == dtype
    assert torch.equal(layer.weight, fp4pass.dequantize(fp4pass.quantize(source.weight, kind)))
    for shape in ((2, 5), (1,), (0,)):
        x = batch(*shape).to(dtype)
        assert_product(layer(x), x, layer.weight, layer.bias)


@pytest.mark.core
@every_kind
def test_gradients_are_those_of_the_dense_weight(kind: str) -> None:
    layer = made(kind)
    dense = nn.Linear(K, N)
    dense.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x, twin = batch().requires_grad_(), batch().requires_grad_()
    grad = torch.randn(2, 5, N, generator=seeded(3))
    # What comes out can be changed in place.
    layer(x).relu_().backward(grad)
    (dense(twin) * (layer(x) > 0)).backward(grad)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


def test_blocks_take_any_width_and_size() -> None:
    layer, x = made("nf4", 37), batch(columns=37).requires_grad_()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 5, 37))
    coarse = Linear4bit.from_linear(linear(), "fp4", block_size=128)
    assert len(coarse.weight_absmax) == N * K // 128 and "block_size=128" in repr(coarse)


def test_dtypes_of_the_product() -> None:
    layer = Linear4bit.from_linear(linear(), "nf4", compute_dtype=torch.bfloat16)
    x = batch()
    wanted = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(layer(x), wanted.float())
    for kind in ("nf4", "int8"):
        layer = made(kind)
        with torch.autocast("cpu", torch.bfloat16):
            y, wide = layer(x), layer(x.double())
        assert y.dtype == torch.bfloat16 and wide.dtype == torch.float64
        assert torch.equal(y, layer(x.bfloat16()))


@one_of_each
def test_a_compiled_layer_is_one_graph_for_every_number_of_rows(kind: str) -> None:
    torch.compiler.reset()
    layer, counter = made(kind), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (4, 7, 33):
        assert torch.equal(compiled(batch(rows)), layer(batch(rows)))
    # One for the first shape, one for all others.
    assert counter.frame_count == 2
    grads = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = batch().requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_operators_are_registered_whole() -> None:
    ops, x = torch.ops.fp4pass, batch(3, columns=37).requires_grad_()
    nf4, int8 = made("nf4", 37), made("int8", 37)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for bias in (nf4.bias, None):
        arguments = (x, nf4.weight_packed, nf4.weight_absmax, bias, N, "nf4")
        torch.library.opcheck(ops.linear_codebook.default, arguments, test_utils=checks)
        stored = (int8.weight_codes, int8.weight_scale, bias, 1.0)
        torch.library.opcheck(ops.linear_int8.default, (x, *stored), test_utils=checks)
    for layer in (nf4, int8):
        with pytest.raises(DtypeError, match="int64"):
            layer(torch.ones(3, 37, dtype=torch.int64))


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(OptionError, match=r"'nf5' does not exist. Did you mean 'nf4'"):
        Linear4bit(K, N, quant_type="nf5")
    with pytest.raises(OptionError, match="no block of 48"):
        Linear4bit(K, N, block_size=48)
    with pytest.raises(OptionError, match=r"threshold: expected 0 .*got -1"):
        Linear8bitLt(K, N, threshold=-1)
    with pytest.raises(OptionError, match=r"Expected an nn.Linear, got Conv2d"):
        Linear4bit.from_linear(nn.Conv2d(3, 3, 3))
    broken = linear()
    with torch.no_grad():
        broken.weight[3, 3] = float("nan")
    for kind in ("nf4", "int8"):
        with pytest.raises(ShapeError, match=r"shape \[\.\.\., 96\], got \(3, 32\)"):
            made(kind)(torch.ones(3, 32))
        with pytest.raises(StateError):
            made(kind).weight = nn.Parameter(torch.zeros(N, K))
        with pytest.raises(NonFiniteError):
            fp4pass.parity.swap(copy.deepcopy(broken), kind)
    for make in (Linear4bit.from_linear, Linear8bitLt.from_linear):
        with pytest.raises(NonFiniteError):
            make(broken)


MOVES = {
    "device-and-dtype": lambda m: m.to("cpu", torch.bfloat16),
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


@pytest.mark.core
@pytest.mark.parametrize(
    "kind, dtype", [*((kind, torch.float32) for kind in KINDS), ("nf4", torch.bfloat16)], ids=str
)
def test_a_new_layer_takes_a_state_dict(kind: str, dtype: torch.dtype) -> None:
    layer, x = made(kind, dtype=dtype), batch().to(dtype)
    state = layer.state_dict()
    assert not any(t.requires_grad for t in state.values()) and "weight" not in state
    for fresh in (empty(kind, dtype=dtype), made(kind, dtype=dtype, scale=3.0)):
        fresh.load_state_dict(state)
        assert fresh.weight.dtype == dtype and torch.equal(fresh(x), layer(x))
    waiting = empty(kind, dtype=dtype, device="meta")
    waiting.load_state_dict(state, assign=True)
    assert torch.equal(waiting(x), layer(x))


def test_a_state_dict_of_another_layer_is_refused() -> None:
    nf4 = made("nf4").state_dict()
    doubled = {**nf4, "weight_absmax": nf4["weight_absmax"].double()}
    cases = {
        r"0 \(in_features=96.*weight_absmax of \(30,\) .*got \(60,\)": (
            empty("nf4", block_size=128),
            nf4,
        ),
        r"weight_absmax of \(60,\) .*got .* torch.float64": (made("nf4"), doubled),
        "weight_codebook to be fp4, got another table": (made("fp4"), nf4),
        "expected packed buffers, got a dense weight": (made("nf4"), linear().state_dict()),
    }
    for message, (layer, state) in cases.items():
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(RuntimeError, match=message):
            nn.Sequential(layer).load_state_dict({f"0.{n}": t for n, t in state.items()})
        assert all(torch.equal(bits(t), bits(before[n])) for n, t in layer.state_dict().items())
