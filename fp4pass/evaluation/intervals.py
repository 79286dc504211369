"""How sure a ratio of sums over documents is: bootstrap intervals, of one model or of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# What is kept of each unit, a document or a window.
SUMS = ("tokens", "bytes", "nll", "kl", "top_p_kl", "top1")

# Weights of resamples that exist at once: 32 MB.
_WEIGHTS = 1 << 22

_NORMAL = NormalDist()

# A KL may be infinite, and a resample may have no bytes; neither has an interval.
_QUIET = partial(np.errstate, divide="ignore", over="ignore", invalid="ignore")


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: of what confidence, of how many resamples, with which seed."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Change:
    """A difference or a ratio, and the ends of its interval.

    significant: whether the interval leaves out what would be no change; None, as `low` and
    `high`, where there are fewer than two documents, which say nothing about others.
    """

    value: float
    low: float | None
    high: float | None
    significant: bool | None


def statistics_of(sums: Array) -> dict[str, Array]:
    """The measures of sums [..., SUMS]; those whose sums are nan are left out."""
    tokens, size, nll, kl, top_p_kl, top1 = np.moveaxis(sums, -1, 0)
    found = {
        "perplexity": np.exp(nll / tokens),
        "bits_per_byte": nll / math.log(2) / size,
        "kl": kl / tokens,
        "top_p_kl": top_p_kl / tokens,
        "top1": top1 / tokens,
    }
    return {name: values for name, values in found.items() if not np.isnan(values).any()}


def intervals(sums: Array, options: Bootstrap) -> dict[str, tuple[float, float]]:
    """The interval of each measure, from the sums [units, SUMS]; empty for fewer than two units."""
    return _intervals(lambda tables: statistics_of(tables[0]), sums[None], options)


def changes(sums: Array, others: Array, options: Bootstrap) -> dict[str, Change]:
    """How far the first is from the second, resampled together: differences, and a ratio.

    sums, others: [units, SUMS] of the same units. Measures that one of them lacks are left out.
    """

    def difference(tables: Array) -> dict[str, Array]:
        ours, theirs = map(statistics_of, tables)
        found = {name: ours[name] - theirs[name] for name in ours if name in theirs}
        found["perplexity_ratio"] = ours["perplexity"] / theirs["perplexity"]
        return found

    tables = np.stack([sums, others])
    found = _intervals(difference, tables, options)
    with _QUIET():
        values = difference(tables.sum(1))
    changed = {}
    for name, value in values.items():
        low, high = found.get(name, (None, None))
        unchanged = 1.0 if name == "perplexity_ratio" else 0.0
        real = None if low is None or high is None else not low <= unchanged <= high
        changed[name] = Change(float(value), low, high, real)
    return changed


def _intervals(
    statistic: Callable[[Array], Mapping[str, Array]], tables: Array, options: Bootstrap
) -> dict[str, tuple[float, float]]:
    """Intervals that are corrected for bias and skewness, BCa, and widened where units are few.

    statistic: sums [k, ..., SUMS] to measures [...]. tables: [k, units, SUMS].
    Source: Efron, Better Bootstrap Confidence Intervals, JASA 82 (1987), as in scipy.stats.
    """
    units = tables.shape[1]
    if units < 2:
        return {}
    with _QUIET():
        total = tables.sum(1, keepdims=True)
        estimate = statistic(total[:, 0])
        replicates = statistic(_resample(tables, options))
        without = statistic(total - tables)
    return {
        name: _bca(value, replicates[name], without[name], options.confidence)
        for name, value in estimate.items()
        if name in replicates and np.isfinite(replicates[name]).all() and name in without
    }


def _resample(tables: Array, options: Bootstrap) -> Array:
    """The sums of units drawn with replacement: [k, units, SUMS] to [k, resamples, SUMS]."""
    units = tables.shape[1]
    generator = np.random.default_rng(options.seed)
    together = max(1, _WEIGHTS // units)
    found = []
    for start in range(0, options.resamples, together):
        count = min(together, options.resamples - start)
        drawn = generator.integers(units, size=(count, units))
        drawn += units * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)
        # Table by table, so that equal tables have equal sums to the bit.
        found.append(np.stack([times.astype(np.float64) @ table for table in tables]))
    return np.concatenate(found, 1)


def _bca(value: Any, replicates: Array, without: Array, confidence: float) -> tuple[float, float]:
    """The interval of one measure: [resamples] replicates, and [units] each without one unit."""
    below = float(np.mean(replicates < value) + np.mean(replicates == value) / 2)
    least = 0.5 / len(replicates)
    bias = _NORMAL.inv_cdf(min(max(below, least), 1 - least))
    spread = without.mean() - without
    # Of equal numbers the mean may be another one, in its last bit.
    spread[np.abs(spread) <= 1e-12 * np.abs(without).max()] = 0.0
    size = float((spread**2).sum() ** 1.5)
    skewness = float((spread**3).sum()) / (6 * size) if size else 0.0
    levels = []
    for tail in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + _quantile(tail, len(without))
        levels.append(_NORMAL.cdf(bias + z / (1 - skewness * z)))
    low, high = np.quantile(replicates, levels)
    return float(low), float(high)


def _quantile(tail: float, units: int) -> float:
    """Of the normal distribution, or further out by as much as few units make intervals narrow.

    That is Student's quantile, expanded in 1 / degrees of freedom, over the standard deviation of
    the resampled, which is too small by sqrt(1 - 1 / units).
    Source: Hesterberg, What Teachers Should Know About the Bootstrap, Am. Stat. 69 (2015), 4.1.
    Student's: Abramowitz and Stegun, 26.7.5.
    """
    z, n = _NORMAL.inv_cdf(tail), units - 1
    student = (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
    return student * math.sqrt(units / n)
