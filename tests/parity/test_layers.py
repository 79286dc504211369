"""Linear4bit and Linear8bitLt: what they compute, keep and load."""

from __future__ import annotations

import copy

import pytest
import torch
from layers import (
    CODEBOOKS,
    DTYPES,
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
from products import assert_product
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fp4pass
import fp4pass.parity
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError, StateError
from fp4pass.parity import QUANT_TYPES, Linear4bit, Linear8bitLt

every_kind = pytest.mark.parametrize("kind", KINDS)
# A codebook, formats with float8 scales and without, and integers.
ONE_OF_EACH = ["nf4", "nvfp4", "mxfp4", "int8"]
one_of_each = pytest.mark.parametrize("kind", ONE_OF_EACH)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "dtype", "bias"),
    [
        *((kind, torch.float32, True) for kind in QUANT_TYPES),
        *((kind, dtype, False) for kind in ("nf4", "nvfp4") for dtype in DTYPES),
        ("mxfp4", torch.bfloat16, True),
    ],
    ids=str,
)
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
        assert_product(layer(x), x, layer.weight, layer.bias)
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


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_that_of_the_linear(training: bool) -> None:
    source = linear().train(training)
    for kind in (Linear4bit, Linear8bitLt):
        assert kind.from_linear(source).training == training


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
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


def test_layers_do_not_share_their_table() -> None:
    layer = made("nf4")
    layer.weight_codebook.zero_()
    assert made("nf4").weight_codebook.any()


def test_compute_dtype_is_that_of_the_product() -> None:
    layer = Linear4bit.from_linear(linear(), "nf4", compute_dtype=torch.bfloat16)
    x = batch()
    wanted = F.linear(x.bfloat16(), layer._decode(torch.bfloat16), layer.bias.bfloat16())
    assert torch.equal(layer(x), wanted.float())


@one_of_each
def test_autocast_decides_the_dtype(kind: str) -> None:
    layer, x = made(kind), batch()
    with torch.autocast("cpu", torch.bfloat16):
        y, wide = layer(x), layer(x.double())
    assert y.dtype == torch.bfloat16 and wide.dtype == torch.float64
    assert torch.equal(y, layer(x.bfloat16()))


@one_of_each
def test_a_compiled_layer_is_one_graph_for_every_number_of_rows(kind: str) -> None:
    torch.compiler.reset()
    layer, counter = made(kind), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (4, 7, 9, 33, 64):
        assert torch.equal(compiled(batch(rows)), layer(batch(rows)))
    # One for the first shape, one for all others.
    assert counter.frame_count == 2


@one_of_each
def test_gradients_of_a_compiled_layer(kind: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(made(kind), nn.SiLU())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = batch().requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.slow
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


@pytest.mark.core
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "nvint4"])
def test_a_format_is_kept_as_in_a_quantized_linear(kind: str) -> None:
    converted = fp4pass.convert(linear(), kind, "sse", weight_only=True)
    layer = empty(kind)
    layer.load_state_dict(converted.state_dict())
    assert torch.equal(layer(batch()), converted(batch()))
    assert_same_layer(layer, made(kind))


@every_kind
def test_the_weight_is_read_only(kind: str) -> None:
    layer = made(kind)
    with pytest.raises(StateError):
        layer.weight = torch.zeros(N, K)
    with pytest.raises(StateError):
        layer.weight = nn.Parameter(torch.zeros(N, K))


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(OptionError, match=r"'nf5' does not exist. Did you mean 'nf4'"):
        Linear4bit(K, N, quant_type="nf5")
    with pytest.raises(OptionError, match="'nf8' does not exist"):
        Linear4bit(K, N, quant_type="nf8")
    with pytest.raises(OptionError, match="no block of 48"):
        Linear4bit(K, N, block_size=48)
    with pytest.raises(OptionError, match=r"compute_dtype: expected one of .*got torch.int8"):
        Linear4bit(K, N, compute_dtype=torch.int8)
    with pytest.raises(OptionError, match=r"threshold: expected 0 .*got -1"):
        Linear8bitLt(K, N, threshold=-1)
    with pytest.raises(OptionError, match=r"Expected an nn.Linear, got Conv2d"):
        Linear4bit.from_linear(nn.Conv2d(3, 3, 3))
    for kind in ("nf4", "nvfp4", "int8"):
        with pytest.raises(StateError, match="quantized already"):
            made(kind).quantize_weight()
        with pytest.raises(StateError, match="meta device"):
            empty(kind, device="meta").quantize_weight()
        with pytest.raises(ShapeError, match=r"shape \[\.\.\., 96\], got \(3, 32\)"):
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
