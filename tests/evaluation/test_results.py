"""Differences of two evaluations."""

from __future__ import annotations

import copy

import pytest
import torch
from evaluation.toys import VOCABULARY

import fp4pass
from fp4pass.errors import StateError
from fp4pass.evaluation import Evaluation


@pytest.mark.slow
def test_differences(tiny, held_out):
    model, converted, tokenizer, _ = tiny

    def measure(model, reference=None, **options):
        options = {"window": 64, "windows": 12, "progress": False, **options}
        return fp4pass.evaluate(model, tokenizer, held_out, reference, **options)

    before, found = measure(model), measure(converted, model)
    difference = found.difference(before)
    assert difference.perplexity.value == pytest.approx(found.perplexity - before.perplexity)
    ratio = difference.perplexity_ratio
    assert ratio.value == pytest.approx(found.perplexity / before.perplexity)
    assert ratio.significant and 1 < ratio.low < ratio.value < ratio.high
    low, high = found.intervals["perplexity"]
    assert difference.perplexity.high - difference.perplexity.low < (high - low) / 3
    assert (difference.kl, difference.top1) == (None, None)
    assert difference.to_dict()["bits_per_byte"]["significant"] is True
    nothing = found.difference(measure(copy.deepcopy(converted), model)).to_dict()
    assert nothing.pop("confidence") == 0.95
    for name, change in nothing.items():
        same = float(name == "perplexity_ratio")
        assert change == {"value": same, "low": same, "high": same, "significant": False}
    for options in ({"stride": 32}, {"window": 32}, {"windows": 11}):
        with pytest.raises(StateError, match="different tokens"):
            found.difference(measure(model, **options))
    with pytest.raises(StateError, match="no sums"):
        found.difference(Evaluation(8, 504, 3.0))
    alone = measure(model, windows=1)
    one = alone.difference(alone).perplexity
    assert alone.unit == "document" and (alone.units > 1 or one.significant is None)


@pytest.mark.core
def test_one_window_has_no_interval(toy):
    ids = torch.randint(1, VOCABULARY, (1, 16))
    found = fp4pass.evaluate(toy, None, ids, toy, progress=False)
    assert (found.units, found.intervals) == (1, {})
    change = found.difference(found).kl
    assert (change.value, change.low, change.significant) == (0.0, None, None)
