"""Fusions on the graphs that a GPU's Inductor sees: what matches, what does not, and the bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from post_grad import calls, compiled
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fp4pass.graph.inductor.fusions import fuse_quantizers
from fp4pass.graph.inductor.merge import share_calls

OPS = torch.ops.fp4pass
FUSED = ("norm_quantize", "activate_quantize")


pytestmark = pytest.mark.usefixtures("fresh_graphs")


def fuse(graph: fx.Graph) -> int:
    """As on a GPU."""
    return fuse_quantizers(graph, lambda node: True)


class Fused:
    """A change that fuses, and checks what every fusion must leave as it is."""

    def __init__(self) -> None:
        self.count, self.calls = 0, Counter[str]()

    def __call__(self, graph: fx.Graph) -> None:
        share_calls(graph)
        self.count += fuse(graph)
        assert fuse(graph) == 0
        self.calls += calls(graph)
        for node in graph.nodes:
            name = str(node.target).split(".")
            if node.op != "call_function" or name[0] != "fp4pass" or name[1] not in FUSED:
                continue
            if name[1] == "norm_quantize":
                self.calls["add_" * (node.args[1] is not None) + f"{node.args[4]}_norm"] += 1
            args = fx.map_arg(node.args, lambda n: n.meta["val"])
            for a, b in zip(node.meta["val"], node.target(*args), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            for user in node.users:
                a, b = user.meta["val"], node.meta["val"][user.args[1]]
                assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def quantized(y: Tensor, divisor: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A quantizer, and a product whose dtype and shape are those of y."""
    packed, scale = OPS.quantize(y, divisor, "nvfp4")
    weight, bits = torch.full((16, y.shape[-1] // 2), 0x22, dtype=torch.uint8), scale[0, :1]
    bits = bits.expand(16, y.shape[-1] // 16).contiguous()
    product = OPS.linear_quantized(y, packed, scale, divisor, weight, bits, divisor, None, "nvfp4")
    return packed, scale, product


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def columns(x: Tensor) -> Tensor:
    """The same, with contiguous columns in memory."""
    return x.t().contiguous().t()


def gelu_new(x: Tensor) -> Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


# What is fused, as functions of x, another like it, a weight and a bias; and with what operator.
BEFORE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "rms": (lambda x, y, w, b: rms_norm(x, w), "rms_norm"),
    "add, rms": (lambda x, y, w, b: rms_norm(x + y, w), "add_rms_norm"),
    # Of a sum whose columns are contiguous, other readers have the strides.
    "add columns, rms": (lambda x, y, w, b: rms_norm(columns(x) + columns(y), w), "rms_norm"),
    "layer norm": (lambda x, y, w, b: F.layer_norm(x, (64,), w, b), "layer_norm"),
    "without bias": (lambda x, y, w, b: F.layer_norm(x, (64,), w), "layer_norm"),
    "without both": (lambda x, y, w, b: F.layer_norm(x, (64,)), "layer_norm"),
    "add, layer norm": (lambda x, y, w, b: F.layer_norm(x + y, (64,), w, b), "add_layer_norm"),
    "silu": (lambda x, y, w, b: F.silu(x), "activate_quantize"),
    "silu, mul": (lambda x, y, w, b: F.silu(x) * y, "activate_quantize"),
    "mul, silu": (lambda x, y, w, b: y * F.silu(x), "activate_quantize"),
    "gelu": (lambda x, y, w, b: F.gelu(x), "activate_quantize"),
    "gelu, mul": (lambda x, y, w, b: F.gelu(x) * y, "activate_quantize"),
    "gelu by tanh": (lambda x, y, w, b: F.gelu(x, approximate="tanh"), "activate_quantize"),
    "gelu by tanh, mul": (
        lambda x, y, w, b: F.gelu(x, approximate="tanh") * y,
        "activate_quantize",
    ),
    "gelu of gpt2": (lambda x, y, w, b: gelu_new(x), "activate_quantize"),
    "halves": (
        lambda x, y, w, b: F.silu(torch.cat((x, y), -1).chunk(2, -1)[0]) * y,
        "activate_quantize",
    ),
}

# What is not: a source that something else reads, a factor or weight that is expanded, other
# dimensions, other constants.
UNFUSED: dict[str, Callable[..., Any]] = {
    "read again": lambda x, y, w, b: (quantized(s := F.silu(x)), s),
    "read by a sum": lambda x, y, w, b: quantized(s := rms_norm(x, w))[2].sum() + s,
    "a dynamic scale": lambda x, y, w, b: quantized(
        s := F.silu(x) * y, OPS.dynamic_global_scale(s, "nvfp4")
    ),
    "a factor that is expanded": lambda x, y, w, b: quantized(F.silu(x) * y[:1]),
    "a weight that is expanded": lambda x, y, w, b: quantized(rms_norm(x, w[:1])),
    "a norm of two dimensions": lambda x, y, w, b: quantized(F.layer_norm(x, x.shape)),
    "a norm of columns": lambda x, y, w, b: quantized(F.layer_norm(x.t(), (48,)).t().contiguous()),
    "a weight per row": lambda x, y, w, b: quantized(rms_norm(x, y)),
    "another constant": lambda x, y, w, b: quantized(0.5 * x * (1 + torch.erf(x * 0.7))),
    "no activation": lambda x, y, w, b: quantized(x * y),
    # It rounds once, as Gemma's; in float32 both are Llama's.
    "a norm of torch": lambda x, y, w, b: quantized(F.rms_norm(x, (64,), w, 1e-6)),
}


def arguments(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((48, 64), (48, 64), (64,), (64,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# Casts are nodes in bfloat16 and float16 and are not in float32; that is the same for all.
CASES = [(name, torch.bfloat16) for name in BEFORE]
CASES += [(name, torch.float32) for name in ("add, rms", "layer norm", "gelu by tanh, mul")]
CASES += [("silu, mul", torch.float16)]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_what_is_fused_has_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    before, operator = BEFORE[name]
    scale = torch.tensor([4.0])

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        # The sum is read again, and of the divisor what is computed from no source.
        return (*quantized(before(*args), scale), args[0] + args[1])

    fused = Fused()
    found = compiled(function, fused)(*arguments(dtype))
    for a, b in zip(found, function(*arguments(dtype)), strict=True):
        assert torch.equal(a, b)
    assert fused.count == 1 and fused.calls[operator] == 1 and fused.calls["quantize"] == 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", UNFUSED)
def test_what_does_not_match_is_not_fused(name: str) -> None:
    fused = Fused()
    compiled(UNFUSED[name], fused)(*arguments(torch.bfloat16))
    assert fused.count == 0 and fused.calls["quantize"] == 1


def test_on_a_cpu_nothing_is_fused_unless_asked() -> None:
    counts = []

    def change(graph: fx.Graph) -> None:
        counts.append(fuse_quantizers(graph))

    compiled(lambda x, y, w, b: quantized(F.silu(rms_norm(x, w))), change)(
        *arguments(torch.float32)
    )
    assert counts == [0]


@pytest.mark.core
def test_a_sum_that_is_read_too_early_stays() -> None:
    """The operator that adds can only stand where all of its operands are there."""

    def function(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        return (total.relu(), *quantized(rms_norm(total, w.exp())))

    given = arguments(torch.float32)
    traced = make_fx(function, tracing_mode="fake")(*given)
    assert fuse(traced.graph) == 1 and calls(traced.graph)["norm_quantize"] == 1
    traced.graph.lint()
    traced.recompile()
    assert all(map(torch.equal, traced(*given), function(*given)))


def test_dynamic_shapes() -> None:
    fused = Fused()
    model = compiled(
        lambda x, y, w, b: quantized(F.silu(x) * y)[:2] + quantized(rms_norm(x + y, w))[:2],
        fused,
        dynamic=True,
    )
    model(*arguments(torch.bfloat16))
    assert fused.count == 2
