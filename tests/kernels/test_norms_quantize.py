"""LayerNorm, and norms of sums, with quantization in one kernel: sums to the bit, and the rest
wherever no last bit decides it. RMSNorm by itself is in test_norm_quantize.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import DTYPES, cases, formats_and_dtypes
from kernels.stable import assert_agree
from kernels.test_quantize import divisor_of
from torch import Tensor
from torch.nn import functional as F

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.quantize import norm_triton as module
from fp4pass.kernels.quantize.naive import (
    add_layer_norm_quantize_ref,
    add_rms_norm_quantize_ref,
    layer_norm_quantize_ref,
    quantize_ref,
)

# What the interpreter's numpy says of infinite and absent quotients.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Each norm, with and without parameters, in one of the dtypes and the formats.
KINDS = ["rms", "layer", "bare"]
ZEROS = [
    (get_format("nvfp4"), torch.bfloat16, "rms"),
    (get_format("mxfp4"), torch.float32, "layer"),
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """x and a residual, whose sum has a mean, a weight and a bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    made = [torch.randn(each, generator=generator) for each in shapes]
    made[0] = 2 * made[0] + torch.randn((*shape[:-1], 1), generator=generator)
    return [each.to(DEVICE, dtype) for each in made]


def divisor(fmt: Format, global_scale: float) -> Tensor | None:
    found = divisor_of(fmt, global_scale)
    return None if found is None else found.to(DEVICE)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * (wide * inverse).to(x.dtype)


def check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    g: float = 0.25,
    sums_alone: bool = False,
) -> None:
    """Both norms of the sum, and LayerNorm of x."""
    d = divisor(fmt, g)
    total = x + residual
    for each in (total,) if sums_alone else (total, x):
        if each is x:
            found = module.layer_norm_quantize_triton(x, weight, bias, EPS, d, fmt)
        else:
            found = module.add_layer_norm_quantize_triton(x, residual, weight, bias, EPS, d, fmt)
        normal = F.layer_norm(each, each.shape[-1:], weight, bias, EPS)
        if len(found) == 3:
            assert torch.equal(found[0], total)
        # A mean is off by roundings of the largest value.
        size = F.layer_norm(each, each.shape[-1:], None, None, EPS).abs().amax(-1, True) + 1
        factor = torch.ones_like(x[..., :1]) if weight is None else weight.abs()
        assert_agree(found[-2:], normal, size.float() * factor.float() * 2.0**-20, d, fmt)
    if weight is not None and not sums_alone:
        found = module.add_rms_norm_quantize_triton(x, residual, weight, EPS, d, fmt)
        assert torch.equal(found[0], total)
        normal = rms_norm(total, weight)
        assert_agree(found[1:], normal, normal.float().abs() * 2.0**-21, d, fmt)


@dtypes
def test_the_references_are_what_eager_pytorch_computes(dtype: torch.dtype) -> None:
    x, residual, weight, bias = inputs((5, 64), dtype)
    norm = torch.nn.LayerNorm(64, eps=EPS).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
        normal, summed = norm(x), norm(x + residual)
    for fmt in VARIANTS:
        d = divisor(fmt, 0.5)
        found = (
            *layer_norm_quantize_ref(x, weight, bias, EPS, d, fmt),
            *add_layer_norm_quantize_ref(x, residual, weight, bias, EPS, d, fmt),
            *add_rms_norm_quantize_ref(x, residual, weight, EPS, d, fmt),
        )
        wanted = (
            *quantize_ref(normal, d, fmt),
            *(x + residual, *quantize_ref(summed, d, fmt)),
            *(x + residual, *quantize_ref(rms_norm(x + residual, weight), d, fmt)),
        )
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


@formats_and_dtypes
def test_triton(fmt: Format, dtype: torch.dtype) -> None:
    check(*inputs((1, 96), dtype), fmt, 2.0**-8)


@pytest.mark.parametrize("dtype", cases([(torch.bfloat16,)], ((dtype,) for dtype in DTYPES)))
def test_without_weight_or_bias(dtype: torch.dtype) -> None:
    fmt = get_format("mxfp4")
    x, residual, weight, bias = inputs((1, 544), dtype)
    check(x, residual, weight, None, fmt, sums_alone=True)
    check(x, residual, None, bias, fmt, sums_alone=True)
    check(x, residual, None, None, fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype", "kind"), cases(ZEROS, itertools.product(VARIANTS, DTYPES, KINDS))
)
def test_zeros_and_what_is_not_finite(fmt: Format, dtype: torch.dtype, kind: str) -> None:
    x, residual, weight, bias = inputs((6, 64), dtype)
    x[1] = residual[1] = 0
    x[2, 5] = torch.nan
    residual[3, 40] = torch.inf
    x[4], residual[4] = -0.0, -0.0
    x[5], residual[5] = 3, -3
    d = divisor(fmt, 0.5)
    triton, ref, scaling = {
        "rms": (module.add_rms_norm_quantize_triton, add_rms_norm_quantize_ref, (weight,)),
        "layer": (
            module.add_layer_norm_quantize_triton,
            add_layer_norm_quantize_ref,
            (weight, bias),
        ),
        "bare": (module.add_layer_norm_quantize_triton, add_layer_norm_quantize_ref, (None, None)),
    }[kind]
    found = triton(x, residual, *scaling, EPS, d, fmt)
    wanted = ref(x, residual, *scaling, EPS, d, fmt)
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    assert torch.equal(found[0].nan_to_num(), wanted[0].nan_to_num())
    assert torch.equal(found[0].signbit()[1], wanted[0].signbit()[1])
    assert found[0].signbit()[4].all()
    codes, expected = (unpack_codes(each[1])[1:] for each in (found, wanted))
    if kind != "rms":
        # Which zero x - mean is depends on how the mean was summed.
        codes, expected = (each.where(each != 8, 0) for each in (codes, expected))
    assert torch.equal(codes, expected) and torch.equal(found[2][1:], wanted[2][1:])


@settings(max_examples=3, deadline=None)
@given(
    shape=st.lists(st.integers(0, 2), max_size=1),
    blocks=st.integers(2, 5),
    fmt=st.sampled_from(VARIANTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(
    shape: list[int], blocks: int, fmt: Format, dtype: torch.dtype, seed: int
) -> None:
    check(*inputs((*shape, blocks * fmt.block), dtype, seed), fmt)


@pytest.mark.parametrize("blocks", [48, 190])
def test_rows_held_and_rows_read_again(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """By one program, of strided x."""
    lanes, warps = module._lanes_and_warps(blocks)
    assert (blocks <= lanes) == (blocks == 48)
    monkeypatch.setattr(module, "_WARPS", warps)
    fmt = get_format("nvfp4")
    x, residual, weight, bias = inputs((2, blocks * fmt.block), torch.bfloat16)
    check(x.t().contiguous().t(), residual, weight, bias, fmt, sums_alone=True)


def test_float64_is_added_as_it_is() -> None:
    x, residual, *_ = inputs((3, 64), torch.float32)
    x, residual = x.double() / 3, residual.double() / 7
    fmt = get_format("mxfp4")
    total, packed, scale = module.add_layer_norm_quantize_triton(
        x, residual, None, None, EPS, None, fmt
    )
    assert torch.equal(total, x + residual)
    normal = F.layer_norm(total.float(), (64,), eps=EPS)
    assert_agree((packed, scale), normal, torch.full_like(normal, 2.0**-18), None, fmt)
