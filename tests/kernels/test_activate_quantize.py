"""Activations and quantization in one: eager PyTorch's own, and what Triton makes of them."""

from __future__ import annotations

import pytest
import torch
from blocks import VARIANTS
from kernel_cases import DEVICE, DTYPES, covering, divisor, dtypes, quiet, seeded
from stable_codes import assert_agree
from torch import Tensor
from torch.nn import functional as F

from fp4pass.core.formats import Format
from fp4pass.kernels.quantize.naive import ACTIVATIONS, activate_quantize_ref, quantize_ref
from fp4pass.kernels.quantize.triton import activate_quantize_triton

pytestmark = quiet


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A gate and a factor, halves of one tensor."""
    generator = seeded(seed)
    both = 3 * torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator)
    gate, up = both.to(DEVICE, dtype).chunk(2, -1)
    return gate, up


def check(x: Tensor, up: Tensor | None, activation: str, g: float, fmt: Format) -> None:
    found = activate_quantize_triton(x, up, activation, divisor(fmt, g), fmt)
    active = ACTIVATIONS[activation](x)
    # The last bit of 1 + tanh is what GELU leaves of it.
    error = x.double().abs() * 2.0**-22
    if up is not None:
        active, error = active * up, error * up.double().abs()
    if activation == "gelu_new" and x.dtype != torch.float32:
        # Any of its steps may round otherwise, and 1 + tanh has lost bits before.
        error = error + x.double().abs() * torch.finfo(x.dtype).eps
    assert_agree(found, active, error, divisor(fmt, g), fmt)


@dtypes
def test_the_reference_is_what_eager_pytorch_computes(dtype: torch.dtype) -> None:
    modules = pytest.importorskip("transformers.activations")
    x, up = inputs((5, 64), dtype)
    eager = {
        "silu": F.silu(x),
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "gelu_new": modules.NewGELUActivation()(x),
    }
    assert eager.keys() == ACTIVATIONS.keys()
    for fmt in VARIANTS:
        d = divisor(fmt, 0.5)
        for name, active in eager.items():
            for factor, wanted in ((None, active), (up, active * up)):
                found = activate_quantize_ref(x, factor, name, d, fmt)
                for a, b in zip(found, quantize_ref(wanted, d, fmt), strict=True):
                    assert torch.equal(a, b)


@pytest.mark.quick(2)
@covering(("fmt", "dtype", "activation"), VARIANTS, DTYPES, list(ACTIVATIONS))
def test_triton(fmt: Format, dtype: torch.dtype, activation: str) -> None:
    x, up = inputs((3, 2, 96), dtype)
    check(x, None, activation, 2.0**-8, fmt)
    check(x, up, activation, 3.0, fmt)


@pytest.mark.quick(2)
@covering(("fmt", "dtype", "activation"), VARIANTS, DTYPES, list(ACTIVATIONS))
def test_zeros_and_what_is_not_finite(fmt: Format, dtype: torch.dtype, activation: str) -> None:
    x, up = (each.clone() for each in inputs((6, 64), dtype))
    x[0] = 0
    x[1] = -0.0
    x[2, 5] = torch.nan
    x[3, 40] = torch.inf
    x[4, 20] = -torch.inf
    # Where a gate is closed.
    x[5] = torch.linspace(-300, -80, 64)
    up[:, 7] = torch.inf
    d = divisor(fmt, 0.5)
    for factor in (None, up):
        found = activate_quantize_triton(x, factor, activation, d, fmt)
        wanted = activate_quantize_ref(x, factor, activation, d, fmt)
        rows = slice(0, 5 if factor is None else 2)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a[rows], b[rows])
        assert torch.equal(found[1] == fmt.scale.nan, wanted[1] == fmt.scale.nan)
        # Of a closed gate the codes are equal where the scale is the least there is.
        if factor is None and not fmt.scale.mantissa_bits == 0:
            assert torch.equal(found[0][5], wanted[0][5])
