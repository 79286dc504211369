"""Metrics of single tokens: negative log-likelihood, KL divergence and agreement."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ShapeError

# The measures of score_tokens: negative log-likelihood, KL, agreement of the likeliest token, KL in
# the nucleus, the change of the probability of the right token, and its square.
MEASURED = ("nll", "kl", "top1", "top_p_kl", "delta_p", "delta_p2")

# Tokens of a nucleus to look for first; rows with a larger nucleus are searched again.
_NUCLEUS = 64


def score_tokens(
    logits: Tensor, targets: Tensor, others: Tensor | None = None, *, top_p: float
) -> list[Tensor]:
    """Return metrics [T] of tokens, in the order of MEASURED: all but nll only with `others`.

    logits and others, those of the reference, are [T, vocabulary], targets the tokens that follow
    [T]. The nucleus is the reference's, of mass `top_p`. KL and differences of probabilities are
    float64, agreement of top-1 is bool.
    """
    if others is not None and others.shape != logits.shape:
        raise ShapeError(
            f"The reference has logits {tuple(others.shape)}: expected {tuple(logits.shape)}, "
            "those of the model. Give the model that was converted."
        )
    log_q = logits.float().log_softmax(-1)
    nll = -log_q.gather(1, targets[:, None])[:, 0]
    if others is None:
        return [nll]
    log_p = others.float().log_softmax(-1)
    terms = _kl_terms(log_p, log_q)
    kl = terms.sum(-1, dtype=torch.float64)
    agree = others.argmax(-1) == logits.argmax(-1)
    delta = (-nll.double()).exp() - log_p.gather(1, targets[:, None])[:, 0].double().exp()
    if top_p == 1:
        return [nll, kl, agree, kl, delta, delta.square()]
    outside = log_p < _least_likely(log_p, top_p)[:, None]
    # log of the mass that each model has in the nucleus.
    mass_p = log_p.exp().masked_fill_(outside, 0.0).sum(-1, dtype=torch.float64)
    mass_q = log_q.exp().masked_fill_(outside, 0.0).sum(-1, dtype=torch.float64)
    inside = terms.masked_fill(outside, 0.0).sum(-1, dtype=torch.float64)
    inside = inside / mass_p + (mass_q.log() - mass_p.log())
    # A model that rules the whole nucleus out is infinitely far, and not inf - inf.
    inside = torch.where(mass_q == 0, math.inf, inside)
    return [nll, kl, agree, inside, delta, delta.square()]


def token_kl(logits: Tensor, others: Tensor) -> Tensor:
    """Return KL(others || logits) [T] float64 of tokens, of logits [T, vocabulary] each."""
    log_q, log_p = logits.float().log_softmax(-1), others.float().log_softmax(-1)
    return _kl_terms(log_p, log_q).sum(-1, dtype=torch.float64)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return what each token of the vocabulary adds to the KL."""
    p = log_p.exp()
    # A token that the reference rules out (logit -inf) adds nothing.
    return torch.where(p == 0, 0.0, p * (log_p - log_q))


def quantile(values: Tensor, share: float) -> float:
    """Return the quantile of values [n], between two of them on the line through both."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    # Two infinite values have no line.
    found = low if low == high else low + (high - low) * (place % 1)
    return float(found)


def _least_likely(log_p: Tensor, top_p: float) -> Tensor:
    """Return the log probability of the last token in the nucleus: [T, vocabulary] to [T]."""
    tokens, vocabulary = log_p.shape
    found = log_p.new_full((tokens,), -math.inf)
    left = torch.arange(tokens, device=log_p.device)
    count = _NUCLEUS
    while len(left):
        likeliest = log_p[left].topk(min(count, vocabulary)).values
        mass = likeliest.double().exp().cumsum(-1)
        # Where rounding leaves the sum of all below top_p, the nucleus is all tokens.
        before = (mass < top_p).sum(-1).clamp(max=vocabulary - 1)
        enough = before < likeliest.shape[1]
        found[left[enough]] = likeliest[enough].gather(1, before[enough, None])[:, 0]
        left, count = left[~enough], count * 8
    return found
