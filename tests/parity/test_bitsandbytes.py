"""nf4 and fp4 against the CPU build of bitsandbytes: codes, absmax and values, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fp4pass
from fp4pass.errors import OptionError, ShapeError
from fp4pass.parity import bitsandbytes
from fp4pass.parity.codebooks import CODEBOOKS

judge: Any = pytest.importorskip("bitsandbytes.functional")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ["nf4", "fp4"]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def assert_judged(x: Tensor, scheme: str, block: int, *, values: bool = True) -> None:
    """The functions of both libraries, called in the same way, return the same."""
    options: Any = {"blocksize": block, "quant_type": scheme}
    packed, theirs = judge.quantize_4bit(x, **options)
    codes, ours = bitsandbytes.quantize_4bit(x, **options)
    assert torch.equal(codes, packed) and torch.equal(ours.absmax, theirs.absmax)
    if values:
        dense = bitsandbytes.dequantize_4bit(codes, ours)
        assert dense.dtype == x.dtype and dense.shape == x.shape
        assert torch.equal(dense, judge.dequantize_4bit(packed, theirs).view_as(dense))


@every_scheme
@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        *((torch.float32, block) for block in (64, 256, 4096)),
        *((dtype, block) for dtype in DTYPES[1:] for block in (64,)),
    ],
    ids=str,
)
def test_normal(scheme: str, dtype: torch.dtype, block: int) -> None:
    x = torch.randn(24, 4096, generator=torch.Generator().manual_seed(block)).mul_(0.02)
    x[3] = 0
    x[5, :4000] = 0
    # Beyond that their CPU build compiles code to dequantize.
    assert_judged(x.to(dtype), scheme, block, values=block < 2048)


@pytest.mark.core
@every_scheme
def test_ties(scheme: str) -> None:
    """Multiples of small numbers: quotients halfway between two values, and next to that."""
    ratios = torch.arange(-384, 385).view(-1, 1) / torch.arange(3, 385, 3)
    x = ratios.clamp(-1, 1).flatten()
    rows = torch.nn.functional.pad(x, (0, -len(x) % 63)).view(-1, 63)
    for absmax in (1.0, 24.0, 0.37):
        blocks = torch.nn.functional.pad(rows * absmax, (1, 0), value=absmax)
        for dtype in DTYPES:
            assert_judged(blocks.to(dtype), scheme, 64)


@pytest.mark.core
@every_scheme
def test_at_every_bound(scheme: str) -> None:
    codebook = CODEBOOKS[scheme]
    at = torch.tensor([*codebook.bounds, *codebook.values])
    near = [torch.nextafter(at, torch.tensor(end)) for end in (-math.inf, math.inf)]
    flat = torch.cat([at, *near]).clamp(-1, 1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % 63)).view(-1, 63)
    assert_judged(torch.nn.functional.pad(rows, (1, 0), value=-1.0), scheme, 64)


@pytest.mark.core
@every_scheme
@pytest.mark.parametrize("count", [2, 66, 1000])
def test_a_last_block_that_is_not_whole(scheme: str, count: int) -> None:
    x = torch.randint(-48, 49, (count,), generator=torch.Generator().manual_seed(count))
    for dtype in DTYPES:
        assert_judged(x.to(dtype), scheme, 64)
        assert_judged(x.mul(0).to(dtype), scheme, 64)


def test_names_of_one_type_and_errors() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for scheme in SCHEMES:
        quantize = getattr(bitsandbytes, f"quantize_{scheme}")
        dequantize = getattr(bitsandbytes, f"dequantize_{scheme}")
        wanted = fp4pass.dequantize(fp4pass.quantize(x, scheme, 32))
        assert torch.equal(dequantize(*quantize(x, blocksize=32)), wanted)
    codes, state = bitsandbytes.quantize_4bit(x)
    assert state.codebook.name == "fp4" and codes.shape == (128, 1)
    with pytest.raises(ShapeError, match="qdata"):
        bitsandbytes.dequantize_4bit(codes[1:], state)
    for name in ("int8", "nvfp4"):
        with pytest.raises(OptionError, match="does not exist"):
            bitsandbytes.quantize_4bit(x, quant_type=name)
