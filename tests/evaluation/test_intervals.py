"""Bootstrap intervals: what they cover, what they were, and sums that have none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4pass.evaluation.intervals import SUMS, Change, _widened, changes, intervals

TOKENS, BYTES, NLL, KL = (SUMS.index(name) for name in ("tokens", "bytes", "nll", "kl"))


def documents(generator, count, nll=2.0, spread=0.3):
    """Sums of documents of many lengths, whose tokens have a mean nll of `nll`, and its noise."""
    tokens = generator.integers(20, 400, count).astype(float)
    noise = spread * generator.standard_gamma(4.0, count) / 2 - spread * 2
    sums = np.full((count, len(SUMS)), math.nan)
    sums[:, TOKENS] = tokens
    sums[:, NLL] = tokens * (nll + noise)
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_intervals_cover_the_truth_as_often_as_they_say(count, monkeypatch):
    monkeypatch.setattr("fp4pass.evaluation.intervals._RESAMPLES", 600)
    generator, rounds = np.random.default_rng(0), 400
    alone = paired = narrower = 0
    for _ in range(rounds):
        ours = documents(generator, count)
        (low, high) = intervals(ours)["perplexity"]
        alone += low <= math.exp(2.0) <= high
        theirs = ours.copy()
        theirs[:, NLL] -= ours[:, TOKENS] * generator.normal(0.1, 0.05, count)
        ratio = changes(ours, theirs)["perplexity_ratio"]
        paired += ratio.low <= math.exp(0.1) <= ratio.high
        narrower += ratio.high - ratio.low < (high - low) / math.exp(2.0) / 2
    # 3 standard deviations of 400 throws are 3.3 %; few documents cost a percent or two more.
    least = 0.95 - 0.033 - 0.3 / count
    assert least <= alone / rounds <= 0.983
    assert least <= paired / rounds <= 0.983
    assert narrower >= 0.99 * rounds


@pytest.mark.core
@pytest.mark.parametrize(
    ("count", "alone", "ratio"),
    [
        (3, (6.108851004166767, 9.517956431945644), (0.34156646552718795, 4.214835792073103)),
        (5, (5.327206444852553, 8.42140056558492), (0.10105052807938794, 4.197992611695428)),
        (40, (6.37413139501217, 7.8996813338922784), (0.5530757065653826, 1.4095832740640744)),
    ],
)
def test_published_intervals_can_be_made_again(count, alone, ratio, monkeypatch):
    """The numbers of the implementation that the published tables were made with."""
    sums = documents(np.random.default_rng(1), count)
    others = documents(np.random.default_rng(2), count)
    others[:, TOKENS] = sums[:, TOKENS]
    assert intervals(sums) == {"perplexity": pytest.approx(alone, rel=1e-12)}
    for name, number in (("_RESAMPLES", 500), ("_SEED", 3)):
        monkeypatch.setattr(f"fp4pass.evaluation.intervals.{name}", number)
    change = changes(sums, others, 0.9)["perplexity_ratio"]
    assert (change.low, change.high) == pytest.approx(ratio, rel=1e-12)


def test_few_units_widen_as_student():
    special = pytest.importorskip("scipy.special")
    for units in (5, 20, 1000):
        student = special.stdtrit(units - 1, 0.975) * math.sqrt(units / (units - 1))
        assert special.ndtri((1 + _widened(0.95, units)) / 2) == pytest.approx(student, rel=3e-3)
    assert 0.99 < _widened(0.9, 2) < 1


@pytest.mark.core
def test_few_units_give_no_verdict():
    for units in (4, 9, 10):
        sums = documents(np.random.default_rng(1), units, spread=0.01)
        others = sums.copy()
        others[:, NLL] *= 2.0
        change = changes(sums, others)["perplexity_ratio"]
        assert change.high < 1 and change.significant == (True if units == 10 else None)


@pytest.mark.core
def test_sums_without_an_interval():
    sums = documents(np.random.default_rng(3), 8)
    assert intervals(sums[:1]) == {}
    sums[:, KL] = 0.0
    assert intervals(sums)["kl"] == (0.0, 0.0)
    # Resamples without the one document that has bytes have no bits per byte.
    sums[:, BYTES] = 0.0
    sums[0, BYTES] = 9.0
    sums[3, KL] = math.inf
    assert set(intervals(sums)) == {"perplexity"}
    other = documents(np.random.default_rng(4), 8)
    other[:, KL] = 0.0
    changed = changes(sums, other)
    assert changed["kl"] == Change(math.inf, None, None, None)
    assert set(changed) == {"perplexity", "perplexity_ratio", "kl"}
    assert "kl" not in changes(sums, sums)
    sums[:, NLL] = math.inf
    assert intervals(sums) == {}
