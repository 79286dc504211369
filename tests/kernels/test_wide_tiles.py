"""Which tiles products of many rows take on Hopper, as an H200's times chose them."""

from __future__ import annotations

import pytest

from fp4pass.core.formats import get_format
from fp4pass.kernels.linear.wide import Wide, bfloat16_tiles


@pytest.mark.parametrize(
    ("key", "m", "n", "k", "wide"),
    [
        ("nvfp4", 48, 14336, 4096, None),
        ("nvfp4", 64, 14336, 4096, Wide(64, 4, 128, 4)),
        ("nvfp4", 64, 4096, 4096, None),
        ("mxfp4", 64, 4096, 4096, Wide(64, 4, 128, 4, 4)),
        ("mxfp4", 64, 4096, 14336, Wide(64, 4, 128, 4, 4)),
        ("mxfp4", 64, 9728, 2560, Wide(64, 4, 128, 4)),
        ("nvfp4", 128, 4096, 14336, Wide(128, 4, 128, 3, 4)),
        ("mxfp4", 128, 4096, 4096, Wide(128, 4, 128, 3, 2)),
        ("mxfp4", 256, 4096, 4096, Wide(128, 4, 128, 3)),
        ("mxfp4", 256, 9728, 2560, Wide(256, 8, 64, 6)),
        ("nvfp4", 384, 14336, 4096, None),
        ("nvfp4", 512, 14336, 4096, Wide(256, 8, 64, 6)),
        ("nvfp4", 512, 9728, 2560, None),
        ("nvfp4", 513, 14336, 4096, None),
    ],
)
def test_tiles(key: str, m: int, n: int, k: int, wide: Wide | None) -> None:
    assert bfloat16_tiles(m, n, k, get_format(key)) == wide
