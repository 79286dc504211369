"""Norms, of sums too, or activations, and quantization in one kernel: sums to the bit, and the
rest wherever no last bit decides it."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import VARIANTS
from kernel_cases import DEVICE, DTYPES, covering, divisor, dtypes, quiet, seeded
from stable_codes import assert_agree
from torch import Tensor
from torch.nn import functional as F

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.quantize import triton as module
from fp4pass.kernels.quantize.naive import (
    ACTIVATIONS,
    activate_quantize_ref,
    norm_quantize_ref,
    quantize_ref,
)
from fp4pass.kernels.quantize.triton import activate_quantize_triton, norm_quantize_triton

pytestmark = quiet

EPS = 1e-6

# Each norm, and which of its parameters it has.
NORMS = {
    "rms": ("rms", True, False),
    "layer": ("layer", True, True),
    "weight alone": ("layer", True, False),
    "bias alone": ("layer", False, True),
    "bare": ("layer", False, False),
}
SUMS = [(name, adds) for name in NORMS for adds in (False, True)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """x and a residual, whose sum has a mean, a weight and a bias; rows of many sizes."""
    generator = seeded(seed)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    made = [torch.randn(each, generator=generator) for each in shapes]
    made[0] = 2 * made[0] + torch.randn((*shape[:-1], 1), generator=generator)
    sizes = 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)
    made[:2] = [each * sizes for each in made[:2]]
    return [each.to(DEVICE, dtype) for each in made]


def arguments(name: str, given: list[Tensor], adds: bool) -> list[object]:
    """Those of a norm, from x, a residual, a weight and a bias, up to its kind."""
    kind, *has = NORMS[name]
    x, residual, *parameters = given
    kept = [each if has[i] else None for i, each in enumerate(parameters)]
    return [x, residual if adds else None, *kept, kind]


def rms_norms(x: Tensor, weight: Tensor) -> list[Tensor]:
    """What the norm may be: by the exact rsqrt, and by those a few roundings to either side."""
    wide = x.to(torch.float32)
    exact = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    near = [exact * (1 + i * 2.0**-24) for i in (0, *range(-8, 0), *range(1, 9))]
    return [weight * (wide * inverse).to(x.dtype) for inverse in near]


def check(name: str, given: list[Tensor], adds: bool, fmt: Format, g: float = 0.25) -> None:
    """The bits of quantizing one of the norms that a sum's order allows."""
    d = divisor(fmt, g)
    given_arguments = arguments(name, given, adds)
    total, *found = norm_quantize_triton(*given_arguments, EPS, d, fmt)
    x = given[0] + given[1] if adds else given[0]
    assert torch.equal(total, x if adds else x.new_empty(0))
    _, _, weight, bias, kind = given_arguments
    if kind == "rms":
        agrees = torch.zeros(x.shape[:-1], dtype=torch.bool, device=DEVICE)
        for normal in rms_norms(x, weight):
            wanted = quantize_ref(normal, d, fmt)
            assert [each.shape for each in found] == [each.shape for each in wanted]
            agrees |= (wanted[0] == found[0]).all(-1) & (wanted[1] == found[1]).all(-1)
        assert agrees.all()
        return
    normal = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    # A mean is off by roundings of the largest value.
    size = F.layer_norm(x, x.shape[-1:], None, None, EPS).abs().amax(-1, True) + 1
    factor = torch.ones_like(x[..., :1]) if weight is None else weight.abs()
    assert_agree(tuple(found), normal, size.float() * factor.float() * 2.0**-20, d, fmt)


@dtypes
def test_the_references_are_what_eager_pytorch_computes(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, residual, weight, bias = inputs((5, 64), dtype)
    norms = {"layer": torch.nn.LayerNorm(64, eps=EPS), "rms": llama.LlamaRMSNorm(64, eps=EPS)}
    for (name, norm), fmt in itertools.product(norms.items(), VARIANTS):
        norm.to(DEVICE, dtype).requires_grad_(False)
        norm.weight.copy_(weight)
        if name == "layer":
            norm.bias.copy_(bias)
        for adds in (False, True):
            d, each = divisor(fmt, 0.5), x + residual if adds else x
            given = arguments(name, [x, residual, weight, bias], adds)
            wanted = (each if adds else x.new_empty(0), *quantize_ref(norm(each), d, fmt))
            for a, b in zip(norm_quantize_ref(*given, EPS, d, fmt), wanted, strict=True):
                assert torch.equal(a, b)


@pytest.mark.quick(2)
@covering(("fmt", "dtype", "columns", "norm"), VARIANTS, DTYPES, (32, 96, 544), SUMS)
def test_triton(fmt: Format, dtype: torch.dtype, columns: int, norm: tuple[str, bool]) -> None:
    name, adds = norm
    check(name, inputs((2, columns), dtype), adds, fmt, 2.0**-8)


@pytest.mark.quick(1)
@covering(("fmt", "dtype", "g"), VARIANTS, DTYPES, (3.0, 0.25))
def test_where_the_mean_is_exact_all_bits_are_equal(
    fmt: Format, dtype: torch.dtype, g: float
) -> None:
    """Small integers whose squares sum to 4^k times K, so that the norm is exact, ties and all."""
    rows = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0], [-2.0, -2.0, 2.0, 2.0]])
    x = rows.repeat(1, 24).to(DEVICE, dtype)
    weight = (torch.arange(96) % 61 - 30).to(DEVICE, dtype)
    given = (x, None, weight, None, "rms", 0.0, divisor(fmt, g), fmt)
    for a, b in zip(norm_quantize_triton(*given), norm_quantize_ref(*given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.quick(1)
@covering(("fmt", "dtype", "name"), VARIANTS, DTYPES, list(NORMS))
def test_zeros_and_what_is_not_finite(fmt: Format, dtype: torch.dtype, name: str) -> None:
    x, residual, weight, bias = inputs((6, 64), dtype)
    x[1] = residual[1] = 0
    x[2, 5] = torch.nan
    residual[3, 40] = x[3, 40] = torch.inf
    x[4], residual[4] = -0.0, -0.0
    x[5], residual[5] = 3, -3
    weight[3] = -0.0
    for adds in (False, True):
        given = (*arguments(name, [x, residual, weight, bias], adds), EPS, divisor(fmt, 0.5), fmt)
        total, *found = norm_quantize_triton(*given)
        sums, *wanted = norm_quantize_ref(*given)
        if adds:
            assert torch.equal(total.isnan(), sums.isnan())
            assert torch.equal(total.nan_to_num(), sums.nan_to_num())
            assert torch.equal(total.signbit()[1], sums.signbit()[1]) and total.signbit()[4].all()
        # A row with infinity is zeros, and NaN where infinity meets zero.
        last = 6 if adds else 5
        codes, expected = (unpack_codes(each[0])[1:last] for each in (found, wanted))
        if name != "rms":
            # Which zero x - mean is depends on how the mean was summed.
            codes, expected = (each.where(each != 8, 0) for each in (codes, expected))
        assert torch.equal(codes, expected) and torch.equal(found[1][1:last], wanted[1][1:last])


PLANS = {64: (64, 1), 250: (256, 4), 33: (32, 1), 190: (64, 2)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("blocks", PLANS)
def test_every_plan(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Rows held and rows read twice, by one program, of strided x."""
    assert module._lanes_and_warps(blocks) == PLANS[blocks]
    monkeypatch.setattr(module, "_NORM_WARPS", PLANS[blocks][1])
    fmt = get_format("nvfp4" if blocks % 4 else "nvfp4:32")
    for dtype in DTYPES if DEVICE == "cuda" else [torch.bfloat16]:
        x, *rest = inputs((2, blocks * fmt.block), dtype)
        name, adds = ("layer", True) if blocks in (64, 190) else ("rms", False)
        check(name, [x.t().contiguous().t(), *rest], adds, fmt)


# ---- activations ------------------------------------------------------------------------------


def gates(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A gate and a factor, halves of one tensor."""
    generator = seeded(seed)
    both = 3 * torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator)
    gate, up = both.to(DEVICE, dtype).chunk(2, -1)
    return gate, up


def check_activation(x: Tensor, up: Tensor | None, activation: str, g: float, fmt: Format) -> None:
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
    x, up = gates((5, 64), dtype)
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
def test_activations(fmt: Format, dtype: torch.dtype, activation: str) -> None:
    x, up = gates((3, 2, 96), dtype)
    check_activation(x, None, activation, 2.0**-8, fmt)
    check_activation(x, up, activation, 3.0, fmt)


@pytest.mark.quick(2)
@covering(("fmt", "dtype", "activation"), VARIANTS, DTYPES, list(ACTIVATIONS))
def test_activations_of_zeros_and_what_is_not_finite(
    fmt: Format, dtype: torch.dtype, activation: str
) -> None:
    x, up = (each.clone() for each in gates((6, 64), dtype))
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
