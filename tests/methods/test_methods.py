"""Methods: the registry, and every method against naive on its own objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import oracle
import pytest
import torch
from blocks import VARIANTS
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import Format, get_format
from fp4pass.core.quant_state import QuantState
from fp4pass.errors import DtypeError, Fp4PassError, NonFiniteError, OptionError, ShapeError
from fp4pass.methods import METHODS, Gptq, Hessian, Method, Naive, Sse, Stats, resolve_method

ROWS, COLUMNS = 48, 160

formats = pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
methods = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


def weight_and_stats() -> tuple[Tensor, Stats]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05
    weight[::7] *= 8
    x = torch.randn(500, COLUMNS, generator=generator) @ (
        torch.eye(COLUMNS) + 0.3 * torch.randn(COLUMNS, COLUMNS, generator=generator)
    )
    blocks = x.view(500, -1, 32).transpose(0, 1)
    return weight, Stats(blocks.mT @ blocks, 500, x.abs().max().item(), x.mT @ x)


def objective(state: QuantState, weight: Tensor, stats: Stats | None) -> Tensor:
    """The float64 error [N, J] of each block: by block Hessians with stats, else the squares."""
    fmt = state.format
    quantized = oracle.dequantize(state.qdata, state.scale, state.global_scale, fmt.name, fmt.block)
    residual = (weight.double() - quantized).view(1, ROWS, -1, fmt.block)
    hessian = None
    if stats is not None:
        assert stats.block_hessian is not None
        hessian = oracle.block_hessians(stats.block_hessian, COLUMNS, fmt.block)
    return oracle.errors(residual, hessian)[0]


def output_error(state: QuantState, weight: Tensor, stats: Stats) -> Tensor:
    """The float64 error [N] of each row of outputs, by the whole Hessian."""
    fmt = state.format
    quantized = oracle.dequantize(state.qdata, state.scale, state.global_scale, fmt.name, fmt.block)
    residual = weight.double() - quantized
    assert stats.hessian is not None
    return ((residual @ stats.hessian.double()) * residual).sum(1)


def run(method: Method, weight: Tensor, stats: Stats, fmt: Format) -> QuantState:
    g = fmt.global_scale_for(weight.abs().max().item())
    return method.function(weight, stats, fmt, g, method.options())


@formats
@methods
@pytest.mark.core
def test_never_worse_than_naive(method: Method, fmt: Format) -> None:
    """On what the method minimizes: the output error if it needs Hessians, else the squares."""
    weight, stats = weight_and_stats()
    if "hessian" in method.needs:
        ours = output_error(run(method, weight, stats, fmt), weight, stats)
        best = output_error(run(METHODS["hessian"], weight, stats, fmt), weight, stats)
        assert (ours < best).all() and ours.sum() < 0.7 * best.sum()
        return
    goal = stats if "block_hessian" in method.needs else None
    ours = objective(run(method, weight, stats, fmt), weight, goal)
    base = objective(run(METHODS["naive"], weight, stats, fmt), weight, goal)
    assert (ours <= base * (1 + 1e-6)).all()
    if method.name != "naive":
        assert ours.sum() < 0.97 * base.sum()


@formats
@methods
def test_same_input_same_bits(method: Method, fmt: Format) -> None:
    weight, stats = weight_and_stats()
    first, second = run(method, weight, stats, fmt), run(method, weight.clone(), stats, fmt)
    assert torch.equal(first.qdata, second.qdata) and torch.equal(first.scale, second.scale)
    assert (first.format, first.shape) == (fmt, (ROWS, COLUMNS))
    half = run(method, weight.bfloat16(), stats, fmt)
    widened = run(method, weight.bfloat16().float(), stats, fmt)
    assert torch.equal(half.qdata, widened.qdata) and torch.equal(half.scale, widened.scale)


def test_rows_alone_are_those_of_the_whole() -> None:
    weight, stats = weight_and_stats()
    assert stats.hessian is not None
    stats = Stats(tokens=stats.tokens, hessian=stats.hessian[:32, :32])
    fmt = get_format("nvfp4")
    divided = [method for method in METHODS.values() if method.rows_at_once is not None]
    assert [method.name for method in divided] == ["gptq"]
    for method in divided:
        assert method.rows_at_once is not None
        tall = weight.repeat(-(-(method.rows_at_once + 50) // ROWS), 1)
        tall = tall[:, :32] * torch.linspace(0.5, 2, len(tall))[:, None]
        whole = run(method, tall, stats, fmt)
        for rows in (slice(0, method.rows_at_once), slice(method.rows_at_once, None)):
            alone = method.function(
                tall, stats, fmt, whole.global_scale, method.options(), rows=rows
            )
            assert torch.equal(alone.qdata, whole.qdata[rows])
            assert torch.equal(alone.scale, whole.scale[rows])
            assert alone.shape == (len(whole.qdata[rows]), 32)


@methods
@pytest.mark.core
def test_a_method_is_found_by_its_name_and_by_its_options(method: Method) -> None:
    assert resolve_method(method.name) == (method, method.options())
    options = method.options()
    assert resolve_method(options) == (method, options)
    assert hash(options) == hash(method.options())
    with pytest.raises(AttributeError):
        options.anything = 1


def test_the_methods() -> None:
    assert {name: method.options for name, method in METHODS.items()} == {
        "naive": Naive,
        "sse": Sse,
        "hessian": Hessian,
        "gptq": Gptq,
    }
    assert {name: method.needs for name, method in METHODS.items()} == {
        "naive": (),
        "sse": (),
        "hessian": ("block_hessian",),
        "gptq": ("hessian",),
    }


@pytest.mark.parametrize("choice", [dataclass, Hessian, 3])
def test_options_of_no_method(choice: object) -> None:
    with pytest.raises(
        OptionError, match=r"expected a name \(gptq, hessian, naive, sse\) or the options"
    ):
        resolve_method(choice)


@methods
@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.full((4, 32), math.nan), NonFiniteError, "NaN or infinity"),
        (torch.full((4, 32), 1e300, dtype=torch.float64), NonFiniteError, "NaN or infinity"),
        (torch.zeros(4, 32, dtype=torch.int8), DtypeError, "torch.int8, not float32"),
        (torch.zeros(4, 24), ShapeError, "in_features=24 is not a multiple of 16"),
        (torch.zeros(4, 4, 32), ShapeError, r"shape \(4, 4, 32\), not \[N, K\]"),
        (torch.zeros(4, 0), ShapeError, r"shape \(4, 0\), which is empty"),
    ],
)
def test_weights_that_cannot_be_quantized(
    method: Method, weight: Tensor, error: type[Fp4PassError], message: str
) -> None:
    stats = Stats(torch.eye(32).repeat(1, 1, 1), 1, 1.0, torch.eye(32))
    with pytest.raises(error, match=message):
        method.quantize(weight, stats, get_format("nvfp4"), 1.0, method.options())


def test_what_few_tokens_say() -> None:
    """Percent of the output on other tokens, as docs/search.md has them."""
    found = {}
    for method, tokens in (
        ("naive", 1), ("sse", 1), *(("hessian", count) for count in (1, 2, 4, 8, 512))
    ):  # fmt: skip
        torch.manual_seed(0)
        linear, x = nn.Linear(256, 256, bias=False).eval(), torch.randn(4096, 256)
        wanted = linear(x)[2048:]
        fp4pass.prepare(linear, method)
        fp4pass.calibrate(linear, [x[:tokens]], progress=False)
        fp4pass.convert(linear, method=method, weight_only=True)
        error = (linear(x[2048:]) - wanted).norm() / wanted.norm()
        found[method, tokens] = 100 * float(error.detach())
    expected = [10.2, 8.4, 28.3, 14.5, 10.5, 9.6, 8.4]
    assert list(found.values()) == pytest.approx(expected, abs=0.15)
