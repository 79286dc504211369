"""Packed codes and scale bits back to numbers: exactly, and by the kernels with the same bits."""

from __future__ import annotations

import oracle
import pytest
import torch
from kernel_cases import DEVICE, divisor_of, dtypes, formats, quiet, seeded

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import pack_codes
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.dequantize.triton import dequantize_all_triton, dequantize_triton


def every_code_at_every_scale(fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [S, block] and scale bits [S, 1]: all 16 codes with every scale byte."""
    scale = torch.arange(1, fmt.scale.last + 1, dtype=torch.uint8).unsqueeze(1)
    codes = torch.arange(fmt.block, dtype=torch.uint8).remainder(16)
    return pack_codes(codes.repeat(len(scale), 1)), scale


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@formats
def test_dequantize_is_exact(fmt: Format, dtype: torch.dtype) -> None:
    packed, scale = every_code_at_every_scale(fmt)
    for exponent in (-110, -20, -1, 0, 3, 110) if fmt.has_global_scale else (0,):
        dense = dequantize_ref(packed, scale, divisor_of(fmt, 2.0**exponent), fmt, dtype)
        exact = oracle.dequantize(packed, scale, 2.0**exponent, fmt.name, fmt.block)
        # 6 * 2^127 is beyond float32, and so are 3 and 4 times 2^127.
        inside = exact.abs() < 2.0**128
        assert dense.dtype == dtype
        assert torch.equal(dense.double()[inside], exact[inside])
        assert torch.equal(torch.signbit(dense), torch.signbit(exact))
        assert dense[~inside].isinf().all()


@pytest.mark.parametrize("divisor", [1234.567, 3.0, 1e-3])
def test_a_foreign_divisor(divisor: float) -> None:
    """code * (scale / G) in float32, as the writer of such a checkpoint has it."""
    fmt = get_format("nvfp4")
    packed, scale = every_code_at_every_scale(fmt)
    given = torch.tensor([divisor])
    dense = dequantize_ref(packed, scale, given, fmt, torch.float32)
    step = scale.view(torch.float8_e4m3fn).float() / given
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    assert torch.equal(dense, oracle.values(codes).float() * step)
    half = dequantize_ref(packed, scale, given, fmt, torch.bfloat16)
    assert torch.equal(half, dense.bfloat16())


@pytest.mark.core
def test_a_stored_multiplier() -> None:
    """As ModelOpt dequantizes: the stored number times the block scale, which no divisor gives."""
    fmt = get_format("nvfp4")
    generator = seeded(0)
    packed = torch.randint(256, (64, 32), generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 127, (64, 4), generator=generator, dtype=torch.uint8)
    g = torch.tensor([0.4375 / 2688])
    values = dequantize_ref(packed, scale, None, fmt, torch.float32)
    blocks = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    wanted = values / blocks * (blocks * g)
    multiplying = fmt.with_multiplier()
    assert torch.equal(dequantize_ref(packed, scale, g, multiplying, torch.float32), wanted)
    assert not torch.equal(dequantize_ref(packed, scale, 1 / g, fmt, torch.float32), wanted)


GLOBAL_SCALES = [None, 3.7, 2.0**-110, 2.0**110]

pytestmark = quiet


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal, the signs of zeros included; of NaN there is one."""
    assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
    number = ~b.isnan()
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a[number], b[number])
    assert torch.equal(a[number].signbit(), b[number].signbit())


def compare(packed, scale, number, fmt, dtype) -> None:
    given = None if number is None else torch.tensor([number])
    expected = dequantize_ref(packed, scale, given, fmt, dtype)
    on = None if given is None else given.to(DEVICE)
    # A copy to a device is contiguous; what was not stays so.
    found = dequantize_triton(packed.to(DEVICE), scale.to(DEVICE), on, fmt, dtype)
    assert_same_bits(found.cpu(), expected)


@pytest.mark.quick(2)
@dtypes
@formats
def test_every_code_at_every_scale_byte(fmt: Format, dtype: torch.dtype) -> None:
    scale = torch.arange(fmt.scale.nan + 1, dtype=torch.uint8).view(-1, 1)
    codes = torch.arange(fmt.block // 2, dtype=torch.uint8)
    packed = (codes * 34 + 16).repeat(len(scale), 1)
    for number in GLOBAL_SCALES:
        compare(packed, scale, number, fmt, dtype)
    compare(packed, scale, 0.00031, fmt.with_multiplier(), dtype)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("given", [(None, None, None), (4.0, 0.3, 3.7), (4.0, None, 3.7)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:16:multiplier"])
def test_several_at_once(fmt: str, given: tuple[float | None, ...], dtype: torch.dtype) -> None:
    fmt = get_format(fmt)
    stored = []
    for (rows, blocks), value in zip([(7, 40), (0, 3), (40, 9)], given, strict=True):
        packed = torch.randint(256, (rows, blocks * fmt.block // 2), dtype=torch.uint8)
        scale = torch.randint(fmt.scale.nan, (rows, blocks), dtype=torch.uint8)
        stored.append((packed, scale, None if value is None else torch.tensor([value])))
    on_device = [tuple(None if t is None else t.to(DEVICE) for t in each) for each in stored]
    for some in (on_device, on_device[:2], on_device[1:2]):
        found = dequantize_all_triton(some, fmt, dtype)
        assert len(found) == len(some)
        for each, got in zip(some, found, strict=True):
            assert_same_bits(got, dequantize_ref(*each, fmt, dtype))
