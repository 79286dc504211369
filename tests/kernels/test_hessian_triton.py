"""Block Hessians in Triton: against float64, and against the reference where sums are exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, DTYPES, covering, dtypes, gpu, quiet, seeded
from torch import Tensor

from fp4pass.kernels.statistics import triton as module
from fp4pass.kernels.statistics.triton import observe_triton

# numpy warns of infinity times zero in the interpreter.
pytestmark = quiet


def empty_statistics(columns: int, hessian: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    groups = math.ceil(columns / 32) if hessian else 0
    return (
        torch.zeros(groups, 32, 32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, device=DEVICE),
    )


def check(x: Tensor, hessian: bool = True) -> None:
    """Observe x twice; expect the sums of float64, within the rounding of float32 sums."""
    x = x.to(DEVICE)
    statistics = empty_statistics(x.shape[-1], hessian)
    observe_triton(x, *statistics)
    observe_triton(x, *statistics)
    sums, count, amax = statistics
    tokens = x.reshape(-1, x.shape[-1])
    assert count.item() == 2 * len(tokens)
    assert amax.item() == (tokens.float().abs().max().item() if tokens.numel() else 0.0)
    if hessian:
        padded = torch.nn.functional.pad(tokens.double(), (0, len(sums) * 32 - x.shape[-1]))
        blocks = padded.view(len(tokens), len(sums), 32).transpose(0, 1)
        expected = 2 * (blocks.mT @ blocks)
        size = expected.diagonal(dim1=1, dim2=2).sqrt()
        bound = size.unsqueeze(1) * size.unsqueeze(2) * (len(tokens) + 64) ** 0.5 * 2.0**-20
        assert ((sums.double() - expected).abs() <= bound).all()


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = seeded(seed)
    normal = torch.randn(shape, generator=generator)
    return normal / (torch.rand(shape, generator=generator) + 0.1)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    columns=st.integers(1, 200),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    layout=st.sampled_from(["plain", "offset", "transposed", "every other"]),
    hessian=st.booleans(),
)
def test_any_shape(
    shape: list[int], columns: int, dtype: torch.dtype, layout: str, hessian: bool
) -> None:
    x = heavy_tailed((*shape, 2 * columns + 1)).to(dtype)
    if layout == "transposed":
        x = x[..., :columns].mT.contiguous().mT
    start = 1 if layout == "offset" else 0
    x = x[..., ::2] if layout == "every other" else x[..., start : start + columns]
    check(x, hessian)


BAD = [math.nan, -math.nan, math.inf, -math.inf]


@covering(("dtype", "hessian", "bad"), DTYPES, [True, False], BAD)
def test_what_is_not_finite_stays(dtype: torch.dtype, hessian: bool, bad: float) -> None:
    x = heavy_tailed((70, 40)).to(DEVICE, dtype)
    statistics = empty_statistics(40, hessian)
    x[66, 37] = bad
    observe_triton(x, *statistics)
    observe_triton(torch.ones_like(x), *statistics)
    amax = statistics[2].item()
    assert math.isnan(amax) if math.isnan(bad) else amax == math.inf
    if hessian:
        assert statistics[0][0].isfinite().all()
        assert not statistics[0][1, 5, 5].isfinite()


def test_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of tokens so small that one call is several launches."""
    monkeypatch.setattr(module, "_LAUNCH_TOKENS", 100)
    for dtype in DTYPES:
        check(heavy_tailed((350, 40)).to(dtype))


@gpu
@dtypes
@pytest.mark.parametrize("shape", [(4096, 9728), (5000, 2560), (3, 11008), (1 << 20, 64)])
def test_large(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """1e-3 of sqrt(H_ii H_jj), and the same bits each time."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(shape, generator=generator, device=DEVICE).abs().to(dtype)
    runs = [empty_statistics(shape[1]) for _ in range(3)]
    for statistics in runs:
        observe_triton(x, *statistics)
    for statistics in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(statistics, runs[0], strict=True))
    blocks = x.view(shape[0], -1, 32).transpose(0, 1)
    for j in range(0, len(blocks), 40):
        expected = blocks[j].double().mT @ blocks[j].double()
        size = expected.diagonal().sqrt()
        error = (runs[0][0][j] - expected).abs() / (size.unsqueeze(0) * size.unsqueeze(1))
        assert error.max() < 2e-4
