"""Errors of a quantized weight against float64."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from blocks import spectrum
from torch import Tensor

from fp4pass.core.formats import get_format
from fp4pass.core.quant_state import QuantState
from fp4pass.errors import ShapeError
from fp4pass.methods import Stats, search_scales, squared_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# One block, columns that do not fill 32, and several passes over the rows.
CASES = [
    ("nvfp4", torch.float32, (5, 3)),
    ("nvfp4", torch.bfloat16, (1, 1)),
    ("mxfp4", torch.float16, (150, 4)),
    ("mxfp4:16", torch.float64, (5, 3)),
]


def quantized(key: str, rows: int, count: int, dtype: torch.dtype) -> tuple[Tensor, QuantState]:
    fmt = get_format(key)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, count * fmt.block, generator=generator).mul(0.02).to(dtype)
    weight = weight.to(DEVICE)
    g = fmt.global_scale_for(weight.abs().max().item())
    return weight, search_scales(weight, fmt, g, "sse")


def exact(weight: Tensor, state: QuantState, hessian: Tensor) -> list[float]:
    """The four squares of a Hessian float64 [K, K]."""
    fmt, g = state.format, torch.tensor(1.0 / state.global_scale).double().item()
    dense = weight.cpu().float().double()
    stored = state.qdata.cpu(), state.scale.cpu()
    rest = dense - oracle.dequantize(*stored, 1.0 / g, fmt.name, fmt.block)
    found = [float(each.square().sum()) for each in (rest, dense)]
    return found + [float((each @ hessian * each).sum()) for each in (rest, dense)]


@pytest.mark.parametrize(("key", "dtype", "shape"), CASES)
@pytest.mark.core
def test_squares(
    key: str, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, state = quantized(key, *shape, dtype)
    columns = weight.shape[1]
    for name in ("_TILE_CPU", "_TILE_GPU"):
        monkeypatch.setattr(f"fp4pass.methods.statistics.{name}", 64 * columns)
    blocks = spectrum(0.9)[: math.ceil(columns / 32)]
    whole = torch.block_diag(*blocks.double())[:columns, :columns]
    expected = exact(weight, state, whole)
    found = squared_errors(weight, state, Stats(blocks))
    assert found == pytest.approx(expected, rel=1e-9)
    assert squared_errors(weight, state) == found[:2]


def test_a_whole_hessian_sees_what_blocks_make_up_for() -> None:
    weight, state = quantized("nvfp4", 64, 8, torch.float32)
    x = torch.randn(500, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x += x.roll(16, 1)
    hessian = x.T @ x
    stats: Any = Stats(block_hessian=spectrum(0.9)[:4], hessian=hessian)
    found = squared_errors(weight, state, stats)
    assert found == pytest.approx(exact(weight, state, hessian.double()), rel=1e-5)


@pytest.mark.parametrize("power", [-140, -126, 100, 120])
@pytest.mark.core
def test_a_hessian_of_any_size(power: int) -> None:
    weight, state = quantized("nvfp4", 8, 4, torch.float32)
    blocks = spectrum(0.9)[:2].double().mul(2.0**power).float()
    expected = exact(weight, state, torch.block_diag(*blocks.double()))
    assert squared_errors(weight, state, Stats(blocks)) == pytest.approx(expected, rel=1e-9)


def test_the_state_of_another_weight() -> None:
    weight, state = quantized("nvfp4", 8, 4, torch.float32)
    with pytest.raises(ShapeError, match=r"shape of state, \(8, 64\)"):
        squared_errors(weight[:, :32], state)
