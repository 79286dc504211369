"""Products of many rows on Hopper, of every tile: on a GPU alone, for Gluon has no interpreter."""

from __future__ import annotations

import pytest
import torch
from kernels.test_fp8 import on_device, packed, seeded

from fp4pass.core.formats import get_format
from fp4pass.kernels.common.tiles import as_words
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.fp8 import naive as fp8
from fp4pass.kernels.fp8.operands_triton import operands
from fp4pass.kernels.linear.decode_triton import arranged
from fp4pass.kernels.linear.wide import Wide, multiply_wide, runs_wide

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs_wide(256, torch.device("cuda")),
    reason="needs the tensor cores of Hopper",
)

TILES = [
    Wide(64, 4, 128, 4), Wide(64, 4, 64, 6, 2), Wide(128, 4, 128, 4, 2), Wide(128, 8, 64, 6),
    Wide(256, 8, 128, 3, 2), Wide(256, 8, 64, 6), Wide(256, 4, 64, 3),
]  # fmt: skip


@pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("wide", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 512), (70, 200, 768), (300, 72, 2560)])
def test_products(key: str, wide: Wide, m: int, n: int, k: int) -> None:
    fmt = get_format(key)
    weight = on_device(packed(fmt, n, k))
    # Blocks of the smallest and of other scales, where decoding could go wrong.
    weight.scale[0, :3] = torch.tensor([0, 1, 2], device="cuda")
    bias = torch.randn(n, generator=seeded(2)).cuda().bfloat16()
    x = torch.randn(m, k, generator=seeded(6)).cuda().bfloat16()
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)

    rows, of_weight = operands(x, weight, fmt, 8, fours=True)
    found = multiply_wide(
        rows.values, rows.factors, weight.codes, weight.scale, *of_weight, None, None, bias,
        out.clone(), fmt, wide,
    )  # fmt: skip
    values, factor = fp8.quantize_rows_ref(x)
    dense, w_factor = fp8.expand_ref(*weight, fmt)
    left, right = values.double() * factor[:, None], dense.double() * w_factor[:, None]
    _compare(found, left, right, bias, 2.0**-10)

    x_sorted = arranged(as_words(x), None, m, k, x.dtype, 1, wide.group, fmt, False)[0]
    found = multiply_wide(
        x_sorted, None, weight.codes, weight.scale, None, None, None, weight.global_scale, bias,
        out, fmt, wide,
    )  # fmt: skip
    dense = dequantize_ref(*weight, fmt, torch.float32)
    _compare(found, x.double(), dense.double(), bias, 1e-5)


def _compare(
    found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, sums: float
) -> None:
    expected = x @ w.t() + bias.double()
    size = x.abs() @ w.abs().t() + bias.double().abs()
    off = (found.double() - expected).abs() - 2.0**-8 * expected.abs()
    assert (off <= sums * size).all()
