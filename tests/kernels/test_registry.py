"""Every operator that has a kernel: what its reference computes, also of zeros and of one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.cases import flat
from ops.test_ops import calls
from torch import Tensor

from fp4pass.ops.registration import OPERATORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [name for name, operator in OPERATORS.items() if operator.triton is not None]

# They take seconds in the interpreter, and have tests of their own.
SEARCHES = ("gptq", "joint", "search", "search_stack")

# One of each kernel that others are like.
CORE = ("linear", "linear_quantized", "experts_linear", "attention", "rotary_attention", "observe")

# Operators whose first argument alone has rows.
ROWS = ("linear", "linear_codebook", "quantize", "rotate", "rotate_quantize")

# numpy, in the interpreter, says when a number leaves float32.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def given(value: Any) -> Any:
    """A copy of an argument on the device."""
    if isinstance(value, list):
        return [given(each) for each in value]
    return value.detach().clone().to(DEVICE) if isinstance(value, Tensor) else value


def assert_agree(found: Any, expected: Any) -> None:
    """Equal bytes, and numbers up to the order of sums."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        if expected.dtype == torch.float8_e4m3fn:
            found, expected = found.view(torch.uint8), expected.view(torch.uint8)
        if not expected.is_floating_point():
            assert torch.equal(found, expected)
        else:
            size = expected.abs().max().item() if expected.numel() else 0.0
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 + 1e-6 * size)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            assert_agree(each, other)


def compare(name: str, arguments: tuple[Any, ...]) -> None:
    """What both return, and what both leave in their arguments."""
    ours, theirs = ([given(each) for each in arguments] for _ in range(2))
    assert_agree(flat(name)(*ours), flat(name, "reference")(*theirs))
    assert_agree(ours, theirs)


def marks(name: str) -> Any:
    return pytest.mark.slow if name in SEARCHES else pytest.mark.core if name in CORE else ()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in KERNELS])
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    compare(name, calls()[name])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ROWS)
def test_zeros_and_one_row(name: str) -> None:
    x, *rest = calls()[name]
    compare(name, (torch.zeros_like(x), *rest))
    compare(name, (x[:1], *rest))
