"""Codebooks on a GPU (or in Triton's interpreter): the bits of the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import cases
from kernels.conftest import poisoned as poisoned
from torch import Tensor

from fp4pass.parity.codebook_triton import dequantize_codebook_triton, quantize_codebook_triton
from fp4pass.parity.codebooks import (
    BLOCK_SIZES,
    CODEBOOKS,
    Codebook,
    dequantize_codebook_ref,
    get_codebook,
    quantize_codebook_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
every_codebook = pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=lambda c: c.name)
# Every table in one dtype, and one table in every dtype.
RANDOM = [
    *((name, torch.bfloat16) for name in CODEBOOKS),
    *(("nf4", dtype) for dtype in DTYPES if dtype != torch.bfloat16),
]

# numpy, in the interpreter, says when a value leaves float16 or is not a number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    assert torch.equal(found.cpu().contiguous().view(whole), expected.contiguous().view(whole))


def compare(x: Tensor, codebook: Codebook, dtypes: Sequence[torch.dtype] = ()) -> None:
    """Quantize x, and dequantize the reference's codes to its dtype or to others."""
    packed, absmax = quantize_codebook_ref(x, codebook)
    found = quantize_codebook_triton(x.to(DEVICE), codebook)
    assert_same_bits(found[0], packed)
    assert_same_bits(found[1], absmax)
    for dtype in dtypes or (x.dtype,):
        expected = dequantize_codebook_ref(packed, absmax, codebook, x.shape, dtype)
        on = packed.to(DEVICE), absmax.to(DEVICE)
        assert_same_bits(dequantize_codebook_triton(*on, codebook, x.shape, dtype), expected)


def edges(codebook: Codebook) -> Tensor:
    """Return every bound and value with both float32 beside it, in blocks whose absmax is 1.

    They are the quotients then.
    """
    used = [value for value in codebook.values if abs(value) <= 1]
    at = torch.tensor([*codebook.bounds, *used, *(b / 2 for b in codebook.bounds), 1e-40, -0.0])
    near = [torch.nextafter(at, torch.tensor(end)) for end in (-math.inf, math.inf)]
    flat = torch.cat([at, *near]).clamp(-1, 1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % 15)).view(-1, 15)
    return torch.nn.functional.pad(rows, (1, 0), value=1.0)


@pytest.mark.quick(2)
@every_codebook
def test_at_the_edges_of_every_code(codebook: Codebook) -> None:
    compare(edges(codebook), get_codebook(codebook.name, 16), DTYPES)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "dtype"), cases(RANDOM, itertools.product(CODEBOOKS, DTYPES)))
def test_random(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    x[3] = 0
    x[4] = -0.0
    x[5, 1:] = 0
    x[6] = 5.0 * x[6].sign()
    compare(x.to(dtype), CODEBOOKS[name])


@pytest.mark.quick(2)
@every_codebook
def test_extreme_blocks(codebook: Codebook) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    x[0] *= 2.0**-140
    x[1] *= 1e-38 / x[1].abs().max()
    x[2] *= 3.4e38 / x[2].abs().max()
    x[3] = torch.logspace(-45, 38, 64)
    compare(x, codebook)
    # A last block that is not whole and below the least absmax.
    compare(x.flip(0).flatten()[-100:-7], codebook)


@pytest.mark.parametrize(("name", "bad"), [("nf4", math.nan), ("fp4", -math.inf)])
def test_what_is_not_finite_shows_in_absmax(name: str, bad: float) -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 7] = bad
    for found in (
        quantize_codebook_ref(x, CODEBOOKS[name]),
        quantize_codebook_triton(x.to(DEVICE), CODEBOOKS[name]),
    ):
        assert found[1].isfinite().tolist() == [True, False, True]


@settings(deadline=None, max_examples=6, database=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    name, block = data.draw(st.sampled_from([*CODEBOOKS])), data.draw(st.sampled_from(BLOCK_SIZES))
    shape = data.draw(st.lists(st.integers(1, 17), max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(shape, generator=generator).to(data.draw(st.sampled_from(DTYPES)))
    compare(x, get_codebook(name, block))


def test_any_memory_layout() -> None:
    codebook = CODEBOOKS["fp4"]
    x = torch.randn(8, 40, device=DEVICE).bfloat16()
    packed, absmax = quantize_codebook_ref(x.cpu(), codebook)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)
    for view in (x.t().contiguous().t(), shifted, torch.stack((x, x), 1)[:, 1]):
        found = quantize_codebook_triton(view, codebook)
        assert_same_bits(found[0], packed)
        assert_same_bits(found[1], absmax)
    expected = dequantize_codebook_ref(packed, absmax, codebook, x.shape, torch.bfloat16)
    odd = torch.empty(len(packed) + 1, dtype=torch.uint8, device=DEVICE)[1:].copy_(packed)
    strided = torch.stack((absmax, absmax), 1).to(DEVICE)[:, 1]
    found = dequantize_codebook_triton(odd, strided, codebook, x.shape, torch.bfloat16)
    assert_same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
@every_codebook
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_large(codebook: Codebook, dtype: torch.dtype) -> None:
    x = torch.randn(4097, 11008, device=DEVICE).mul_(0.02).to(dtype)
    expected = quantize_codebook_ref(x, codebook)
    found = quantize_codebook_triton(x, codebook)
    assert all(map(torch.equal, found, expected))
    dense = dequantize_codebook_triton(*found, codebook, x.shape, dtype)
    assert torch.equal(dense, dequantize_codebook_ref(*expected, codebook, x.shape, dtype))
