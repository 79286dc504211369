"""A converted linear by itself: what it computes, stores, moves, and what flows back through it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_products import assert_product
from nn.test_input_cache import Attention
from small_models import assert_same_bits, bits
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
import fp4pass.parity
from fp4pass.errors import DtypeError, StateError, TraceError
from fp4pass.nn.linear import INPUT_GLOBAL, QuantizedLinear

K, N = 64, 96
FORMATS = [("nvfp4", 16), ("nvfp4", 32), ("mxfp4", 32), ("mxfp4", 16)]

every_format = pytest.mark.parametrize("fmt, block", FORMATS)
both_ways = pytest.mark.parametrize("weight_only", [True, False])


def converted(
    fmt: str = "nvfp4",
    block: int | str = "default",
    *,
    weight_only: bool = True,
    bias: bool = True,
    static: bool = False,
    dtype: torch.dtype = torch.float32,
) -> QuantizedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    if static:
        fp4pass.prepare(linear)
        linear(batch().to(dtype))
    fp4pass.convert(linear, fmt, "naive", block=block, weight_only=weight_only)
    assert isinstance(linear, QuantizedLinear)
    return linear


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 5)), K, generator=torch.Generator().manual_seed(1))


def rounded(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """x as the linear quantizes it."""
    divisor = linear.input_global_scale
    if divisor is None and linear.weight_global_scale is not None:
        divisor = torch.ops.fp4pass.dynamic_global_scale(x, linear.config.format.key)
    packed, scale = torch.ops.fp4pass.quantize(x, divisor, linear.config.format.key)
    return torch.ops.fp4pass.dequantize(packed, scale, divisor, linear.config.format.key, x.dtype)


@pytest.mark.parametrize(
    ("fmt", "block", "dtype", "bias"),
    [
        ("nvfp4", 16, torch.bfloat16, True),
        ("nvfp4", 32, torch.float32, False),
        ("mxfp4", 32, torch.float16, True),
        ("mxfp4", 16, torch.float32, True),
    ],
)
def test_weight_only_is_a_linear_on_the_dense_weight(
    fmt: str, block: int, dtype: torch.dtype, bias: bool
) -> None:
    linear = converted(fmt, block, bias=bias, dtype=dtype)
    x = batch().to(dtype)
    assert linear.weight.dtype == dtype and linear.weight.shape == (N, K)
    assert_product(linear(x), x, linear.weight, linear.bias)


@every_format
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.core
def test_quantized_inputs_are_rounded_first(fmt: str, block: int, static: bool) -> None:
    linear = converted(fmt, block, weight_only=False, static=static)
    assert (linear.input_global_scale is not None) == (static and fmt == "nvfp4")
    for shape in ((2, 5), (1,), (), (0,)):
        x = batch(*shape) if shape else batch(1)[0]
        expected = F.linear(rounded(linear, x), linear.weight, linear.bias)
        assert torch.equal(linear(x), expected)


@both_ways
@pytest.mark.core
def test_the_gradient_is_that_of_the_dense_weight(weight_only: bool) -> None:
    linear = converted(weight_only=weight_only)
    x = batch().requires_grad_()
    y = linear(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(grad)
    assert torch.equal(x.grad, grad @ linear.weight)
    torch.testing.assert_close(linear.bias.grad, grad.sum((0, 1)))
    assert [name for name, _ in linear.named_parameters()] == ["bias"]


@pytest.mark.core
def test_conv1d_shows_its_weight_as_it_stored_it() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    conv = utils.Conv1D(N, K)
    dense = conv.weight.detach().clone()
    reference = nn.Linear(K, N)
    reference.weight, reference.bias = nn.Parameter(dense.t().contiguous()), conv.bias
    for model in (conv, reference):
        fp4pass.convert(model, method="sse", weight_only=True)
    assert torch.equal(conv.weight_packed, reference.weight_packed)
    assert torch.equal(bits(conv.weight_scale), bits(reference.weight_scale))
    assert conv.weight.shape == (K, N) and torch.equal(conv.weight, reference.weight.t())
    assert torch.equal(conv(batch()), reference(batch()))
    assert float((conv.weight - dense).norm() / dense.norm()) < 0.15


def test_the_weight_is_read_only() -> None:
    linear = converted()
    for weight in (torch.zeros(N, K), nn.Parameter(torch.zeros(N, K)), None):
        with pytest.raises(StateError, match="its weight is packed and cannot be set"):
            linear.weight = weight
    assert "weight" not in linear.state_dict()
    before = linear.weight
    nn.init.zeros_(linear.weight)
    assert torch.equal(linear.weight, before)


# They are deprecated, and warn of shapes that are compared.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@both_ways
def test_torch_jit(weight_only: bool) -> None:
    """It cannot record a float8 tensor's bits; what has none works."""
    linear, x = converted(weight_only=weight_only), batch()
    for call in (
        lambda: torch.jit.trace(linear, x),
        lambda: torch.onnx.export(nn.Sequential(linear), (x,), io.BytesIO(), dynamo=False),
    ):
        with pytest.raises(TraceError, match=r"cannot record the bits.*fp4pass\.trace"):
            call()
    plain = converted("mxfp4", weight_only=weight_only)
    traced = torch.jit.trace(plain, x)
    for other in (x, 2 * x.flip(0)):
        assert torch.equal(traced(other), plain(other))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.share_memory().train().eval(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
)
def test_nothing_changes_the_stored_bits(move: Callable[[Any], Any]) -> None:
    linear = converted(weight_only=False, static=True)
    before = copy.deepcopy(linear)
    after = move(linear)
    for name, tensor in before.named_buffers():
        assert after.get_buffer(name).dtype == tensor.dtype
        assert torch.equal(bits(after.get_buffer(name)), bits(tensor))
    x = batch().to(after.bias.dtype)
    assert after(x).dtype == x.dtype
    if x.dtype == torch.float32 and before.bias.equal(after.bias):
        assert torch.equal(after(x), before(x))


@pytest.mark.core
def test_models_go_to_meta_and_come_back() -> None:
    linear = converted(weight_only=False, static=True)
    state = linear.state_dict()
    meta = copy.deepcopy(linear).to("meta")
    assert meta.weight_packed.is_meta and meta.weight_scale.dtype == torch.float8_e4m3fn
    assert meta(torch.empty(3, K, device="meta")).shape == (3, N)
    back = meta.to_empty(device="cpu")
    back.load_state_dict(state)
    assert_same_bits(linear, back)
    assert torch.equal(back(batch()), linear(batch()))
    assigned = copy.deepcopy(linear).to("meta")
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(batch()), linear(batch()))


def test_autocast_decides_the_dtype() -> None:
    linear = converted()
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        wide = linear(x.double())
    assert y.dtype == torch.bfloat16 and wide.dtype == torch.float64
    weight = linear.weight.bfloat16()
    assert torch.equal(y, F.linear(x.bfloat16(), weight, linear.bias.bfloat16()))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_float16_inputs_may_round_beyond_float16(fmt: str) -> None:
    """60000 rounds to 65536 in a block, which float16 cannot hold but its product can."""
    layer = nn.Linear(32, 8, bias=False).half()
    nn.init.constant_(layer.weight, 2.0**-6)
    fp4pass.convert(layer, fmt, "sse")
    x = torch.zeros(1, 32, dtype=torch.float16)
    x[0, 0] = 60000
    y = layer(x)
    assert y.dtype == torch.float16 and y.isfinite().all() and (y > 900).all()


def test_a_move_that_fails_loses_nothing() -> None:
    model = fp4pass.convert(nn.Linear(64, 64), "nvfp4", method="sse")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fails(stop: int) -> Any:
        calls = iter(range(9))

        def move(tensor: Tensor) -> Tensor:
            if next(calls) == stop:
                raise RuntimeError("out of memory")
            return tensor.clone()

        return move

    # The three stored tensors and the bias: each moves once, so there is no fifth call to fail.
    model._apply(fails(4))
    for stop in range(4):
        with pytest.raises(RuntimeError, match="out of memory"):
            model._apply(fails(stop))
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(bits(each), bits(before[name])) for name, each in after.items())


@both_ways
@pytest.mark.parametrize("shape", [(K,), (2, 5, K)], ids=str)
def test_what_comes_out_can_be_changed_in_place(shape: tuple[int, ...], weight_only: bool) -> None:
    """As what an nn.Linear returns; autograd forbids that for views of an operator's results."""
    linear = converted(weight_only=weight_only)
    x = batch().flatten()[: torch.Size(shape).numel()].view(shape).clone().requires_grad_()
    expected = linear(x).relu()
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    found = linear(x)
    assert not found._is_view()
    found.relu_()
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.square().sum(), x)[0], wanted)


def layer_of_kind(kind: str) -> nn.Module:
    """A layer with a packed weight and a bias, of each kind that has derivatives of its own."""
    if kind in ("nf4", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, N))
        fp4pass.parity.swap(model, kind)
        return model[0]
    if kind == "rotated":
        torch.manual_seed(0)
        return fp4pass.convert(nn.Linear(K, N), "mxfp4", "naive", rotation=32)
    return converted(weight_only=kind == "weight_only", static=kind == "static")


KINDS = ("weight_only", "static", "dynamic", "rotated", "nf4", "int8")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_backward(kind: str) -> None:
    """Rounding the input counts as the identity; there are no forward derivatives."""
    layer, x = layer_of_kind(kind).requires_grad_(False), batch(3).requires_grad_()
    weight = layer.weight if kind != "int8" else layer._decode(torch.float32)
    layer(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * layer(x.detach()) @ weight)
    with pytest.raises(NotImplementedError, match="no forward derivatives"):
        torch.func.jvp(layer, (x.detach(),), (x.detach(),))


def _ragged(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, K), torch.ones(3, K)], layout=layout)


NOT_DENSE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(K).to_sparse(), r"got torch.sparse_coo. Call to_dense\(\)"),
    "nested": (lambda: _ragged(torch.strided), "got a nested tensor. Call to_padded_tensor"),
    "jagged": (lambda: _ragged(torch.jagged), "got a nested tensor. Call to_padded_tensor"),
    "meta": (lambda: torch.ones(2, K, device="meta"), "a tensor with values, got one on the meta"),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_inputs_that_are_not_dense_or_have_no_values(kind: str) -> None:
    make, message = NOT_DENSE[kind]
    for options in ({"weight_only": True}, {"weight_only": False}):
        with pytest.raises(DtypeError, match=f"input of QuantizedLinear: .*{message}"):
            converted(**options)(make())
    if kind == "meta":
        # A model without values has outputs without.
        assert converted().to("meta")(make()).is_meta
        return
    prepared = fp4pass.prepare(nn.Linear(K, N))
    with pytest.raises(DtypeError, match=f"input of a prepared Linear: .*{message}"):
        prepared(make())


@pytest.mark.core
def test_a_state_dict_changes_the_shared_scale_of_one_layer_alone() -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    fp4pass.prepare(model)(batch())
    model = fp4pass.convert(model, "nvfp4")
    shared, k = model.q.input_global_scale, model.k.state_dict()
    assert shared is model.k.input_global_scale
    state = model.q.state_dict()
    model.q.load_state_dict(state)
    assert model.q.input_global_scale is shared, "equal scales stay one buffer"
    model.q.load_state_dict({**state, INPUT_GLOBAL: 2 * state[INPUT_GLOBAL]})
    assert torch.equal(model.q.input_global_scale, 2 * state[INPUT_GLOBAL])
    assert torch.equal(model.k.input_global_scale, k[INPUT_GLOBAL])
