"""Dequantization on a GPU (or in Triton's interpreter): the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, dtypes, formats, quiet

from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.dequantize.triton import dequantize_all_triton, dequantize_triton

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


@pytest.mark.core
@formats
def test_any_memory_layout(fmt: Format) -> None:
    packed = torch.randint(256, (6, 96), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(1, 120, (6, 192 // fmt.block), dtype=torch.uint8, device=DEVICE)
    expected = dequantize_ref(packed, scale, None, fmt, torch.bfloat16)
    shifted = torch.empty(packed.numel() + 3, dtype=torch.uint8, device=DEVICE)[3:].view(6, 96)
    shifted.copy_(packed)
    views = [packed.t().contiguous().t(), shifted, torch.stack((packed, packed), 1)[:, 1]]
    for view in views:
        strided = scale.t().contiguous().t()
        assert_same_bits(dequantize_triton(view, strided, None, fmt, torch.bfloat16), expected)


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
