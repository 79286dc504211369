"""Every declared operator: a sample of its inputs, and what holds for all of them.

Kernels run through Triton's interpreter where there is no GPU, on memory that is NaN before.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, flat, gpu, seeded
from kernels.conftest import poisoned  # noqa: F401 (a fixture)
from torch import Tensor

from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.kernels.norm.naive import square_sums_ref
from fp4pass.ops.registration import OPERATORS
from fp4pass.parity import codebooks as parity

# numpy, in the interpreter, says when a number leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = [name for name, operator in OPERATORS.items() if operator.triton is not None]

# They take seconds in the interpreter, and have tests of their own.
SEARCHES = ("gptq", "joint", "search", "search_stack")

# One of each kernel that others are like.
CORE = ("linear", "linear_quantized", "experts_linear", "attention", "rotary_attention", "observe")

# Which arguments have the rows of the first one, for operators whose rows are any number.
ROWS: dict[str, tuple[int, ...]] = {
    "quantize": (0,), "dequantize": (0, 1), "rotate": (0,), "rotate_quantize": (0,),
    "norm_quantize": (0, 1), "activate_quantize": (0, 1), "activate_round": (0, 1),
    "norm_round": (0, 1), "rms_norm": (0,), "add_rms_norm": (0, 1), "linear": (0,),
    "linear_quantized": (0, 1, 2), "linear_group": (0,), "linear_quantized_group": (0, 1, 2),
    "experts_linear": (0, 1), "experts_linear_quantized": (0, 1, 2, 4), "experts_quantize": (0, 1),
    "experts_mixture": (0, 1, 2), "linear_codebook": (0,), "linear_int8": (0,),
    "dynamic_global_scale": (0,), "observe": (0,),
}  # fmt: skip


def divisor_of(fmt: Format, global_scale: float = 2.0**-8) -> Tensor | None:
    return torch.tensor([1.0 / global_scale]) if fmt.has_global_scale else None


def packed_weight(fmt: Format, rows: int = 5, columns: int = 64) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns, generator=seeded(7)) * 0.1
    g = 2.0**-8 if fmt.has_global_scale else 1.0
    return ops.search(weight, None, g, fmt.key, "naive")


def stacked(fmt: Format, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Three experts."""
    codes, scale = (each.view(3, rows, -1) for each in packed_weight(fmt, 3 * rows))
    return codes, scale, torch.tensor([1.0, 2.0, 4.0])


def samples() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, that need gradients where it has some."""
    fmt, row, square = FORMATS["nvfp4"], torch.randn(64, generator=seeded()), torch.eye(64)
    x, residual = (torch.randn(3, 64, generator=seeded(i), requires_grad=True) for i in (0, 1))
    plain, other = x.detach(), residual.detach()
    weight, blocks = torch.randn(5, 64, generator=seeded(2)), torch.eye(32).repeat(2, 1, 1)
    bias = torch.randn(5, generator=seeded(3), requires_grad=True)
    stored = (*packed_weight(fmt), divisor_of(fmt))
    quantized = (*ops.quantize(plain, divisor_of(fmt), "nvfp4"), divisor_of(fmt))
    group = [[each] * 2 for each in (*stored, bias.detach())]
    rest = (divisor_of(fmt), "nvfp4")
    statistics = (torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    codes, absmax = parity.quantize_codebook(weight, "nf4")
    rows = torch.randint(-127, 128, (5, 64), generator=seeded(), dtype=torch.int8)
    ids, stack = torch.tensor([[0, 2], [1, 0], [3, 2]]), stacked(fmt)
    biases = torch.randn(3, 5, generator=seeded(4), requires_grad=True)
    experts = torch.randn(3, 5, 64, generator=seeded(5), requires_grad=True)
    up = stacked(fmt, 64)
    down = [each[..., : each.shape[-1] // 2].contiguous() for each in up[:2]]
    of_experts = (torch.zeros(3, 2, 32, 32), torch.zeros(3, dtype=torch.int64), torch.zeros(1))
    keys, tables = torch.randn(2, 2, 9, 16), torch.randn(2, 1, 3, 16)
    read = (torch.arange(9) < 7)[None, None, None]
    span = (read, torch.tensor([[0, 7]]).int(), torch.zeros(264, dtype=torch.int32), 0.3)
    return {
        "attention_span": (read,),
        "attention": (torch.randn(2, 4, 3, 16), keys, keys, *span),
        "rotary_attention": (
            *(torch.randn(2, 3, heads, 16) for heads in (4, 2, 2)),
            *(None, row[:16], 1e-6, *tables, torch.arange(3), keys.clone(), keys.clone(), *span),
        ),
        "search": (weight, blocks, 2.0**-8, "nvfp4", "hessian"),
        "search_stack": (weight.expand(2, -1, -1), [2.0**-8, 2.0**-7], "nvfp4", "sse"),
        "joint": (weight, *stored[:2], blocks, 2.0**-8, "nvfp4"),
        "gptq": (weight, square, 2.0**-8, "nvfp4", 0.1, 0.25, 1),
        "observe": (plain, torch.zeros(2, 32, 32), *statistics),
        "observe_full": (plain, torch.zeros(64, 64), *statistics),
        "dequantize": (*stored, "nvfp4", torch.bfloat16),
        "dynamic_global_scale": (x, "nvfp4"),
        "quantize": (x, *rest),
        "norm_quantize": (x, residual, row, row, "layer", 1e-6, *rest),
        "activate_quantize": (x, residual, "silu", *rest),
        "activate_round": (plain, other, "silu"),
        "norm_round": (plain, other, row, 1e-6),
        "rotate": (x, 64),
        "rotate_quantize": (x, 64, *rest),
        "linear": (x, *stored, bias, "nvfp4"),
        "linear_quantized": (x, *quantized, *stored, bias, "nvfp4", 32),
        "linear_group": (plain, *group, "nvfp4"),
        "linear_quantized_group": (plain, *quantized, *group, "nvfp4"),
        "rms_norm": (plain, row, 1e-6),
        "add_rms_norm": (plain, other, row, 1e-6),
        "quantize_codebook": (weight, "nf4"),
        "dequantize_codebook": (codes, absmax, "nf4", (5, 64), torch.float32),
        "linear_codebook": (x, codes, absmax, bias, 5, "nf4"),
        "linear_int8": (x, rows, torch.rand(5), bias, 6.0),
        "experts_linear": (x, ids, *stack, biases, "nvfp4"),
        "experts_linear_quantized": (x, *quantized, ids, *stack, biases, "nvfp4"),
        "experts_quantize": (x, ids, torch.tensor([300.0, 2.0, 0.7]), "nvfp4"),
        "experts_linear_transposed": (torch.randn(3, 2, 5), ids, *stack, None, "nvfp4"),
        "experts_mixture": (
            *(plain, ids, torch.rand(3, 2), *up, None),
            *(*down, up[2], None, "silu", False, 1.0, 0.0, None, "nvfp4"),
        ),
        "experts_dense": (x, ids, experts, biases),
        "experts_outer": (torch.randn(3, 2, 5), plain, ids, 3),
        "all_reduce": (plain, "", False),
        "all_reduce_add": (plain, other, ""),
        "observe_experts": (plain, ids, torch.rand(3, 2), *of_experts, torch.zeros(3)),
    }


def around() -> dict[str, tuple[Any, ...]]:
    """Arguments of `linear_group` with everything that may be around products, of one row too."""
    fmt = get_format("nvfp4")
    row = torch.randn(128, generator=seeded()).bfloat16()
    x = torch.randn(3, 128, generator=seeded(1)).bfloat16()
    one = [[each] for each in (*packed_weight(fmt, 6, 128), divisor_of(fmt), None)]
    two = [each * 2 for each in one]
    residual = torch.randn(3, 6, generator=seeded(2)).bfloat16()
    norm = (square_sums_ref(x), row, 1e-6)
    rounded = (x / 2).to(torch.float8_e4m3fn)
    return {
        "a gate": (x, *two, "nvfp4", "input", "silu"),
        "a gate of halves": (x, *one, "nvfp4", "input", "gelu_tanh"),
        "a residual": (x, *one, "nvfp4", "input", None, residual),
        "a norm": (x, *two, "nvfp4", "input", None, None, *norm),
        "a gate of a norm": (x, *two, "nvfp4", "input", "silu", None, *norm),
        "rounded rows": (rounded, *two, "nvfp4", "fp8", *[None] * 4, 0.0, torch.rand(3, 1)),
    }


def given(value: Any, device: str | torch.device = DEVICE) -> Any:
    """A copy of an argument on a device, of the same strides."""
    if isinstance(value, list):
        return [given(each, device) for each in value]
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.copy_(value.detach()) if 0 not in value.stride() else value.to(device)


def assert_agree(found: Any, expected: Any) -> None:
    """Equal bytes, and numbers up to the order of sums."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if expected.dtype == torch.float8_e4m3fn:
            found, expected = found.view(torch.uint8), expected.view(torch.uint8)
        if not expected.is_floating_point():
            assert torch.equal(found, expected)
        else:
            size = expected.abs().max().item() if expected.numel() else 0.0
            # A norm may be one rounding away before a product.
            near = 1e-5 if expected.dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(found, expected, rtol=near, atol=near * (0.1 + 0.1 * size))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for each, wanted in zip(found, expected, strict=True):
            assert_agree(each, wanted)


def compare(name: str, arguments: tuple[Any, ...], device: str | torch.device = DEVICE) -> None:
    """What kernel and reference return, and what both leave in their arguments."""
    ours, theirs = ([given(each, device) for each in arguments] for _ in range(2))
    found, expected = flat(name)(*ours), flat(name, "reference")(*theirs)
    assert_agree(found, expected)
    assert_agree(ours, theirs)


@pytest.mark.core
def test_every_operator_is_here() -> None:
    """A new operator needs a sample above."""
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "fp4pass::" in n}
    assert {name.partition(".")[0] for name in names} == set(OPERATORS) == set(samples())


@pytest.mark.core
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_has_the_signature_of_its_reference(name: str) -> None:
    declared = OPERATORS[name]
    for place in filter(None, (declared.triton, declared.cpu)):
        module, _, function = place.partition(":")
        kernel = getattr(importlib.import_module(f"fp4pass.{module}"), function)
        crossing, found = (
            [
                (each.name, each.default)
                for each in inspect.signature(function).parameters.values()
                if each.kind is not each.KEYWORD_ONLY
            ]
            for function in (declared.reference, kernel)
        )
        assert found == crossing


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", samples())
def test_it_is_traced(name: str) -> None:
    """Schema, fake, gradients and dynamic shapes."""
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # torch compares no E4M3 numbers, and so no schema with what is written.
    checks += [] if name.endswith("_round") else ["test_schema"]
    operator = getattr(torch.ops.fp4pass, name).default
    torch.library.opcheck(operator, samples()[name], test_utils=checks)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", around())
def test_what_is_around_products_is_traced(name: str) -> None:
    checks = ("test_schema", "test_faketensor")[name == "rounded rows" :]
    torch.library.opcheck(ops.linear_group, around()[name], test_utils=checks)


def marks(name: str) -> Any:
    return pytest.mark.slow if name in SEARCHES else pytest.mark.core if name in CORE else ()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in KERNELS])
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    compare(name, samples()[name])


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", around())
def test_around_products_too(name: str) -> None:
    arguments = around()[name]
    compare("linear_group", arguments)
    # One row, whose kernel computes more; what has the rows of x is cut with it.
    rows = [each[:1] if isinstance(each, Tensor) and len(each) == 3 else each for each in arguments]
    compare("linear_group", tuple(rows))


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "one row": lambda x: x[:1],
    "no rows": lambda x: x[:0],
    # As a convolution before a linear leaves them, and with gaps between.
    "columns first": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ROWS)
def test_zeros_few_rows_none_and_any_strides(name: str, variant: str) -> None:
    """By the kernel, the code for CPUs, and the fake, whose result has the same strides."""
    change, rows = VARIANTS[variant], ROWS[name][: 1 if variant == "zeros" else None]
    arguments = [
        change(each.detach()) if i in rows and isinstance(each, Tensor) else each
        for i, each in enumerate(samples()[name])
    ]
    if OPERATORS[name].triton is not None:
        compare(name, tuple(arguments))
    operator = getattr(torch.ops.fp4pass, name).default
    torch.library.opcheck(operator, [given(x, "cpu") for x in arguments], test_utils=PLAIN)


PLAIN = ("test_faketensor",)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
@pytest.mark.parametrize("name", [each for each in KERNELS if each not in SEARCHES])
def test_on_another_device(name: str) -> None:
    """Which is not the current one."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    ours, theirs = ([given(each, device) for each in samples()[name]] for _ in range(2))
    found = getattr(torch.ops.fp4pass, name).default(*ours)
    assert_agree(found, flat(name, "reference")(*theirs))
    assert torch.cuda.current_device() == 0
