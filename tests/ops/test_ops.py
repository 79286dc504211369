"""Every operator: schema and fakes by opcheck, gradients, observation, bad input."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import logging
import math
from typing import Any

import oracle
import pytest
import torch
from blocks import VARIANTS
from kernels.cases import cases
from torch import Tensor

from fp4pass import ops
from fp4pass.core.elements import Element
from fp4pass.core.formats import FORMATS, Format
from fp4pass.errors import DtypeError, OptionError, ShapeError
from fp4pass.kernels.linear.naive import linear_ref
from fp4pass.kernels.norm.naive import square_sums_ref
from fp4pass.kernels.quantize.naive import ACTIVATIONS
from fp4pass.kernels.search.reference import OBJECTIVES
from fp4pass.ops.registration import OPERATORS, implementation_on
from fp4pass.parity import codebooks as parity

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Tracing forward and backward is what takes time, and is only of interest with a gradient.
PLAIN = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = (*PLAIN, "test_aot_dispatch_dynamic")

SHAPES = [(4, 64), (2, 3, 64), (0, 64), (64,)]

formats = pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
# Every format and every shape; the rest of the products is slow.
PAIRS = list(zip(VARIANTS, SHAPES, strict=True))
formats_and_shapes = pytest.mark.parametrize(
    ("fmt", "shape"), cases(PAIRS, itertools.product(VARIANTS, SHAPES))
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def divisor_of(fmt: Format, global_scale: float = 2.0**-8) -> Tensor | None:
    return torch.tensor([1.0 / global_scale]) if fmt.has_global_scale else None


def packed_weight(fmt: Format, rows: int = 5, columns: int = 64) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns, generator=seeded(7)) * 0.1
    g = 2.0**-8 if fmt.has_global_scale else 1.0
    return ops.search(weight, None, g, fmt.key, "naive")


def stacked(fmt: Format, experts: int = 3, rows: int = 5) -> tuple[Tensor, Tensor, Tensor | None]:
    packed, scale = packed_weight(fmt, rows * experts)
    divisors = [divisor_of(fmt, 2.0**-i) for i in range(experts)]
    return (
        packed.view(experts, rows, -1),
        scale.view(experts, rows, -1),
        torch.cat(divisors) if fmt.has_global_scale else None,
    )


def dense(fmt: Format, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.dequantize(packed, scale, divisor_of(fmt), fmt.key, dtype)


def opcheck(op: Any, *args: Any, checks: tuple[str, ...] = PLAIN) -> None:
    torch.library.opcheck(op, args, test_utils=checks)


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, that need gradients where it has some."""
    fmt, row, square = FORMATS["nvfp4"], torch.randn(64, generator=seeded()), torch.eye(64)
    x = torch.randn(3, 64, generator=seeded(), requires_grad=True)
    residual = torch.randn(3, 64, generator=seeded(1), requires_grad=True)
    weight, blocks = torch.randn(5, 64, generator=seeded(2)), torch.eye(32).repeat(2, 1, 1)
    bias = torch.randn(5, generator=seeded(3), requires_grad=True)
    stored = (*packed_weight(fmt), divisor_of(fmt))
    quantized = (*ops.quantize(x.detach(), divisor_of(fmt), "nvfp4"), divisor_of(fmt))
    group = [[each] * 2 for each in (*stored, bias.detach())]
    rest = (divisor_of(fmt), "nvfp4")
    squared = (x.detach(), square_sums_ref(x.detach()))
    rounded = (x.detach().to(torch.float8_e4m3fn), torch.rand(3, 1))
    statistics = (torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    codes, absmax = parity.quantize_codebook(weight, "nf4")
    rows = torch.randint(-127, 128, (5, 64), generator=seeded(), dtype=torch.int8)
    ids, stack = torch.tensor([[0, 2], [1, 0], [3, 2]]), stacked(fmt)
    biases = torch.randn(3, 5, generator=seeded(4), requires_grad=True)
    experts = torch.randn(3, 5, 64, generator=seeded(5), requires_grad=True)
    up = stacked(fmt, rows=64)
    down = [each[..., : each.shape[-1] // 2] for each in up[:2]]
    routing, gate = torch.rand(3, 2), ("silu", False, 1.0, 0.0, None)
    counts = torch.zeros(3, dtype=torch.int64)
    of_experts = (torch.zeros(3, 2, 32, 32), counts, torch.zeros(1), torch.zeros(3))
    keys, tables = torch.randn(2, 2, 9, 16), torch.randn(2, 1, 3, 16)
    read = (torch.arange(9) < 7)[None, None, None]
    return {
        "attention_span": (read,),
        "attention": (
            torch.randn(2, 4, 3, 16),
            keys,
            keys,
            read,
            torch.tensor([[0, 7]]).int(),
            torch.zeros(264, dtype=torch.int32),
            0.3,
        ),
        "rotary_attention": (
            *(torch.randn(2, 3, heads, 16) for heads in (4, 2, 2)),
            *(None, row[:16], 1e-6, *tables, torch.arange(3), keys.clone(), keys.clone()),
            *(read, torch.tensor([[0, 7]]).int(), torch.zeros(264, dtype=torch.int32), 0.3),
        ),
        "search": (weight, blocks, 2.0**-8, "nvfp4", "hessian"),
        "search_stack": (weight.expand(2, -1, -1), [2.0**-8, 2.0**-7], "nvfp4", "sse"),
        "joint": (weight, *stored[:2], blocks, 2.0**-8, "nvfp4"),
        "gptq": (weight, square, 2.0**-8, "nvfp4", 0.1, 0.25, "joint", "inside", "loss", 1),
        "observe": (x.detach(), torch.zeros(2, 32, 32), *statistics),
        "observe_full": (x.detach(), torch.zeros(64, 64), *statistics),
        "dequantize": (*stored, "nvfp4", torch.bfloat16),
        "dynamic_global_scale": (x, "nvfp4"),
        "quantize": (x, *rest),
        "norm_quantize": (x, residual, row, row, "layer", 1e-6, *rest),
        "activate_quantize": (x, residual, "silu", *rest),
        "activate_round": (x.detach(), residual.detach(), "silu"),
        "norm_round": (x.detach(), residual.detach(), row.detach(), 1e-6),
        "rotate": (x, 64),
        "rotate_quantize": (x, 64, *rest),
        "linear": (x, *stored, bias, "nvfp4"),
        "linear_quantized": (x, *quantized, *stored, bias, "nvfp4", 32),
        "linear_group": (x.detach(), *group, "nvfp4"),
        "linear_quantized_group": (x.detach(), *quantized, *group, "nvfp4"),
        "linear_rounded": (*rounded, *stored, None, "nvfp4"),
        "linear_gated": (x.detach(), *group, "silu", "nvfp4"),
        "linear_add": (x.detach(), *stored, None, torch.randn(3, 5), "nvfp4"),
        "linear_normed_group": (*squared, row, 1e-6, *group, "nvfp4"),
        "linear_normed_gated": (*squared, row, 1e-6, *group, "silu", "nvfp4"),
        "rms_norm": (x.detach(), row, 1e-6),
        "add_rms_norm": (x.detach(), residual.detach(), row, 1e-6),
        "quantize_codebook": (weight, "nf4"),
        "dequantize_codebook": (codes, absmax, "nf4", (5, 64), torch.float32),
        "linear_codebook": (x, codes, absmax, bias, 5, "nf4"),
        "linear_int8": (x, rows, torch.rand(5), bias, 6.0),
        "experts_linear": (x, ids, *stack, biases, "nvfp4"),
        "experts_linear_quantized": (x, *quantized, ids, *stack, biases, "nvfp4"),
        "experts_quantize": (x, ids, torch.tensor([300.0, 2.0, 0.7]), "nvfp4"),
        "experts_linear_transposed": (torch.randn(3, 2, 5), ids, *stack, None, "nvfp4"),
        "experts_mixture": (
            *(x.detach(), ids, routing, *up, None),
            *(*(each.contiguous() for each in down), up[2], None, *gate, "nvfp4"),
        ),
        "experts_dense": (x, ids, experts, biases),
        "experts_outer": (torch.randn(3, 2, 5), x.detach(), ids, 3),
        "all_reduce": (x.detach(), "", False),
        "all_reduce_add": (x.detach(), residual.detach(), ""),
        "observe_experts": (x.detach(), ids, torch.rand(3, 2), *of_experts),
    }


@pytest.mark.core
def test_every_operator_is_here() -> None:
    """A new operator needs a call above."""
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "fp4pass::" in n}
    assert {name.partition(".")[0] for name in names} == set(OPERATORS) == set(calls())


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", calls())
def test_every_operator_is_traced(name: str) -> None:
    # torch compares no E4M3 numbers, and so no schema with what is written.
    checks = TRACED[1:] if name.endswith(("_rounded", "_round")) else TRACED
    opcheck(getattr(torch.ops.fp4pass, name).default, *calls()[name], checks=checks)


@pytest.mark.core
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_has_the_signature_of_its_reference(name: str) -> None:
    declared = OPERATORS[name]
    if declared.triton is None:
        dense = (
            "all_reduce",
            "all_reduce_add",
            "observe_full",
            "linear_int8",
            "experts_dense",
            "experts_outer",
        )
        assert name in (*dense, "experts_linear_transposed")
        return
    for place in filter(None, (declared.triton, declared.e4m3)):
        module, _, name = place.partition(":")
        kernel = getattr(importlib.import_module(f"fp4pass.{module}"), name)
        crossing, found = (
            [
                (each.name, each.default)
                for each in inspect.signature(function).parameters.values()
                if each.kind is not each.KEYWORD_ONLY
            ]
            for function in (declared.reference, kernel)
        )
        assert found == crossing


SEARCHES = [
    (fmt, objective, shape)
    for fmt, objective, shape in itertools.product(VARIANTS, OBJECTIVES, [(3, 96), (1, 32)])
]


@pytest.mark.parametrize(("fmt", "objective", "shape"), cases(SEARCHES[::5], SEARCHES))
def test_search(fmt: Format, objective: str, shape: tuple[int, int]) -> None:
    hessian = torch.eye(32).repeat(shape[1] // 32, 1, 1) if objective == "hessian" else None
    weight = torch.randn(shape, generator=seeded())
    opcheck(ops.search, weight, hessian, 2.0**-8, fmt.key, objective)
    # A search of float16 in transposed memory, as Conv1D keeps its weight.
    opcheck(ops.search, weight.half().t().contiguous().t(), hessian, 1.0, fmt.key, objective)


def test_search_of_a_stack() -> None:
    """The same as of each weight by its own global scale."""
    stack, scales = torch.randn(3, 5, 64, generator=seeded()), [2.0**-8, 2.0**-6, 2.0**-10]
    for objective in ("naive", "sse"):
        codes, scale = ops.search_stack(stack, scales, "nvfp4", objective)
        for i, g in enumerate(scales):
            expected = ops.search(stack[i], None, g, "nvfp4", objective)
            assert torch.equal(codes[i], expected[0]) and torch.equal(scale[i], expected[1])
    with pytest.raises(OptionError, match="Call `search` for each"):
        ops.search_stack(stack, scales, "nvfp4", "hessian")
    for weight in (stack[0], stack[:2]):
        with pytest.raises(ShapeError, match=r"expected \[3, N, K\]"):
            ops.search_stack(weight, scales, "nvfp4", "sse")


@formats_and_shapes
def test_quantize(fmt: Format, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape, generator=seeded()).to(dtype)
        opcheck(ops.quantize, x, divisor_of(fmt), fmt.key)
        opcheck(ops.quantize, x, None, fmt.key)
        opcheck(ops.dynamic_global_scale, x, fmt.key)
    if x.ndim > 1:
        # Channels first in memory, as a convolution before a linear leaves them.
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
        opcheck(ops.quantize, x, divisor_of(fmt), fmt.key)


@formats_and_shapes
def test_rotations(fmt: Format, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape, generator=seeded()).to(dtype)
        opcheck(ops.rotate, x, 64)
        opcheck(ops.rotate_quantize, x, 32, divisor_of(fmt), fmt.key)
        opcheck(ops.rotate_quantize, x, 64, None, fmt.key, "sse")


@pytest.mark.core
def test_rotations_say_what_they_want() -> None:
    x = torch.randn(3, 96)
    with pytest.raises(ShapeError, match="multiple of 64"):
        ops.rotate(x, 64)
    with pytest.raises(OptionError, match="expected one of 32, 64, 128, got 48"):
        ops.rotate_quantize(x, 48, None, "mxfp4")
    with pytest.raises(DtypeError):
        ops.rotate(x.int(), 32)
    with pytest.raises(OptionError, match="naive"):
        ops.rotate_quantize(x, 32, None, "mxfp4", "best")


@formats_and_shapes
def test_norms(fmt: Format, shape: tuple[int, ...]) -> None:
    for dtype, kind in itertools.product(DTYPES, ("rms", "layer")):
        x, residual = (torch.randn(shape, generator=seeded(i)).to(dtype) for i in (0, 1))
        weight, bias = (torch.randn(shape[-1], generator=seeded(i)).to(dtype) for i in (2, 3))
        given = (weight, bias if kind == "layer" else None, kind, 1e-6, divisor_of(fmt), fmt.key)
        opcheck(ops.norm_quantize, x, None, *given)
        opcheck(ops.norm_quantize, x, residual, *given)
        total = x + residual
        expected = (total, *ops.norm_quantize(total, None, *given)[1:])
        for a, b in zip(ops.norm_quantize(x, residual, *given), expected, strict=True):
            assert torch.equal(a, b)
    opcheck(ops.norm_quantize, x, None, None, None, *given[2:])
    if x.ndim > 1:
        # As in test_quantize.
        strided = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in (x, residual)]
        opcheck(ops.norm_quantize, *strided, *given)
    x, residual = (torch.randn(shape, requires_grad=True) for _ in range(2))
    total, *_ = ops.norm_quantize(x, residual, None, None, *given[2:])
    grad = torch.randn(shape)
    for each in torch.autograd.grad(total, (x, residual), grad):
        assert torch.equal(each, grad)
    assert not any(
        each.requires_grad for each in ops.norm_quantize(x, None, None, None, *given[2:])
    )


@pytest.mark.core
def test_norms_say_what_they_want() -> None:
    x, row = torch.randn(3, 32), torch.randn(32)
    layer, rms = (("layer", 1e-6, None, "mxfp4"), ("rms", 1e-6, None, "mxfp4"))
    for error, match, arguments in (
        (ShapeError, "weight of a norm", (x, x, row[1:], None, *rms)),
        (ShapeError, "weight of a norm", (x, None, row.half(), None, *rms)),
        (ShapeError, "The bias of a norm", (x, None, row, row.half(), *layer)),
        (ShapeError, "The residual: expected", (x, row, None, None, *layer)),
        (ShapeError, "The residual: expected", (x, x.half(), row, None, *rms)),
        (ShapeError, "multiple of 32", (x[:, :16], None, None, None, *layer)),
        (OptionError, "expected a weight and no bias", (x, None, row, row, *rms)),
        (OptionError, "expected a weight and no bias", (x, None, None, None, *rms)),
        (OptionError, "Norm 'batch'", (x, None, row, row, "batch", *layer[1:])),
    ):
        with pytest.raises(error, match=match):
            ops.norm_quantize(*arguments)


@pytest.mark.parametrize(
    ("fmt", "activation"),
    cases(list(zip(VARIANTS, ACTIVATIONS, strict=True)), itertools.product(VARIANTS, ACTIVATIONS)),
)
def test_activate_quantize(fmt: Format, activation: str) -> None:
    for shape, dtype in zip([(2, 3, 64), (0, 64), (64,), (4, 64)], DTYPES, strict=True):
        x, up = torch.randn(shape, generator=seeded()).to(dtype).chunk(2, -1)
        if not x.numel():
            # opcheck cannot copy halves of nothing.
            x, up = (torch.empty(x.shape, dtype=dtype) for _ in range(2))
        rest = (activation, divisor_of(fmt), fmt.key)
        opcheck(ops.activate_quantize, x, None, *rest)
        opcheck(ops.activate_quantize, x, up, *rest)


@pytest.mark.core
def test_activations_say_what_they_want() -> None:
    x = torch.randn(3, 32)
    with pytest.raises(ShapeError, match="The factor: expected"):
        ops.activate_quantize(x, x[:1], "silu", None, "mxfp4")
    with pytest.raises(OptionError, match="gelu_tanh"):
        ops.activate_quantize(x, x, "relu", None, "mxfp4")
    with pytest.raises(DtypeError):
        ops.activate_quantize(x.int(), None, "silu", None, "mxfp4")


@formats
@pytest.mark.parametrize("rows", [5, 0])
def test_dequantize(fmt: Format, rows: int) -> None:
    packed, scale = packed_weight(fmt)
    for dtype in DTYPES:
        opcheck(ops.dequantize, packed[:rows], scale[:rows], divisor_of(fmt), fmt.key, dtype)
        opcheck(ops.dequantize, packed[:rows], scale[:rows], None, fmt.key, dtype)


@formats_and_shapes
def test_linears(fmt: Format, shape: tuple[int, ...]) -> None:
    weight = (*packed_weight(fmt), divisor_of(fmt))
    for grad, bias_dtype in itertools.product((False, True), (None, torch.float32, torch.bfloat16)):
        bias = None
        if bias_dtype is not None:
            bias = torch.randn(5, dtype=bias_dtype, requires_grad=grad)
        x = torch.randn(shape, generator=seeded(), requires_grad=grad)
        quantized = (*ops.quantize(x.detach(), divisor_of(fmt), fmt.key), divisor_of(fmt))
        opcheck(ops.linear, x, *weight, bias, fmt.key)
        opcheck(ops.linear_quantized, x, *quantized, *weight, bias, fmt.key)


@formats
def test_groups_are_their_members(fmt: Format) -> None:
    """Weights of several sizes, some with a bias."""
    weights = [(*packed_weight(fmt, rows), divisor_of(fmt)) for rows in (5, 3, 8)]
    biases = [torch.randn(5), None, torch.randn(8)]
    group = [*map(list, zip(*weights, strict=True)), biases]
    for shape in ((4, 64), (2, 3, 64), (0, 64), (64,)):
        x = torch.randn(shape)
        quantized = (*ops.quantize(x, divisor_of(fmt), fmt.key), divisor_of(fmt))
        opcheck(ops.linear_group, x, *group, fmt.key)
        opcheck(ops.linear_quantized_group, x, *quantized, *group, fmt.key)
        cases = (
            (ops.linear, ops.linear_group, (x,)),
            (ops.linear_quantized, ops.linear_quantized_group, (x, *quantized)),
        )
        for one, several, activations in cases:
            found = several(*activations, *group, fmt.key)
            for y, weight, bias in zip(found, weights, biases, strict=True):
                assert torch.equal(y, one(*activations, *weight, bias, fmt.key))


@pytest.mark.parametrize("columns", [64, 48])
@pytest.mark.parametrize("hessian", [True, False])
def test_observe(columns: int, hessian: bool) -> None:
    state = (
        torch.zeros(math.ceil(columns / 32) if hessian else 0, 32, 32),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1),
    )
    for shape in ((3, columns), (0, columns), (2, 2, columns), (columns,)):
        opcheck(ops.observe, torch.randn(shape), *state)


@formats
def test_fakes_have_the_shapes_dtypes_and_strides_of_what_is_real(fmt: Format) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed, scale = packed_weight(fmt)
    for shape in ((4, 64), (2, 3, 64), (0, 64), (64,)):
        for dtype in DTYPES:
            x = torch.randn(shape).to(dtype)
            divisor = divisor_of(fmt)
            x_packed, x_scale = ops.quantize(x, divisor, fmt.key)
            calls: list[tuple[Any, tuple[Any, ...]]] = [
                (ops.quantize, (x, divisor, fmt.key)),
                (ops.dynamic_global_scale, (x, fmt.key)),
                (ops.dequantize, (packed, scale, divisor, fmt.key, dtype)),
                (ops.linear, (x, packed, scale, divisor, None, fmt.key)),
                (
                    ops.linear_quantized,
                    (x, x_packed, x_scale, divisor, packed, scale, divisor, None, fmt.key),
                ),
            ]
            for op, args in calls:
                real = op(*args)
                with FakeTensorMode() as mode:
                    fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
                for a, b in zip(
                    *(r if isinstance(r, tuple) else (r,) for r in (real, fake)), strict=True
                ):
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


GRADIENTS = [(*pair, dtype, q) for pair, dtype in zip(PAIRS, DTYPES, strict=True) for q in (0, 1)]
ALL_GRADIENTS = itertools.product(VARIANTS, SHAPES, DTYPES, (0, 1))


@pytest.mark.parametrize(("fmt", "shape", "dtype", "quantized"), cases(GRADIENTS, ALL_GRADIENTS))
def test_gradients(
    fmt: Format, shape: tuple[int, ...], dtype: torch.dtype, quantized: bool
) -> None:
    """Those of the dense product: grad @ W for x and the sum of grad for the bias."""
    packed, scale = packed_weight(fmt)
    x = torch.randn(shape, generator=seeded()).to(dtype).requires_grad_()
    bias = torch.randn(5, generator=seeded(), requires_grad=True)
    weight = (packed, scale, divisor_of(fmt))
    if quantized:
        divisor = ops.dynamic_global_scale(x, fmt.key) if fmt.has_global_scale else None
        x_packed, x_scale = ops.quantize(x, divisor, fmt.key)
        y = ops.linear_quantized(x, x_packed, x_scale, divisor, *weight, bias, fmt.key)
    else:
        y = ops.linear(x, *weight, bias, fmt.key)
    grad = torch.randn(y.shape, generator=seeded(1)).to(dtype)
    y.backward(grad)
    assert x.grad is not None and bias.grad is not None
    assert torch.equal(x.grad, grad @ dense(fmt, packed, scale, dtype))
    assert bias.grad.dtype == torch.float32
    wanted = grad.reshape(-1, 5).sum(0).float()
    assert torch.equal(bias.grad, wanted)


@formats
def test_gradients_only_where_they_are_wanted(fmt: Format) -> None:
    packed, scale = packed_weight(fmt)
    x = torch.randn(4, 64)
    bias = torch.randn(5, requires_grad=True)
    y = ops.linear(x, packed, scale, divisor_of(fmt), bias, fmt.key)
    (grad,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(grad, torch.full((5,), 4.0))
    codes, bits = ops.quantize(x.requires_grad_(), None, fmt.key)
    assert not codes.requires_grad and not bits.requires_grad
    assert not ops.dynamic_global_scale(x, fmt.key).requires_grad


@formats
def test_the_product_of_quantized_activations(fmt: Format) -> None:
    """In float64: dequantize both exactly and multiply."""
    packed, scale = packed_weight(fmt)
    x = torch.randn(6, 64, generator=seeded(), dtype=torch.float64)
    divisor = divisor_of(fmt)
    x_packed, x_scale = ops.quantize(x, divisor, fmt.key)
    y = ops.linear_quantized(x, x_packed, x_scale, divisor, packed, scale, divisor, None, fmt.key)
    g = 1.0 if divisor is None else 1.0 / divisor.item()
    exact = oracle.dequantize(x_packed, x_scale, g, fmt.name, fmt.block) @ (
        oracle.dequantize(packed, scale, g, fmt.name, fmt.block).t()
    )
    assert y.dtype == torch.float64
    # 64 products of at most 10 significant bits: only the sum rounds.
    assert torch.allclose(y, exact, rtol=0, atol=64 * 2.0**-52 * float(exact.abs().max()))


@formats
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_inputs_of_other_dtypes(fmt: Format, dtype: torch.dtype) -> None:
    packed, scale = packed_weight(fmt)
    x = torch.ones(2, 64).to(dtype)
    with pytest.raises(DtypeError, match=f"expected float32, bfloat16, .* got {dtype}. Cast it"):
        ops.quantize(x, divisor_of(fmt), fmt.key)
    with pytest.raises(DtypeError, match=f"got {dtype}"):
        ops.linear(x, packed, scale, divisor_of(fmt), None, fmt.key)


def observed(batches: list[Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    state = (
        torch.zeros(math.ceil(columns / 32), 32, 32),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1),
    )
    for batch in batches:
        ops.observe(batch, *state)
    return state


def exact_hessian(batches: list[Tensor], columns: int) -> Tensor:
    groups = math.ceil(columns / 32)
    total = torch.zeros(groups, 32, 32, dtype=torch.float64)
    for batch in batches:
        tokens = batch.reshape(-1, columns).to(torch.float32).double()
        padded = torch.nn.functional.pad(tokens, (0, groups * 32 - columns))
        blocks = padded.view(len(tokens), groups, 32).transpose(0, 1)
        total += blocks.mT @ blocks
    return total


def relative_error(found: Tensor, exact: Tensor) -> float:
    diagonal = exact.diagonal(dim1=1, dim2=2).clamp(min=1e-300).sqrt()
    bound = diagonal.unsqueeze(1) * diagonal.unsqueeze(2)
    return float(((found.double() - exact).abs() / bound).nan_to_num().max())


@pytest.mark.parametrize("tokens", cases([(4096,)], [(64,)]))
def test_observe_over_many_tokens(tokens: int) -> None:
    """300,000 tokens, or 800 short batches: a constant channel, outliers, correlated neighbours."""
    generator = seeded()
    batches = []
    for _ in range(math.ceil(300_000 / tokens) if tokens > 1000 else 800):
        x = torch.randn(tokens, 64, generator=generator)
        x[:, 1] = 0.1
        x[:, 2] *= 300
        x[:, 3] = x[:, 2] + 0.01 * x[:, 3]
        x[::64, 4] = 2000.0
        x[:, 5] *= 1e-4
        batches.append(x)
    hessian, count, amax = observed(batches, 64)
    assert count.item() == sum(map(len, batches))
    assert amax.item() == max(b.abs().max() for b in batches)
    assert relative_error(hessian, exact_hessian(batches, 64)) < 1e-3
    assert torch.allclose(hessian, hessian.mT, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 80, 16, 72])
def test_observe_pads_and_reads_every_dtype(dtype: torch.dtype, columns: int) -> None:
    batches = [torch.randn(2, 9, columns, generator=seeded(i)).to(dtype) for i in range(3)]
    batches += [torch.empty(0, columns, dtype=dtype), torch.ones(columns, dtype=dtype)]
    hessian, count, amax = observed(batches, columns)
    assert count.item() == 3 * 18 + 1
    assert amax.item() == max(b.abs().max() for b in batches if b.numel())
    assert relative_error(hessian, exact_hessian(batches, columns)) < 1e-5
    if columns % 32:
        assert (hessian[-1, columns % 32 :] == 0).all()
        assert (hessian[-1, :, columns % 32 :] == 0).all()


@pytest.mark.parametrize("name", ["observe", "observe_full"])
def test_observe_leaves_hidden_tokens_out_whatever_they_hold(name: str) -> None:
    x = torch.randn(2, 5, 64, generator=seeded())
    visible = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    shape = (2, 32, 32) if name == "observe" else (64, 64)
    states = [
        (torch.zeros(shape), torch.zeros(1, dtype=torch.int64), torch.zeros(1)) for _ in range(2)
    ]
    getattr(ops, name)(x.view(10, 64)[visible], *states[0])
    x.view(10, 64)[~visible] = math.nan
    getattr(ops, name)(x, *states[1], visible)
    assert all(map(torch.equal, *states)) and int(states[0][1]) == 7
    for bad in (visible[:9], visible.int(), visible.view(2, 5)):
        with pytest.raises(ShapeError, match="expected a boolean for each of 10 tokens"):
            getattr(ops, name)(x, *states[1], bad)


def test_observe_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(50, 64, generator=seeded())
    monkeypatch.setattr("fp4pass.kernels.statistics.naive._CHUNK", 64 * 7)
    hessian, count, _ = observed([batch], 64)
    assert count.item() == 50
    assert relative_error(hessian, exact_hessian([batch], 64)) < 1e-6


@pytest.mark.parametrize("columns", [31, 65, 200])
def test_observe_refuses_inputs_of_another_width(columns: int) -> None:
    state = (torch.zeros(2, 32, 32), torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    with pytest.raises(ShapeError, match=r"blocks of 32 for inputs of .* got 2"):
        ops.observe(torch.ones(3, columns), *state)
    with pytest.raises(ShapeError, match=r"got \(64, 64\)"):
        ops.observe_full(torch.ones(3, columns), torch.zeros(64, 64), *state[1:])
    assert not any(tensor.any() for tensor in state)


def test_the_dynamic_global_scale_is_1_where_a_format_has_no_global_scale() -> None:
    for fmt, divisor in (("mxfp4", 1.0), ("nvfp4", 2.0**-6)):
        assert ops.dynamic_global_scale(torch.full((2, 32), 1.5e5), fmt).tolist() == [divisor]


def test_an_empty_hessian_means_amax_and_count_only() -> None:
    state = (torch.zeros(0, 32, 32), torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    ops.observe(torch.tensor([[1.0, -7.0]]), *state)
    ops.observe(torch.tensor([[3.0, 2.0]]), *state)
    assert state[0].shape == (0, 32, 32) and state[1].item() == 2 and state[2].item() == 7.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_observe_keeps_what_is_not_finite(bad: float) -> None:
    batch = torch.ones(3, 32)
    batch[1, 2] = bad
    _, _, amax = observed([torch.ones(2, 32), batch, torch.ones(2, 32)], 32)
    assert not amax.isfinite()


def test_what_a_gpu_cannot_run_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, fmt = torch.device("cuda", 0), FORMATS["nvfp4"]
    five_bits = Element("five", bits=5, magnitudes=tuple(float(i) for i in range(16)))
    cases = [
        ("13.0", (7, 5), fmt, "expected compute capability 8.0 or more, got 7.5"),
        ("13.0", (9, 0), dataclasses.replace(fmt, element=five_bits), "do not know nvfp4"),
        (None, (9, 0), fmt, "for NVIDIA GPUs"),
        ("13.0", (8, 0), fmt, None),
    ]
    for cuda, capability, chosen, reason in cases:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        implementation_on.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp4pass"):
            operator = OPERATORS["linear"]
            arguments = (device, operator.reference, operator.triton, chosen)
            found = [implementation_on(*arguments) for _ in range(3)]
        assert (found[0] is linear_ref) == (reason is not None)
        assert [reason in record.getMessage() for record in caplog.records] == [True] * (
            reason is not None
        )
    implementation_on.cache_clear()
