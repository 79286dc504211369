"""The knapsack against brute force, and its limits."""

from __future__ import annotations

import itertools
import random

import pytest

from fp4pass.lab.budget.knapsack import cheapest

Groups = list[list[tuple[float, float]]]


def sums(groups: Groups, chosen: tuple[int, ...] | list[int]) -> tuple[float, float]:
    weight = value = 0.0
    for choices, place in zip(groups, chosen, strict=True):
        weight, value = weight + choices[place][0], value + choices[place][1]
    return weight, value


def brute_force(groups: Groups, limit: float) -> float | None:
    every = itertools.product(*(range(len(choices)) for choices in groups))
    found = [value for weight, value in (sums(groups, each) for each in every) if weight <= limit]
    return min(found, default=None)


def drawn(rng: random.Random) -> Groups:
    def number() -> float:
        return rng.choice([rng.randint(0, 20), rng.random() * 9])

    count = rng.randint(1, 6)
    return [[(number(), number()) for _ in range(rng.randint(1, 4))] for _ in range(count)]


def test_it_is_the_best_of_all_choices() -> None:
    rng = random.Random(0)
    infeasible = 0
    for _ in range(1500):
        groups, limit = drawn(rng), rng.random() * 60
        best, found = brute_force(groups, limit), cheapest(groups, limit)
        if best is None or found is None:
            infeasible += 1
            assert best is None and found is None
            continue
        weight, value = sums(groups, found)
        assert weight <= limit * (1 + 1e-9)
        assert value == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert 50 < infeasible < 1000


def test_a_choice_that_no_share_of_steps_reaches_is_found() -> None:
    """The relaxation alone would leave the room unused: the middle choice is above the hull."""
    groups = [[(0.0, 10.0), (5.0, 9.0), (10.0, 0.0)]]
    assert cheapest(groups, 6.0) == [1]


def test_of_equal_sums_it_is_the_lightest() -> None:
    assert cheapest([[(3.0, 1.0), (2.0, 1.0)], [(1.0, 0.0)]], 9.0) == [1, 0]


def test_a_limit_is_met_exactly_or_not_at_all() -> None:
    groups = [[(2.0, 1.0), (4.0, 0.0)], [(2.0, 1.0), (4.0, 0.0)]]
    assert cheapest(groups, 4.0) == [0, 0]
    assert cheapest(groups, 8.0) == [1, 1]
    assert cheapest(groups, 3.9) is None
    assert cheapest([], 0.0) == []


def test_many_groups_of_sizes_with_nothing_in_common() -> None:
    """As of a pruned model: no unit of bytes divides them."""
    rng = random.Random(0)
    groups = []
    for _ in range(400):
        size, kl = rng.randint(60_000, 300_000), rng.lognormvariate(-6, 1.5)
        groups.append([(size * 4.5, kl), (size * 8.25, 0.03 * kl), (size * 16.0, 0.0)])
    limit = sum(choices[1][0] for choices in groups) * 0.7
    found = cheapest(groups, limit)
    assert found is not None
    weight, _ = sums(groups, found)
    assert 0.999 * limit < weight <= limit
