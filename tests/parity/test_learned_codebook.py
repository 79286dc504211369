"""Learned codebooks against brute force over all partitions, and blocks quantized in them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4pass.core.elements import Element
from fp4pass.core.formats import FORMATS
from fp4pass.errors import NonFiniteError, OptionError
from fp4pass.parity import codebook_quantize, learn_codebook
from fp4pass.quantization.functional import quantize_blocks


def error_of(x: Tensor, weights: Tensor | None, element: Element) -> float:
    """The weighted squared error of x, each number at the nearest of all magnitudes."""
    magnitudes = torch.tensor(element.magnitudes, dtype=torch.float64)
    distance = (x.double().abs().flatten().unsqueeze(-1) - magnitudes).abs().amin(-1)
    w = torch.ones_like(distance) if weights is None else weights.double().flatten()
    return (w * distance.square()).sum().item()


def least_error(x: Tensor, weights: Tensor, levels: int) -> float:
    """The least over all ways to cut the sorted |x| into zeros and `levels` clusters."""
    order = x.abs().double().argsort()
    value, weight = x.abs().double()[order], weights.double()[order]
    zeros, cluster = {}, {}
    for start, stop in itertools.combinations_with_replacement(range(len(x) + 1), 2):
        v, w = value[start:stop], weight[start:stop]
        mean = (v * w).sum() / w.sum() if w.sum() > 0 else 0.0
        zeros[start, stop] = float((w * v.square()).sum())
        cluster[start, stop] = float((w * (v - mean).square()).sum())
    return min(
        zeros[0, cuts[0]] + sum(map(cluster.__getitem__, itertools.pairwise((*cuts, len(x)))))
        for cuts in itertools.combinations_with_replacement(range(len(x) + 1), levels)
    )


def numbers(kind: str, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    if kind == "heavy-tailed":
        return x / (torch.rand(count, generator=generator) + 0.01)
    if kind == "few":
        return torch.randint(-4, 5, (count,), generator=generator) / 4.0
    if kind == "far":
        return x.abs() * 1e-3 + 1000.0
    return x


KINDS = ["normal", "heavy-tailed", "few", "far"]


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_partition_is_better(kind: str, levels: int) -> None:
    for seed in range(6):
        x = numbers(kind, 11, seed)
        weights = torch.rand(11, generator=torch.Generator().manual_seed(seed)) ** 4
        weights[seed] = 0.0
        found = error_of(x, weights, learn_codebook(x, weights, levels))
        # Of magnitudes that are rounded to float32, and of sums in float64.
        rounding = 1e-12 * float((weights.double() * x.double().square()).sum())
        assert found <= least_error(x, weights, levels) * (1 + 1e-9) + rounding
        plain = error_of(x, None, learn_codebook(x, levels=levels))
        rounding = 1e-12 * float(x.double().square().sum())
        assert plain <= least_error(x, torch.ones(11), levels) * (1 + 1e-9) + rounding


@pytest.mark.core
def test_equal_numbers_count_together() -> None:
    x = numbers("few", 60, 0)
    distinct, count = x.abs().unique(return_counts=True)
    by_count = learn_codebook(distinct, count.double(), 3)
    assert by_count == learn_codebook(x, levels=3) == learn_codebook(-x.view(3, 20), levels=3)
    assert learn_codebook(x.bfloat16(), levels=3) == by_count
    assert learn_codebook(x, torch.full_like(x, 0.25), 3).magnitudes == by_count.magnitudes


@pytest.mark.parametrize("points", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_cost_no_more_than_documented(kind: str, points: int) -> None:
    x = numbers(kind, 20000, 3)
    weights = torch.rand(20000, generator=torch.Generator().manual_seed(4))
    weights[:10] *= 1000
    exact = error_of(x, weights, learn_codebook(x, weights, 7, points=1 << 20))
    found = error_of(x, weights, learn_codebook(x, weights, 7, points=points))
    largest, whole = x.double().abs().max().item(), weights.double().sum().item()
    assert exact * (1 - 1e-9) <= found <= exact + 16 * largest**2 * whole / points**2


def weight_of(kind: str, block: int = 16) -> Tensor:
    return numbers(kind, 40 * 3 * block, 5).view(40, 3, block) * 0.02


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "fmt", "global_scale"),
    [
        ("normal", "nvfp4", "auto"),
        ("heavy-tailed", "nvfp4", 1.0),
        ("normal", "mxfp4", "auto"),
        ("heavy-tailed", "nvint4", "auto"),
    ],
)
def test_the_error_is_at_most_that_of_the_format(kind: str, fmt: str, global_scale: Any) -> None:
    W = weight_of(kind, FORMATS[fmt].block)
    found = codebook_quantize(W, fmt, global_scale=global_scale)
    optimal = quantize_blocks(W, fmt, global_scale=global_scale).dequantize()
    values, dense = found.values(), found.dequantize()
    assert found.scale.shape == (40, 3) and values.shape == W.shape
    assert torch.equal(dense, values * found.steps().unsqueeze(-1))
    levels = torch.tensor(found.format.element.magnitudes)
    assert len(levels) <= 8 and torch.isin(values.abs(), levels).all()
    error = (W - dense).double().square().sum()
    before = (W - optimal).double().square().sum()
    assert error <= before
    # There is something to gain: normal weights fit no grid.
    assert kind != "normal" or (error < 0.95 * before and len(levels) == 8)


@pytest.mark.parametrize("dim, levels", [(0, 7), (1, 15)])
def test_the_block_may_be_any_dimension(dim: int, levels: int) -> None:
    W = weight_of("normal")[:8]
    wanted = codebook_quantize(W, levels=levels)
    found = codebook_quantize(W.movedim(-1, dim), dim=dim, levels=levels)
    assert found.format == wanted.format and torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.packed, wanted.packed.movedim(-1, dim))
    assert torch.equal(found.dequantize(), wanted.dequantize().movedim(-1, dim))
    assert wanted.packed.dtype == torch.uint8
    assert wanted.packed.shape == (8, 3, 16 * wanted.format.element.bits // 8)


@pytest.mark.core
def test_zero_weights_keep_the_format() -> None:
    found = codebook_quantize(torch.zeros(4, 16))
    assert found.format == FORMATS["nvfp4"]
    assert (found.dequantize() == 0).all() and found.steps().isfinite().all()
    W = torch.zeros(4, 16)
    W[2, 5] = 3.0
    assert torch.equal(codebook_quantize(W).dequantize(), W)


NANS = torch.full((4, 16), math.nan)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (OptionError, "differ from 0", lambda: learn_codebook(torch.ones(3), torch.zeros(3))),
        (OptionError, "1 to 127", lambda: learn_codebook(torch.ones(3), levels=128)),
        (OptionError, "got 7", lambda: learn_codebook(torch.ones(3), points=7)),
        (OptionError, "got negative", lambda: learn_codebook(torch.ones(3), -torch.ones(3))),
        (NonFiniteError, "finite x and weights", lambda: learn_codebook(torch.ones(4, 16), NANS)),
        (NonFiniteError, "codebook_quantize: .*got NaN", lambda: codebook_quantize(NANS)),
        (OptionError, "between 0 and 1", lambda: codebook_quantize(torch.ones(4, 16), tolerance=1)),
        (OptionError, "at least 7 levels", lambda: codebook_quantize(torch.ones(4, 16), levels=3)),
    ],
)
def test_errors_say_what_was_expected(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()
