"""Layers in the place of nn.Linear: what they compute, keep and load."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from layers import (
    CODEBOOKS,
    DTYPES,
    FORMATS,
    KINDS,
    K,
    N,
    assert_same_layer,
    batch,
    empty,
    linear,
    made,
    seeded,
)
from small_models import bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fp4pass
import fp4pass.nn
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError, StateError
from fp4pass.nn import QUANT_TYPES, Linear4bit, Linear8bitLt
from fp4pass.packed_linear import become

every_kind = pytest.mark.parametrize("kind", KINDS)
one_of_each = pytest.mark.parametrize("kind", ["nf4", "nvfp4", "mxfp4", "int8"])


@pytest.mark.parametrize("kind", QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_four_bits_are_a_linear_on_the_dense_weight(
    kind: str, dtype: torch.dtype, bias: bool
) -> None:
    layer, source = made(kind, dtype=dtype, bias=bias), linear(dtype=dtype, bias=bias)
    assert layer.weight.dtype == dtype and layer.weight.shape == (N, K)
    assert torch.equal(layer.weight, fp4pass.dequantize(fp4pass.quantize(source.weight, kind)))
    error = (layer.weight - source.weight).norm() / source.weight.norm()
    assert float(error.detach()) < 0.15
    for shape in ((2, 5), (1,), (0,)):
        x = batch(*shape).to(dtype)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer(batch(1)[0].to(dtype)), layer(batch(1).to(dtype))[0])


@every_kind
def test_until_it_is_quantized_it_is_an_nn_linear(kind: str) -> None:
    layer, source = empty(kind), linear()
    layer.load_state_dict(source.state_dict())
    x = batch().requires_grad_()
    y = layer(x)
    assert isinstance(layer, nn.Linear) and torch.equal(y, source(x))
    y.sum().backward()
    assert layer.weight.grad is not None and "not quantized" in repr(layer)
    layer.quantize_weight()
    assert ", quantized" in repr(layer) and [n for n, _ in layer.named_parameters()] == ["bias"]
    assert_same_layer(layer, made(kind))


@every_kind
def test_gradients_are_those_of_the_dense_weight(kind: str) -> None:
    layer = made(kind)
    dense = nn.Linear(K, N)
    dense.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x, twin = batch().requires_grad_(), batch().requires_grad_()
    grad = torch.randn(2, 5, N, generator=seeded(3))
    layer(x).backward(grad)
    dense(twin).backward(grad)
    assert torch.equal(x.grad, twin.grad)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("columns", [1, 37])
def test_blocks_of_a_codebook_take_any_width(kind: str, columns: int) -> None:
    layer, x = made(kind, columns), batch(columns=columns).requires_grad_()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 5, columns))


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_a_format_are_whole_blocks(kind: str) -> None:
    with pytest.raises(ShapeError, match=r"in_features=37 is not a multiple of (16|32).*'nf4'"):
        Linear4bit(37, N, quant_type=kind)
    layer = Linear4bit(48, N, quant_type=kind, block_size=16)
    with pytest.raises(ShapeError, match=f"multiple of 32 .the block of {kind}"):
        layer.quantize_weight(32)
    layer.quantize_weight()
    assert layer.scheme.block == 16 and layer.weight_scale.shape == (N, 3)


@pytest.mark.parametrize("kind, bits_each", [("nf4", 4.5), ("nvfp4", 4.5), ("mxfp4", 4.25)])
def test_the_weight_takes_four_bits(kind: str, bits_each: float) -> None:
    layer = Linear4bit.from_linear(nn.Linear(1024, 1024, bias=False), kind)
    stored = sum(tensor.nbytes for tensor in layer.state_dict().values())
    # The table of a codebook, or a global scale.
    assert 0 <= stored - 1024 * 1024 * bits_each / 8 <= 64
    assert not list(layer.parameters())


def test_the_block_can_be_chosen() -> None:
    layer = Linear4bit(K, N, quant_type="fp4", block_size=128)
    layer.load_state_dict(linear().state_dict())
    coarse, fine = copy.deepcopy(layer), copy.deepcopy(layer)
    coarse.quantize_weight()
    fine.quantize_weight(32)
    assert (len(coarse.weight_absmax), len(fine.weight_absmax)) == (N * K // 128, N * K // 32)
    assert "block_size=32" in repr(fine)


def test_compute_dtype_is_that_of_the_product() -> None:
    layer = Linear4bit.from_linear(linear(), "nf4", compute_dtype=torch.bfloat16)
    x = batch()
    wanted = F.linear(x.bfloat16(), layer._decode(torch.bfloat16), layer.bias.bfloat16())
    assert torch.equal(layer(x), wanted.float())


@every_kind
def test_autocast_decides_the_dtype(kind: str) -> None:
    layer, x = made(kind), batch()
    with torch.autocast("cpu", torch.bfloat16):
        y, wide = layer(x), layer(x.double())
    assert y.dtype == torch.bfloat16 and wide.dtype == torch.float64
    assert torch.equal(y, layer(x.bfloat16()))


@one_of_each
def test_one_graph_and_no_storm_of_recompilations(kind: str) -> None:
    torch.compiler.reset()
    layer, counter = made(kind), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (4, 7, 9, 33, 64):
        assert torch.equal(compiled(batch(rows)), layer(batch(rows)))
    # One for the first shape, one for all others.
    assert counter.frame_count == 2


@one_of_each
def test_gradients_of_a_compiled_layer(kind: str) -> None:
    model = nn.Sequential(made(kind), nn.SiLU())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = batch().requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@one_of_each
def test_inductor_gives_the_same(kind: str) -> None:
    torch.compiler.reset()
    layer, x = made(kind), batch()
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_operators_are_registered_whole() -> None:
    ops, x = torch.ops.fp4pass, batch(3, columns=37).requires_grad_()
    nf4, int8 = made("nf4", 37), made("int8", 37)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for bias in (nf4.bias, None):
        arguments = (x, nf4.weight_packed, nf4.weight_absmax, bias, N, "nf4")
        torch.library.opcheck(ops.linear_codebook.default, arguments, test_utils=checks)
        for threshold in (0.0, 1.0):
            stored = (int8.weight_codes, int8.weight_scale, bias, threshold)
            torch.library.opcheck(ops.linear_int8.default, (x, *stored), test_utils=checks)
    with pytest.raises(DtypeError, match="int64"):
        nf4(torch.ones(3, 37, dtype=torch.int64))
    with pytest.raises(DtypeError, match="int64"):
        int8(torch.ones(3, 37, dtype=torch.int64))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
        "Missing key": (made("nf4"), linear().state_dict()),
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
    become(layer, nn.Linear, weight=nn.Parameter(weight))
    assert type(layer) is nn.Linear and vars(layer).keys() == vars(dense).keys()
    assert list(layer.state_dict()) == ["weight", "bias"] and layer.bias is bias
    assert torch.equal(layer(batch()), F.linear(batch(), weight, bias)) and calls == [1]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_is_kept_as_in_a_converted_linear(kind: str) -> None:
    converted = fp4pass.convert(linear(), kind, "sse", weight_only=True)
    layer = empty(kind)
    layer.load_state_dict(converted.state_dict())
    assert torch.equal(layer(batch()), converted(batch()))
    assert_same_layer(layer, made(kind))


@every_kind
@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float16),
        lambda m: m.bfloat16().float(),
        lambda m: m.train().eval(),
        lambda m: m.share_memory(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
)
def test_nothing_changes_the_stored_bits(kind: str, move: Any) -> None:
    layer = made(kind)
    before = copy.deepcopy(layer)
    after = move(layer)
    for name, tensor in before.named_buffers():
        assert after.get_buffer(name).dtype == tensor.dtype
        assert torch.equal(bits(tensor), bits(after.get_buffer(name)))
    x = batch().to(after.bias.dtype)
    assert after(x).dtype == after.weight.dtype == x.dtype
    if before.bias.equal(after.bias):
        assert torch.equal(after(x), before(x))


@every_kind
def test_layers_go_to_meta_and_come_back(kind: str) -> None:
    layer = made(kind)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.is_meta and meta(batch().to("meta")).shape == (2, 5, N)
    back = meta.to_empty(device="cpu")
    back.load_state_dict(layer.state_dict())
    assert_same_layer(layer, back)


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


@every_kind
def test_the_weight_is_read_only(kind: str) -> None:
    layer = made(kind)
    with pytest.raises(AttributeError):
        layer.weight = torch.zeros(N, K)
    with pytest.raises(KeyError):
        layer.weight = nn.Parameter(torch.zeros(N, K))


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(OptionError, match=r"'nf5' does not exist. Did you mean 'nf4'"):
        Linear4bit(K, N, quant_type="nf5")
    with pytest.raises(OptionError, match="'nf8' does not exist"):
        Linear4bit(K, N, quant_type="nf8")
    with pytest.raises(OptionError, match="no block of 48"):
        Linear4bit(K, N, block_size=48)
    with pytest.raises(OptionError, match=r"compute_dtype is torch.int8"):
        Linear4bit(K, N, compute_dtype=torch.int8)
    with pytest.raises(OptionError, match="threshold=-1"):
        Linear8bitLt(K, N, threshold=-1)
    with pytest.raises(OptionError, match=r"Expected an nn.Linear, got Conv2d"):
        Linear4bit.from_linear(nn.Conv2d(3, 3, 3))
    for kind in ("nf4", "nvfp4", "int8"):
        with pytest.raises(StateError, match="quantized already"):
            made(kind).quantize_weight()
        with pytest.raises(StateError, match="meta device"):
            empty(kind, device="meta").quantize_weight()
        with pytest.raises(ShapeError, match=r"of shape \[\.\.\., 96\], got \(3, 32\)"):
            made(kind)(torch.ones(3, 32))
        broken = empty(kind)
        with torch.no_grad():
            broken.weight[3, 3] = float("nan")
        with pytest.raises(NonFiniteError):
            broken.quantize_weight()
        assert not broken.is_quantized and broken.weight.shape == (N, K)


@every_kind
def test_what_comes_out_can_be_changed_in_place(kind: str) -> None:
    layer, x = made(kind), batch(2, 5).requires_grad_()
    expected = layer(x).relu()
    found = layer(x).relu_()
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    assert torch.equal(*grads)
