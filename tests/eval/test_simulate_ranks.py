"""The script that computes how long large models take on several GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "eval" / "results"


@pytest.fixture(scope="module")
def made(script: Any) -> tuple[Any, Any]:
    module = script("simulate_ranks")
    return module, module.rates(RESULTS)


def test_rates_are_those_of_the_results(made: tuple[Any, Any]) -> None:
    _, known = made
    rows = json.loads((RESULTS / "hessian-h200.json").read_text())["rows"]
    row = next(row for row in rows if row["columns"] == 14336 and row["products"] == "bfloat16")
    assert known.hessian_seconds(8192, 14336) == pytest.approx(row["us"] * 1e-6)
    rows = json.loads((RESULTS / "gptq-h200.json").read_text())["rows"]
    height, slope = known.visit
    for row in rows:
        if row["format"] == "nvfp4":
            n, k = row["shape"]
            found = n * k * (height + slope * k) + known.factor * k**3
            assert found == pytest.approx(row["seconds"], rel=0.2)


def test_a_layer_of_one_linear(made: tuple[Any, Any]) -> None:
    module, known = made
    n, k, tokens = 8192, 14336, module.TOKENS
    layer = [module.Weight(n, k, "x")]
    height, slope = known.visit
    forward = 4 * tokens * n * k / known.forward + known.hessian_seconds(tokens, k)
    factor = known.factor * k**3
    rows = n * k * (height + slope * k) + 4 * n * k**2 / known.exact

    def seconds(size: int, shared: bool = True) -> float:
        return module.seconds(layer, "gptq", size, known, shared)

    assert seconds(1) == pytest.approx(forward + factor + rows)
    # Two parts of 4096 rows. The Hessian goes to who sums it, and the sum to the other.
    sent = (2 * 4 * k**2 + module.PACKED * n * k) / module.LINK
    assert seconds(2) == pytest.approx(forward / 2 + factor + rows / 2 + sent)
    sent -= 4 * k**2 / module.LINK
    assert seconds(2, False) == pytest.approx(forward / 2 + factor + rows + sent)
    # `hessian` takes less than reading the weight.
    assert module.seconds(layer, "hessian", 8, known, True) == 2 * n * k / module.DISK


def test_more_processes_and_shared_weights_are_no_slower(made: tuple[Any, Any]) -> None:
    module, known = made
    for model in module.MODELS:
        for method in ("hessian", "gptq"):
            times = [module.minutes(model, method, size, known) for size in module.SIZES]
            assert times == sorted(times, reverse=True)
            for size, shared in zip(module.SIZES, times, strict=True):
                assert shared <= module.minutes(model, method, size, known, False) * 1.01
