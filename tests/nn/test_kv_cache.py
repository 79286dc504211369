"""Formats of cached keys and values: bytes, scales, and what no format takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp4pass
from fp4pass.core.formats import FP8_E4M3, NVFP4
from fp4pass.errors import OptionError, ShapeError
from fp4pass.nn.kv_cache import CACHE_FORMATS, CacheCodec, CacheFormat, get_cache_format

NAMES = list(CACHE_FORMATS)


def heads(columns: int = 32) -> Tensor:
    """Keys [2, 3, 5, columns] whose heads are of very different size."""
    x = torch.randn(2, 3, 5, columns, generator=torch.Generator().manual_seed(0))
    return x * torch.tensor([0.01, 1.0, 300.0])[:, None, None]


def scale_of(fmt: CacheFormat, x: Tensor) -> Tensor:
    return fmt.scale_for(x.abs().amax(dim=(0, 2, 3)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.core
def test_scales_are_the_smallest_powers_of_two_that_reach(name: str) -> None:
    fmt = CACHE_FORMATS[name]
    amax = torch.tensor([0.0, 447.9, 448.0, 448.1, 2688.0, 2688.1, 1e-30])
    for value in (amax, *amax.split(1)):
        scale = fmt.scale_for(value).flatten()
        assert len(scale) == (len(value) if fmt.per_head else 1) and scale.dtype == torch.float32
        reached = value if fmt.per_head else value.amax().reshape(1)
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        assert (scale * fmt.max >= reached).all()
        assert (scale / 2 * fmt.max < reached)[reached > 0].all()
        assert (scale[reached == 0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_is_the_nearest_e4m3_number(dtype: torch.dtype) -> None:
    fmt = CACHE_FORMATS["fp8"]
    x = heads().to(dtype)
    # Ties, zeros of both signs, and what lies beyond the scale.
    x[0, 1, 0, :6] = torch.tensor([0.0, -0.0, 1.0625, 1.1875, 1e4, -1e4]).to(dtype)
    scale = scale_of(fmt, heads())
    codec = CacheCodec(fmt, scale)
    stored = codec.encode(x)
    assert stored.dtype == torch.uint8 and stored.shape == x.shape
    magnitudes = torch.tensor(FP8_E4M3.magnitudes, dtype=torch.float64)
    quotient = (x.double() / scale).abs().clamp(max=448)
    error = (quotient[..., None] - magnitudes).abs()
    best = error.amin(-1, keepdim=True)
    # Of two that are as near, the even code.
    even = (error == best).to(torch.float64) * (2 - torch.arange(127) % 2)
    expected = even.argmax(-1) + 128 * x.signbit()
    assert torch.equal(stored.long(), expected)
    decoded = codec.decode(stored, torch.float32)
    assert torch.equal(decoded, torch.copysign(magnitudes[expected % 128], x).float() * scale)


def test_nvfp4_is_that_of_activations_with_searched_scales() -> None:
    """Codes and scales in one row of bytes; 9 / 16 of a byte for each number."""
    fmt, x = CACHE_FORMATS["nvfp4"], heads(64)
    scale = scale_of(fmt, x)
    assert scale.item() == NVFP4.global_scale_for(x.abs().max().item())
    codec = CacheCodec(fmt, scale)
    stored = codec.encode(x)
    assert stored.shape == (2, 3, 5, 36) and fmt.width(64) == 36
    packed, bits = fp4pass.ops.quantize(x, 1 / scale, "nvfp4", "sse")
    assert torch.equal(stored, torch.cat([packed, bits], -1))
    expected = fp4pass.ops.dequantize(packed, bits, 1 / scale, "nvfp4", torch.bfloat16)
    assert torch.equal(codec.decode(stored, torch.bfloat16), expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_is_encoded_again(name: str) -> None:
    """In bfloat16 as well: nothing is rounded on the way out."""
    fmt, x = CACHE_FORMATS[name], heads()
    codec = CacheCodec(fmt, scale_of(fmt, x))
    decoded = codec.decode(codec.encode(x), torch.bfloat16)
    assert torch.equal(codec.decode(codec.encode(decoded), torch.bfloat16), decoded)
    assert torch.equal(codec.decode(codec.empty(x, 7), torch.float32), torch.zeros(2, 3, 7, 32))


def test_wrong_names_and_shapes() -> None:
    with pytest.raises(OptionError, match=r"kv_cache.*fp9"):
        get_cache_format("fp9")
    with pytest.raises(OptionError, match="kv_cache: expected the name of a format"):
        get_cache_format(8)
    with pytest.raises(ShapeError, match="24 numbers of a head are not a multiple of 16"):
        CACHE_FORMATS["nvfp4"].require_columns(24, "here")
    codec = CacheCodec(CACHE_FORMATS["fp8"], torch.ones(4, 1, 1))
    with pytest.raises(ShapeError, match="the scales are of 4 heads, and the layer has 3"):
        codec.empty(heads(), 1)
