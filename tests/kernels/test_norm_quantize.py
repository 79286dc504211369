"""RMSNorm and quantization in one: transformers' own norm, and the reference's bits from Triton."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import DTYPES, cases
from kernels.test_quantize import divisor_of
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.quantize import norm_triton as module
from fp4pass.kernels.quantize.naive import quantize_ref, rms_norm_quantize_ref
from fp4pass.kernels.quantize.norm_triton import rms_norm_quantize_triton

# What the interpreter's numpy says of infinite and absent quotients.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)
    x = torch.randn(shape, generator=generator) * sizes
    weight = torch.randn(shape[-1:], generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def nearest(x: Tensor, weight: Tensor) -> list[Tensor]:
    """What the norm may be: the reference's rsqrt, and those a few roundings to either side."""
    wide = x.to(torch.float32)
    exact = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    near = [exact * (1 + i * 2.0**-24) for i in range(-8, 9)]
    return [weight * (wide * inverse).to(x.dtype) for inverse in near]


def check(x: Tensor, weight: Tensor, divisor: Tensor | None, fmt: Format) -> None:
    """The bits of the reference, row by row, for one of the norms that a sum's order allows."""
    divisor = None if divisor is None else divisor.to(DEVICE)
    packed, scale = rms_norm_quantize_triton(x, weight, EPS, divisor, fmt)
    wanted = rms_norm_quantize_ref(x, weight, EPS, divisor, fmt)
    assert packed.shape == wanted[0].shape and scale.shape == wanted[1].shape
    agrees = (wanted[0] == packed).all(-1) & (wanted[1] == scale).all(-1)
    for normal in () if agrees.all() else nearest(x, weight):
        codes, bits = quantize_ref(normal, divisor, fmt)
        agrees |= (codes == packed).all(-1) & (bits == scale).all(-1)
    assert agrees.all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_the_norm_of_transformers(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight = inputs((5, 64), dtype)
    norm = llama.LlamaRMSNorm(64, eps=EPS).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        normal = norm(x)
    for fmt in VARIANTS:
        divisor = divisor_of(fmt, 0.5)
        divisor = None if divisor is None else divisor.to(DEVICE)
        wanted = quantize_ref(normal, divisor, fmt)
        found = rms_norm_quantize_ref(x, weight, EPS, divisor, fmt)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


# One block, and more blocks than a program has lanes.
COLUMNS = [
    (get_format("nvfp4"), torch.bfloat16, 544),
    (get_format("nvfp4:32"), torch.float32, 32),
    (get_format("mxfp4"), torch.float16, 544),
    (get_format("mxfp4:16"), torch.bfloat16, 32),
]


@pytest.mark.parametrize(
    ("fmt", "dtype", "columns"), cases(COLUMNS, itertools.product(VARIANTS, DTYPES, (32, 544)))
)
def test_triton(fmt: Format, dtype: torch.dtype, columns: int) -> None:
    check(*inputs((2, columns), dtype), divisor_of(fmt, 2.0**-8), fmt)


# Both ways of dividing by a global scale.
EXACT = [
    (get_format("nvfp4"), torch.bfloat16, 3.0),
    (get_format("nvfp4:32"), torch.float16, 0.25),
    (get_format("mxfp4"), torch.float32, 0.25),
]


@pytest.mark.parametrize(
    ("fmt", "dtype", "g"), cases(EXACT, itertools.product(VARIANTS, DTYPES, (0.25, 3.0)))
)
def test_where_the_mean_is_exact_all_bits_are_equal(
    fmt: Format, dtype: torch.dtype, g: float
) -> None:
    """Small integers whose squares sum to 4^k times K, so that the norm is exact, ties and all."""
    rows = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0], [-2.0, -2.0, 2.0, 2.0]])
    x = rows.repeat(1, 24).to(DEVICE, dtype)
    weight = (torch.arange(96) % 61 - 30).to(DEVICE, dtype)
    divisor = divisor_of(fmt, g)
    divisor = None if divisor is None else divisor.to(DEVICE)
    packed, scale = rms_norm_quantize_triton(x, weight, 0.0, divisor, fmt)
    wanted = rms_norm_quantize_ref(x, weight, 0.0, divisor, fmt)
    assert torch.equal(packed, wanted[0]) and torch.equal(scale, wanted[1])


# The kinds of scales.
ZEROS = [(get_format("nvfp4"), torch.bfloat16), (get_format("mxfp4"), torch.float16)]


@pytest.mark.parametrize(("fmt", "dtype"), cases(ZEROS, itertools.product(VARIANTS, DTYPES)))
def test_zeros_and_what_is_not_finite(fmt: Format, dtype: torch.dtype) -> None:
    x, weight = inputs((4, 64), dtype)
    x[1] = 0
    x[2, 5] = torch.nan
    x[3, 40] = torch.inf
    weight[3] = -0.0
    divisor = divisor_of(fmt, 0.5)
    divisor = None if divisor is None else divisor.to(DEVICE)
    packed, scale = rms_norm_quantize_triton(x, weight, EPS, divisor, fmt)
    wanted = rms_norm_quantize_ref(x, weight, EPS, divisor, fmt)
    # A row with infinity is zeros, and NaN where infinity meets zero.
    assert torch.equal(packed[1:], wanted[0][1:]) and torch.equal(scale[1:], wanted[1][1:])


def test_the_signs_of_what_rounds_to_zero() -> None:
    x, weight = inputs((2, 32), torch.bfloat16)
    weight[::3] *= 1e-20
    fmt = get_format("mxfp4")
    packed, _ = rms_norm_quantize_triton(x, weight, EPS, None, fmt)
    assert torch.equal(unpack_codes(packed) >> 3, (x.signbit() ^ weight.signbit()).to(torch.uint8))


@settings(max_examples=3, deadline=None)
@given(
    shape=st.lists(st.integers(0, 2), max_size=2),
    blocks=st.integers(1, 9),
    fmt=st.sampled_from(VARIANTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(
    shape: list[int], blocks: int, fmt: Format, dtype: torch.dtype, seed: int
) -> None:
    check(*inputs((*shape, blocks * fmt.block), dtype, seed), divisor_of(fmt, 0.25), fmt)


PLANS = {
    32: (32, 1),
    64: (64, 1),
    128: (128, 2),
    250: (256, 4),
    33: (32, 1),
    190: (64, 2),
    380: (128, 4),
}


@pytest.mark.parametrize("blocks", PLANS)
def test_every_plan(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Rows held and rows read twice, by one program."""
    assert module._lanes_and_warps(blocks) == PLANS[blocks]
    monkeypatch.setattr(module, "_WARPS", PLANS[blocks][1])
    fmt = get_format("nvfp4" if blocks % 4 else "nvfp4:32")
    for dtype in DTYPES if DEVICE == "cuda" else [torch.bfloat16]:
        check(*inputs((2, blocks * fmt.block), dtype), divisor_of(fmt, 0.25), fmt)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [2560, 4096, 16384])
def test_large(dtype: torch.dtype, columns: int) -> None:
    fmt = get_format("nvfp4")
    check(*inputs((1031, columns), dtype), divisor_of(fmt, 2.0**-8), fmt)
