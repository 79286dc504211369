"""Products of many rows on Hopper, on a GPU alone (Gluon has no interpreter), and their tiles."""

from __future__ import annotations

import pytest
import torch
from kernels.test_compute_fp8 import as_weight, packed, seeded

from fp4pass.core.formats import get_format
from fp4pass.kernels.compute_fp8 import naive as fp8
from fp4pass.kernels.compute_fp8.triton import multiply_with
from fp4pass.kernels.compute_fp8.triton import wide_config as fp8_config
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.linear.decode_triton import InputRows, arranged
from fp4pass.kernels.linear.gluon_triton import counters, in_words, multiply_wide, runs_wide
from fp4pass.kernels.linear.tiling import Tiles, wide_config, wide_tiles

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs_wide(256, torch.device("cuda")),
    reason="needs the tensor cores of Hopper",
)

TILES = [
    (64, 4, 128, 4), (64, 4, 64, 6, 2), (128, 4, 128, 4, 2), (128, 8, 64, 6),
    (256, 8, 128, 3, 2), (256, 8, 64, 6), (256, 4, 64, 3),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("cut", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 512), (70, 200, 768), (300, 72, 2560)])
def test_products(key: str, cut: tuple[int, ...], m: int, n: int, k: int) -> None:
    fmt, tiles = get_format(key), wide_tiles(*cut)
    weight = as_weight(packed(fmt, n, k))
    # Blocks of the smallest and of other scales, where decoding could go wrong.
    weight.scale[0, :3] = torch.tensor([0, 1, 2], device="cuda")
    bias = torch.randn(n, generator=seeded(2)).cuda().bfloat16()
    x = torch.randn(m, k, generator=seeded(6)).cuda().bfloat16()
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)

    stored = weight._replace(bias=bias)
    found = multiply_with(tiles, x, stored, out.clone(), fmt)
    assert torch.equal(found, multiply_with(tiles, x, stored, out.clone(), fmt))
    values, factor = fp8.quantize_rows_ref(x)
    dense, w_factor = fp8.expand_ref(weight, fmt)
    left, right = values.double() * factor[:, None], dense.double() * w_factor[:, None]
    _compare(found, left, right, bias, 2.0**-10)

    finished = counters(m, n, tiles, x.device)
    numbers = InputRows.of_numbers(x)
    x_sorted = arranged(numbers, m, k, tiles.words, fmt, False, finished, tiles.m)[0]
    found = multiply_wide(x_sorted, None, in_words(stored), finished, out, fmt, tiles)
    dense = dequantize_ref(*weight[:3], fmt, torch.float32)
    _compare(found, x.double(), dense.double(), bias, 1e-5)


def _compare(
    found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, sums: float
) -> None:
    expected = x @ w.t() + bias.double()
    size = x.abs() @ w.abs().t() + bias.double().abs()
    off = (found.double() - expected).abs() - 2.0**-8 * expected.abs()
    assert (off <= sums * size).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("key", "m", "n", "k", "tiles"),
    [
        ("nvfp4", 48, 14336, 4096, None),
        ("nvfp4", 64, 14336, 4096, wide_tiles(64, 4, 128, 4)),
        ("mxfp4", 64, 4096, 4096, wide_tiles(64, 4, 128, 4, 4)),
        ("nvfp4", 128, 4096, 14336, wide_tiles(128, 4, 128, 3, 4)),
        ("mxfp4", 128, 4096, 4096, wide_tiles(128, 4, 128, 3, 2)),
        ("mxfp4", 256, 9728, 2560, wide_tiles(256, 8, 64, 6)),
        ("nvfp4", 384, 14336, 4096, None),
        ("nvfp4", 512, 14336, 4096, wide_tiles(256, 8, 64, 6)),
        ("nvfp4", 513, 14336, 4096, None),
    ],
)
def test_tiles(key: str, m: int, n: int, k: int, tiles: Tiles | None) -> None:
    assert wide_config(m, n, k, get_format(key)) == tiles


@pytest.mark.core
@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [
        (64, 4096, 4096, wide_tiles(64, 4, 128, 4, 2)),
        (64, 4096, 14336, wide_tiles(64, 4, 128, 4, 4)),
        (128, 9728, 2560, wide_tiles(128, 4, 128, 4)),
        (96, 14336, 4096, wide_tiles(128, 8, 128, 4)),
        (256, 2560, 9728, wide_tiles(128, 4, 128, 4, 3)),
        (256, 9728, 2560, wide_tiles(256, 4, 128, 3)),
        (512, 4096, 4096, None),
        (1024, 4096, 4096, wide_tiles(256, 8, 128, 3)),
        (1024, 14336, 4096, None),
        (64, 64, 256, wide_tiles(64, 4, 128, 4)),
    ],
)
def test_tiles_of_fp8(m: int, n: int, k: int, tiles: Tiles | None) -> None:
    assert fp8_config(m, n, k) == tiles
