"""Perplexity, KL and agreement against straightforward float64 computations."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation.toys import VOCABULARY, Tokens, Toy
from torch import nn
from torch.nn import functional as F

import fp4pass
from fp4pass.calibration.windows import scored_bytes
from fp4pass.errors import OptionError, ShapeError, StateError
from fp4pass.evaluation import cut_windows
from fp4pass.evaluation.intervals import SUMS


@torch.no_grad()
def straightforward(model, reference, ids):
    """Of each token nll, KL, agreement and difference of probabilities, in float64: [4, tokens]."""
    terms = []
    for row in ids:
        q = model(row[None]).logits[0, :-1].double().log_softmax(-1)
        p = reference(row[None]).logits[0, :-1].double().log_softmax(-1)
        nll = F.nll_loss(q, row[1:], reduction="none")
        kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        delta = (q.exp() - p.exp()).gather(1, row[1:, None])[:, 0]
        terms.append(torch.stack((nll, kl, (p.argmax(-1) == q.argmax(-1)).double(), delta)))
    return torch.cat(terms, 1)


@pytest.mark.parametrize("chunk", [None, 3 * 2048])
def test_against_float64(tiny, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr("fp4pass.evaluation.measure._CHUNK", chunk)
    model, converted, tokenizer, ids = tiny
    found = fp4pass.evaluate(converted, tokenizer, ids, model, batch_size=3, progress=False)
    terms = straightforward(converted, model, ids)
    nll, kl, top1, delta = terms.mean(1).tolist()
    assert math.log(found.perplexity) == pytest.approx(nll, rel=1e-5)
    # A KL is a small difference of float32 logits, and batches of another size round otherwise.
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.top1 == pytest.approx(top1, abs=1.5 / found.tokens)
    assert found.kl > 0.01
    assert found.kl_999 == pytest.approx(np.quantile(terms[1].numpy(), 0.999), rel=1e-3)
    assert found.kl_999 > 5 * found.kl
    assert found.delta_p == pytest.approx(delta, rel=1e-3)
    rms = terms[3].square().mean().sqrt().item()
    assert found.rms_delta_p == pytest.approx(rms, rel=1e-3) and rms > abs(delta)
    low, high = found.intervals["rms_delta_p"]
    assert low < rms < high
    # In a byte-level vocabulary each character of a token stands for one byte.
    names = [tokenizer.convert_ids_to_tokens(row[1:]) for row in ids.tolist()]
    size = sum(len(name) for row in names for name in row if name != "<|doc|>")
    assert found.bits_per_byte == pytest.approx(nll * found.tokens / math.log(2) / size, rel=1e-3)
    assert (found.windows, found.tokens) == (6, 6 * 63)


def test_a_model_against_itself(tiny):
    model, _, tokenizer, ids = tiny
    found = fp4pass.evaluate(model, tokenizer, ids, model, progress=False)
    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.to_dict() == {
        "windows": 6,
        "tokens": 378,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "kl": 0.0,
        "top1": 1.0,
        "kl_999": 0.0,
        "delta_p": 0.0,
        "rms_delta_p": 0.0,
        "unit": "window",
        "units": 6,
        "confidence": 0.95,
        "intervals": {name: list(ends) for name, ends in found.intervals.items()},
        "digest": found.digest,
    }
    assert found.intervals["kl"] == (0.0, 0.0) and found.intervals["top1"] == (1.0, 1.0)
    assert torch.tensor(found.to_dict(sums=True)["sums"]).shape == (6, len(SUMS))


@pytest.mark.core
def test_documents_that_no_window_reaches_are_no_units(toy):
    text = "ab\n<|doc|>\nc\n<|doc|>\ndefghijk"
    found = fp4pass.evaluate(toy, Tokens(), text, window=2, windows=2, progress=False)
    assert (found.unit, found.units, found.tokens) == ("document", 2, 2)


@pytest.mark.core
def test_a_token_that_is_ruled_out_adds_nothing(toy):
    ids = torch.randint(1, VOCABULARY, (2, 16))
    with torch.no_grad():
        toy.head.bias[0] = -math.inf
    found = fp4pass.evaluate(copy.deepcopy(toy), None, ids, toy, progress=False)
    assert (found.kl, found.top1) == (0.0, 1.0)


@pytest.mark.core
@pytest.mark.parametrize("ruled_out", [1, VOCABULARY - 1])
def test_what_a_model_rules_out_is_infinitely_far(toy, ruled_out):
    other = copy.deepcopy(toy)
    with torch.no_grad():
        toy.head.bias[0] += 9
        other.head.bias[:ruled_out] = -math.inf
    ids = torch.full((4, 16), VOCABULARY - 1)
    found = fp4pass.evaluate(other, None, ids, toy, progress=False)
    assert found.kl == found.kl_999 == math.inf
    assert set(found.intervals) == {"perplexity", "top1", "delta_p", "rms_delta_p"}
    difference = found.difference(fp4pass.evaluate(toy, None, ids, toy, progress=False))
    assert (difference.kl.value, difference.kl.significant) == (math.inf, None)


@pytest.mark.core
def test_refusals(toy):
    ids = torch.randint(1, VOCABULARY, (2, 16))
    with pytest.raises(OptionError, match="batch_size: expected at least 1, got 0"):
        fp4pass.evaluate(toy, None, ids, batch_size=0)
    with pytest.raises(OptionError, match="confidence: expected"):
        fp4pass.evaluate(toy, None, ids, confidence=1.0)
    with pytest.raises(StateError, match="training mode"):
        fp4pass.evaluate(copy.deepcopy(toy).train(), None, ids)
    with pytest.raises(StateError, match="training mode"):
        fp4pass.evaluate(toy, None, ids, copy.deepcopy(toy).train())
    with pytest.raises(ShapeError, match="The reference has logits"):
        fp4pass.evaluate(toy, None, ids, Toy(VOCABULARY + 1).eval(), progress=False)
    with pytest.raises(StateError, match="expected logits"):
        fp4pass.evaluate(nn.Flatten(1).eval(), None, ids, progress=False)
    toy.config = SimpleNamespace(max_position_embeddings=15)
    with pytest.raises(OptionError, match="at most 15 tokens, the context of the model, got 16"):
        fp4pass.evaluate(toy, None, ids)


@torch.no_grad()
def terms_of(model, reference, cut):
    """A row for each scored token: its unit, nll, KL, agreement; in float64."""
    rows = []
    for window in cut:
        q = model(window.ids[None]).logits[0].double().log_softmax(-1)
        p = reference(window.ids[None]).logits[0].double().log_softmax(-1)
        for i, unit in zip(
            range(window.first, len(window.ids)), window.units.tolist(), strict=True
        ):
            a, b = p[i - 1], q[i - 1]
            kl = F.kl_div(b, a, log_target=True, reduction="sum")
            rows.append([unit, -b[window.ids[i]], kl, a.argmax() == b.argmax()])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{"stride": 20}, {"within_documents": True}])
def test_sliding_windows_against_float64(tiny, held_out, options):
    model, converted, tokenizer, _ = tiny
    text = held_out[:3000]
    options = {"window": 64, "windows": 6, **options}
    cut = cut_windows(tokenizer, text, **options)
    wanted = terms_of(converted, model, cut)
    found = fp4pass.evaluate(converted, tokenizer, text, model, progress=False, **options)
    assert found.tokens == len(wanted) and (found.unit, found.windows) == ("document", 6)
    mean = wanted.mean(0).tolist()
    assert math.log(found.perplexity) == pytest.approx(mean[1], rel=1e-5)
    assert found.kl == pytest.approx(mean[2], rel=1e-3)
    assert found.top1 == pytest.approx(mean[3], abs=1.5 / found.tokens)
    units = wanted[:, 0].unique()
    for unit, sums in zip(units, found.sums, strict=True):
        own = wanted[wanted[:, 0] == unit]
        assert sums[SUMS.index("tokens")] == len(own)
        assert sums[SUMS.index("nll")].item() == pytest.approx(own[:, 1].sum().item(), rel=1e-4)
        assert sums[SUMS.index("kl")].item() == pytest.approx(own[:, 2].sum().item(), rel=1e-2)
    assert found.sums[:, SUMS.index("bytes")].sum() == pytest.approx(
        scored_bytes(tokenizer, cut).sum().item()
    )
    measures = {"perplexity", "bits_per_byte", "kl", "top1", "delta_p", "rms_delta_p"}
    assert set(found.intervals) == measures
    for name, (low, high) in found.intervals.items():
        assert low < getattr(found, name) < high
