"""The Triton quantizer gives the bits of the reference, whichever way it divides."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from blocks import VARIANTS
from kernel_cases import (
    DEVICE,
    DTYPES,
    cases,
    divisor_of,
    dtypes,
    formats,
    quiet,
    seeded,
)
from kernels.test_quantize import INPUTS
from torch import Tensor

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.quantize import triton as module
from fp4pass.kernels.quantize.naive import dynamic_global_scale_ref, quantize_ref
from fp4pass.kernels.quantize.triton import dynamic_global_scale_triton, quantize_triton

pytestmark = quiet

HALVES = [torch.bfloat16, torch.float16]

# 1 / g of power-of-two and other global scales, some beyond what a reciprocal serves.
SCALES = [1.0, 2.0**-9, 2.0**63, 2.0**-63, 2.0**64, 2.0**-126, 2.0**126, 3.0, 0.7, 1e-30, 1e30]


def check(x: Tensor, divisor: Tensor | None, fmt: Format) -> None:
    divisor = None if divisor is None else divisor.to(x.device)
    packed, scale = quantize_triton(x, divisor, fmt)
    wanted = quantize_ref(x, divisor, fmt)
    assert packed.shape == wanted[0].shape and packed.is_contiguous()
    assert torch.equal(scale, wanted[1])
    assert torch.equal(packed, wanted[0])


def spread(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers times powers of two, all rows and columns of other sizes."""
    generator = seeded(seed)
    x = torch.randn(shape, generator=generator)
    return x * 2.0 ** torch.randint(-9, 9, shape, generator=generator)


def inputs(name: str, dtype: torch.dtype | None) -> Tensor:
    """One of the reference's own inputs, within the range of the dtype if one is asked for."""
    x = INPUTS[name](seeded(0))
    if dtype is not None:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest).to(dtype)
    return x


# Every input in one format, and in every format the one with all kinds of blocks.
READ = [(VARIANTS[0], name) for name in INPUTS] + [(fmt, "special") for fmt in VARIANTS[1:]]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("fmt", "name"), cases(READ, itertools.product(VARIANTS, INPUTS)))
def test_the_bits_of_the_reference(fmt: Format, name: str) -> None:
    for dtype in (None, *HALVES) if name in ("special", "largest", "least") else (None,):
        x = inputs(name, dtype)
        divisor = divisor_of(fmt, fmt.global_scale_for(x.abs().max().item()))
        check(x.to(DEVICE), divisor, fmt)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", INPUTS)
def test_the_dynamic_global_scale(name: str) -> None:
    for dtype in (None, *HALVES) if name in ("special", "largest", "least") else (None,):
        x = inputs(name, dtype).to(DEVICE)
        for part, key in ((x[3], "nvfp4"), (x, "nvfp4:16:multiplier"), (x, "mxfp4")):
            fmt = get_format(key)
            assert torch.equal(
                dynamic_global_scale_triton(part, fmt), dynamic_global_scale_ref(part, fmt)
            )


# Where amax is subnormal, where k is clamped, and where it is not.
EXPONENTS = [(-149,), (-126,), (-115,), (0,), (127,)]
MORE_EXPONENTS = [(k,) for k in (-140, -127, -125, -114, -1, 126)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("k", cases(EXPONENTS, MORE_EXPONENTS))
def test_the_dynamic_global_scale_at_boundaries(k: int) -> None:
    fmt = get_format("nvfp4")
    for factor in (1.0, 2688 / 2048):
        amax = torch.tensor(factor * 2.0**k)
        for value in (amax, torch.nextafter(amax, torch.tensor(math.inf)), amax * (1 - 2**-24)):
            x = value.repeat(1, 16).to(DEVICE)
            assert torch.equal(
                dynamic_global_scale_triton(x, fmt), dynamic_global_scale_ref(x, fmt)
            )


@pytest.mark.quick(1)
@dtypes
def test_the_dynamic_global_scale_of_nothing_and_of_what_is_not_finite(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    rows = [[0.0] * 16, [math.nan] * 16, [3.0, math.inf, -math.inf, math.nan] * 4]
    for x in (torch.empty(0, 16), *(torch.tensor([row]) for row in rows)):
        x = x.to(DEVICE, dtype)
        assert torch.equal(dynamic_global_scale_triton(x, fmt), dynamic_global_scale_ref(x, fmt))


# All in one dtype; in the others one of each way to divide.
DIVIDED = [(torch.bfloat16, g) for g in SCALES] + [(torch.float16, 3.0), (torch.float32, 2.0**64)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("dtype", "scale"), cases(DIVIDED, itertools.product(DTYPES, SCALES)))
def test_any_global_scale(dtype: torch.dtype, scale: float) -> None:
    """Each way of dividing, and scales that saturate, vanish and are subnormal."""
    x = spread((8, 32)) * torch.tensor([1.0, 1e3, 1e-2, 1e-3, 1e5, 1e-5, 0.0, -1.0]).unsqueeze(1)
    x = torch.cat((x, x * min(max(scale, 1e-36), 1e36)))
    for block in (16, 32) if dtype != torch.bfloat16 or DEVICE == "cuda" else (16,):
        check(x.to(DEVICE, dtype), torch.tensor([1 / scale]), get_format("nvfp4", block))


def ties(scale: float, dtype: torch.dtype) -> Tensor:
    """Blocks whose step is `scale`, with every tie and its neighbours in the dtype: [2, 32]."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scale
    exact = middles.to(dtype)
    up = torch.nextafter(exact, torch.full_like(exact, math.inf))
    down = torch.nextafter(exact, torch.zeros_like(exact))
    largest = torch.tensor([6 * scale], dtype=dtype)
    row = torch.cat((largest, exact, up, largest, down, -exact, largest, largest))
    return torch.stack((row[:32], -row[:32]))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("block", "dtype"),
    cases([(16, torch.bfloat16), (32, torch.float32)], itertools.product((16, 32), DTYPES)),
)
def test_ties_at_every_scale(block: int, dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4", block)
    scales = fmt.scale.values if DEVICE == "cuda" else fmt.scale.values[:34:3]
    x = torch.cat([ties(scale, dtype) for scale in scales])
    for g in (1.0, 2.0**-7, 3.0):
        check((x * g).to(DEVICE), torch.tensor([1 / g]), fmt)


@pytest.mark.quick(2)
@formats
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_bit_pattern(fmt: Format, dtype: torch.dtype) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    share = 1 if DEVICE == "cuda" else 32
    for x in (bits, bits.view(256, 256).t().flatten()):
        rows = x.view(dtype).view(-1, 32)[::share]
        check(rows.to(DEVICE), divisor_of(fmt, 1.0), fmt)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(5, 16), (2, 4096)])
def test_more_than_one_tile_and_program(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """Small limits, so that the loops of a large tensor run on a small one."""
    monkeypatch.setattr(module, "_AMAX_PROGRAMS", 2)
    monkeypatch.setattr(module, "_AMAX_WORDS", 1)
    x = spread(shape).to(DEVICE)
    fmt = get_format("nvfp4")
    divisor = dynamic_global_scale_ref(x, fmt)
    assert torch.equal(dynamic_global_scale_triton(x, fmt), divisor)
    check(x, divisor, fmt)


@pytest.mark.parametrize("multiplier", [0.0123, 0.25, 7.7])
def test_a_stored_multiplier(multiplier: float) -> None:
    fmt = get_format("nvfp4").with_multiplier()
    x = torch.randn(9, 64, generator=seeded(1), device="cpu").to(DEVICE)
    g = torch.tensor([multiplier], device=DEVICE)
    check(x, g, fmt)
    # The law: the block scale is amax / (6 g), rounded.
    amax = x.view(9, 4, 16).abs().amax(-1)
    wanted = (amax / (6 * g)).clamp(2.0**-9, 448).cpu().to(torch.float8_e4m3fn)
    assert torch.equal(quantize_ref(x, g, fmt)[1].cpu().view(torch.float8_e4m3fn), wanted)
