"""Learned codebooks against brute force over all partitions, and what taking turns promises."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4pass import functional as F
from fp4pass.core.formats import FORMATS, Element
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError
from fp4pass.kernels.search.reference import search_ref
from fp4pass.tensor import learned_codebook as learned
from fp4pass.tensor.learned_codebook import codebook_quantize, learn_codebook


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
    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(len(x) + 1), levels):
        edges = (0, *cuts, len(x))
        total = 0.0
        for k, (start, stop) in enumerate(itertools.pairwise(edges)):
            v, w = value[start:stop], weight[start:stop]
            mean = (v * w).sum() / w.sum() if k and w.sum() > 0 else 0.0
            total += float((w * (v - mean).square()).sum())
        best = min(best, total)
    return best


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [1, 7, 15])
def test_every_start_is_the_best_of_all(kind: str, levels: int) -> None:
    """One cluster more, by trying all starts and not those between the neighbours' only."""
    x = numbers(kind, 300, 1)
    sums = learned._distinct(x, torch.rand(300, generator=torch.Generator().manual_seed(2)))
    n = len(sums.value)
    error = plain = sums.second
    place = torch.arange(n + 1).numpy()
    for _ in range(levels):
        error, _ = learned._one_more_cluster(error, sums)
        before = plain
        plain = before.copy()
        for j in range(n + 1):
            start = place[: j + 1]
            last = learned._cluster_error(sums, start, place[[j] * len(start)])
            plain[j] = (before[start] + last).min()
        assert abs(error - plain).max() <= 1e-13 * sums.second[-1]


def test_equal_numbers_count_together() -> None:
    x = numbers("few", 60, 0)
    distinct, count = x.abs().unique(return_counts=True)
    by_count = learn_codebook(distinct, count.double(), 3)
    assert by_count == learn_codebook(x, levels=3) == learn_codebook(-x.view(3, 20), levels=3)
    assert learn_codebook(x.bfloat16(), levels=3) == by_count
    assert learn_codebook(x, torch.full_like(x, 0.25), 3).magnitudes == by_count.magnitudes


def test_as_many_levels_as_numbers_leave_no_error() -> None:
    element = learn_codebook(numbers("few", 60, 0))
    assert element.magnitudes == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert (element.name, element.bits) == ("learned", 4)
    many = learn_codebook(torch.arange(200.0), levels=127, name="many")
    assert (many.name, many.bits, len(many.magnitudes)) == ("many", 8, 128)
    assert learn_codebook(torch.arange(20.0), levels=8).bits == 6


@pytest.mark.parametrize("points", [8, 64, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_cost_no_more_than_documented(kind: str, points: int) -> None:
    x = numbers(kind, 20000, 3)
    weights = torch.rand(20000, generator=torch.Generator().manual_seed(4))
    weights[:10] *= 1000
    exact = error_of(x, weights, learn_codebook(x, weights, 7, points=1 << 20))
    found = error_of(x, weights, learn_codebook(x, weights, 7, points=points))
    largest, whole = x.double().abs().max().item(), weights.double().sum().item()
    assert exact * (1 - 1e-9) <= found <= exact + 16 * largest**2 * whole / points**2
    sums = learned._distinct(x, weights)
    groups = learned._groups(sums, points)
    assert len(groups) <= points + 2
    for start, stop in itertools.pairwise(groups.tolist()):
        if stop - start > 1 and len(sums.value) > points:
            assert sums.value[stop - 1] - sums.value[start] <= 2 / points * largest * (1 + 1e-9)
            assert sums.weight[stop] - sums.weight[start] <= 4 / points * whole * (1 + 1e-9)


def test_the_partition_of_groups_is_what_is_bounded() -> None:
    """Before it is brought to the values themselves, too."""
    x = numbers("heavy-tailed", 5000, 3)
    sums = learned._distinct(x, None)
    exact = error_of(x, None, learn_codebook(x))
    for points in (16, 128):
        starts = learned._groups(sums, points)
        edges = starts[learned._partition(sums.at(starts), 7)]
        error = sums.second[edges[0]]
        for start, stop in itertools.pairwise(edges.tolist()):
            error += learned._cluster_error(
                sums, torch.tensor([start]).numpy(), torch.tensor([stop]).numpy()
            )[0]
        assert exact * (1 - 1e-9) <= error
        assert error <= exact + 16 * x.double().abs().max() ** 2 * len(x) / points**2


def weight_of(kind: str, block: int = 16) -> Tensor:
    return numbers(kind, 40 * 3 * block, 5).view(40, 3, block) * 0.02


@pytest.mark.parametrize("global_scale", ["auto", None, 2.0**-12])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "nvint4", "nvfp4_ue5m3"])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "few"])
def test_taking_turns_ends_below_the_format(kind: str, fmt: str, global_scale: Any) -> None:
    form = FORMATS[fmt]
    if not form.has_global_scale and isinstance(global_scale, float):
        global_scale = None
    W = weight_of(kind, form.block)
    found = codebook_quantize(W, fmt=fmt, global_scale=global_scale)
    optimal = vars(F)[f"{fmt}_optimal"](W, -1, True, global_scale=global_scale)
    assert found.scales.shape == (40, 3) and found.quants.shape == W.shape
    assert torch.equal(found.dequant, found.quants * found.scales.unsqueeze(-1))
    levels = torch.tensor(found.element.magnitudes)
    assert len(levels) <= 8 and torch.isin(found.quants.abs(), levels).all()
    error = (W - found.dequant).double().square().sum()
    before = (W - optimal[2]).double().square().sum()
    assert error <= before
    # There is something to gain: normal weights fit no grid.
    assert kind != "normal" or (error < 0.95 * before and len(levels) == 8)


def test_scales_are_best_for_the_codebook() -> None:
    """By brute force over all of E4M3, in float64."""
    W = weight_of("normal")
    found = codebook_quantize(W)
    steps = F.build_fp8_e4m3_scales() * F.global_scale_for(W)
    assert torch.isin(found.scales, steps).all()
    magnitudes = torch.tensor(found.element.magnitudes, dtype=torch.float64)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    least = torch.full((40, 3), math.inf, dtype=torch.float64)
    for step in steps:
        nearest = magnitudes[torch.bucketize((W / step).abs().double(), middle)] * step.double()
        error = (W.abs().double() - nearest).square().sum(-1)
        least = torch.minimum(least, error)
    exact = found.quants.double() * found.scales.unsqueeze(-1).double()
    assert ((W - exact).square().sum(-1) <= least * (1 + 1e-5)).all()


def test_the_codebook_is_best_for_the_scales() -> None:
    W = weight_of("normal")
    found = codebook_quantize(W, tolerance=1e-9)
    scales = found.scales.unsqueeze(-1).double()
    y, weights = W / scales, scales.square().expand(W.shape)
    best = error_of(y, weights, learn_codebook(y, weights))
    assert error_of(y, weights, found.element) <= best * (1 + 1e-6)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("levels", [7, 15])
def test_the_block_may_be_any_dimension(dim: int, levels: int) -> None:
    W = weight_of("normal")[:8]
    wanted = codebook_quantize(W, levels=levels)
    found = codebook_quantize(W.movedim(-1, dim), dim, levels=levels)
    assert found.element == wanted.element and torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.quants, wanted.quants.movedim(-1, dim))
    assert torch.equal(found.dequant, wanted.dequant.movedim(-1, dim))
    packed = codebook_quantize(W, levels=levels, packed=True)
    assert packed.quants.dtype == torch.uint8
    assert packed.quants.shape == (8, 3, 16 * found.element.bits // 8)


def test_a_sample_decides_about_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.randn(64, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    searched: list[int] = []

    def counted(blocks: Tensor, *args: Any) -> Any:
        searched.append(len(blocks))
        return search_ref(blocks, *args)

    monkeypatch.setattr(learned, "search_ref", counted)
    whole = F.compute_metrics(W, codebook_quantize(W, tolerance=1e-3).dequant)
    assert set(searched) == {1024}
    searched.clear()
    monkeypatch.setattr(learned, "_SAMPLE", 4096)
    some = codebook_quantize(W, tolerance=1e-3)
    assert set(searched) == {1024, 256}
    error = F.compute_metrics(W, some.dequant)["weight_error"]
    assert error <= 1.005 * whole["weight_error"]
    assert some.element == codebook_quantize(W, tolerance=1e-3).element


def test_zero_weights_keep_the_format() -> None:
    found = codebook_quantize(torch.zeros(4, 16))
    assert found.element == FORMATS["nvfp4"].element
    assert (found.dequant == 0).all() and found.scales.isfinite().all()
    W = torch.zeros(4, 16)
    W[2, 5] = 3.0
    assert torch.equal(codebook_quantize(W).dequant, W)


def nans() -> Tensor:
    return torch.full((4, 16), math.nan)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (OptionError, "nothing but zeros", lambda: learn_codebook(torch.zeros(3))),
        (OptionError, "nothing but zeros", lambda: learn_codebook(torch.ones(3), torch.zeros(3))),
        (OptionError, "nothing but zeros", lambda: learn_codebook(torch.ones(0))),
        (OptionError, "too small", lambda: learn_codebook(torch.ones(3).double() * 1e-60)),
        (OptionError, "1 to 127", lambda: learn_codebook(torch.ones(3), levels=0)),
        (OptionError, "1 to 127", lambda: learn_codebook(torch.ones(3), levels=128)),
        (OptionError, "points=7", lambda: learn_codebook(torch.ones(3), points=7)),
        (OptionError, "negative", lambda: learn_codebook(torch.ones(3), -torch.ones(3))),
        (ShapeError, "the same", lambda: learn_codebook(torch.ones(3), torch.ones(4))),
        (DtypeError, "x is", lambda: learn_codebook(torch.ones(3).int())),
        (DtypeError, "weights is", lambda: learn_codebook(torch.ones(3), torch.ones(3).int())),
        (NonFiniteError, "x or weights", lambda: learn_codebook(nans())),
        (NonFiniteError, "x or weights", lambda: learn_codebook(torch.ones(4, 16), nans())),
        (NonFiniteError, "codebook_quantize: W", lambda: codebook_quantize(nans())),
        (ShapeError, "is the block", lambda: codebook_quantize(torch.ones(4, 17))),
        (OptionError, "tolerance=1", lambda: codebook_quantize(torch.ones(4, 16), tolerance=1.0)),
        (OptionError, "levels=3; nvfp4", lambda: codebook_quantize(torch.ones(4, 16), levels=3)),
        (OptionError, "cannot be packed", lambda: codebook_quantize(torch.ones(4, 16), levels=200)),
        (OptionError, "Did you mean", lambda: codebook_quantize(torch.ones(4, 16), fmt="nvfp5")),
    ],
)
def test_errors_say_what_is_wanted(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()
