"""How good a model is on a text, and how far a converted one is from its original."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import ops
from ..errors import OptionError, ShapeError, StateError
from ..linear import QuantizedLinear
from ..quantization.batches import call_arguments
from ..quantization.state import unwrap
from .intervals import SUMS, Bootstrap, Change, changes, intervals
from .logits import logits_reader
from .windows import Windows, cut_windows, scored_bytes, token_windows, unit_count

__all__ = ["Difference", "Evaluation", "evaluate", "output_errors", "token_windows"]

# Logits that are looked at together in float32: 64 MB.
_CHUNK = 1 << 24

# Of a nucleus that are looked for first; rows with a larger one are looked at again.
_NUCLEUS = 64


@dataclass(frozen=True)
class Evaluation:
    """A model on a text.

    tokens: that were scored; perplexity: of them; bits_per_byte: over the bytes that they stand
    for, None without a tokenizer; kl: KL(reference || model) in nats per token; top1: the share of
    tokens whose likeliest successor is the reference's; top_p_kl: KL in the reference's nucleus of
    mass `top_p`, both renormalized there; these three None without a reference.
    unit: "document", or "window" where documents are not known; units: how many were scored;
    intervals: of each measure over other such units, empty for fewer than two; digest: of the
    tokens; sums: [units, SUMS] float64, over the tokens of each unit.
    """

    windows: int
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None
    kl: float | None = None
    top1: float | None = None
    top_p_kl: float | None = None
    top_p: float = 0.95
    unit: str = "window"
    units: int = 0
    confidence: float = 0.95
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    digest: str = ""
    sums: Tensor | None = field(default=None, repr=False, compare=False)

    def to_dict(self, *, sums: bool = False) -> dict[str, Any]:
        """As JSON has it; with the sums of each unit if they are asked for."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain["intervals"] = {name: list(ends) for name, ends in self.intervals.items()}
        of_units = plain.pop("sums")
        if sums:
            plain["sums"] = None if of_units is None else of_units.tolist()
        return plain

    def row(self, text: str, before: Evaluation | None = None) -> dict[str, Any]:
        """As `fp4pass eval --json` prints it. text: what it is called; before: of the original."""
        found = {"text": text, **self.to_dict()}
        if before is not None:
            found["reference_perplexity"] = before.perplexity
            found["reference_intervals"] = before.to_dict()["intervals"]
            found["difference"] = self.difference(before).to_dict()
        return found

    def difference(
        self, other: Evaluation, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> Difference:
        """How far this evaluation is from another one on the same tokens.

        Units are resampled for both together, so what a hard document costs both cancels.
        Raises StateError for an evaluation of other tokens, or one that was made by hand.
        """
        if self.sums is None or other.sums is None:
            raise StateError("An evaluation has no sums. Make both with fp4pass.evaluate.")
        if self.digest != other.digest:
            raise StateError(
                f"The evaluations are of different tokens: {self.tokens} scored in {self.windows} "
                f"windows (digest {self.digest}), and {other.tokens} in {other.windows} (digest "
                f"{other.digest}). Evaluate both on the same text, with the same window and stride."
            )
        options = _bootstrap(confidence, resamples, seed)
        found = changes(self.sums.numpy(), other.sums.numpy(), options)
        if self.top_p != other.top_p:
            found.pop("top_p_kl", None)
        return Difference(confidence=confidence, **found)


@dataclass(frozen=True)
class Difference:
    """One evaluation minus another of the same tokens, and perplexity over perplexity.

    None for what one of them does not have, or for KL in nuclei of another mass.
    """

    confidence: float
    perplexity: Change
    perplexity_ratio: Change
    bits_per_byte: Change | None = None
    kl: Change | None = None
    top_p_kl: Change | None = None
    top1: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    text: str | Tensor,
    reference: nn.Module | None = None,
    *,
    window: int = 512,
    windows: int | None = None,
    batch_size: int = 8,
    progress: bool = True,
    stride: int | None = None,
    within_documents: bool = False,
    top_p: float = 0.95,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Evaluation:
    """Perplexity of `model` on `text`, and its distance from `reference`.

    model, reference: causal language models, called with ids [B, window]; their `.logits`
    [B, window, vocabulary] count. tokenizer: of transformers, None if `text` is token ids.
    text, window, windows, stride, within_documents: as for `cut_windows`; each window is scored on
    all but its first token or, with a stride, on what the window before it has not scored.
    top_p: mass of the nucleus, in (0, 1]. confidence, resamples, seed: of the intervals, which are
    of the bootstrap over documents, or windows where documents are not known.
    Large logits are made a few tokens at a time, if that gives the model's logits.
    Raises StateError for a model in training mode, ShapeError for a text shorter than one window
    or a reference with another vocabulary, OptionError for bad arguments.
    """
    for each in (model, reference):
        if each is not None and unwrap(each).training:
            raise StateError("The model is in training mode, so dropout is on. Call eval() first.")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; at least 1 is wanted.")
    if not 0 < top_p <= 1:
        raise OptionError(f"top_p is {top_p}; above 0 and at most 1 is wanted.")
    options = _bootstrap(confidence, resamples, seed)
    cut = cut_windows(
        tokenizer,
        text,
        window=window,
        stride=stride,
        windows=windows,
        within_documents=within_documents,
    )
    _require_context(model, cut.longest)
    totals, sums = _sum_up(model, reference, cut, batch_size, top_p, progress)
    if tokenizer is not None:
        size = scored_bytes(tokenizer, cut)
        if size.sum() > 0:
            sums[:, SUMS.index("bytes")] = size
    # Documents that no window reaches are no part of the sample.
    sums = sums[sums[:, SUMS.index("tokens")] > 0]
    tokens = int(sums[:, SUMS.index("tokens")].sum())
    length = sums[:, SUMS.index("bytes")].sum().item()
    compared = reference is not None
    return Evaluation(
        windows=len(cut),
        tokens=tokens,
        perplexity=math.exp(totals["nll"] / tokens),
        bits_per_byte=None if math.isnan(length) else totals["nll"] / math.log(2) / length,
        kl=totals["kl"] / tokens if compared else None,
        top1=totals["top1"] / tokens if compared else None,
        top_p_kl=totals["top_p_kl"] / tokens if compared else None,
        top_p=top_p,
        unit=cut.unit,
        units=len(sums),
        confidence=confidence,
        intervals=intervals(sums.numpy(), options),
        digest=cut.digest,
        sums=sums,
    )


def _bootstrap(confidence: float, resamples: int, seed: int) -> Bootstrap:
    if not 0 < confidence < 1:
        raise OptionError(f"confidence is {confidence}; between 0 and 1 is wanted, as 0.95.")
    if resamples < 1:
        raise OptionError(f"resamples is {resamples}; at least 1 is wanted, and 1000 are better.")
    return Bootstrap(confidence, resamples, seed)


def _sum_up(
    model: nn.Module,
    reference: nn.Module | None,
    cut: Windows,
    batch_size: int,
    top_p: float,
    progress: bool,
) -> tuple[dict[str, float], Tensor]:
    """Run the models: sums over all scored tokens, and over those of each unit [units, SUMS].

    What is not known, as the bytes, is nan.
    """
    longest = max(cut, key=lambda window: len(window.ids)).ids
    readers = [
        logits_reader(each, longest, batch_size) for each in (model, reference) if each is not None
    ]
    names = ["nll"] if reference is None else ["nll", "kl", "top1", "top_p_kl"]
    totals = dict.fromkeys(names, 0.0)
    columns = ("tokens", *names)
    found = torch.zeros(unit_count(cut), len(columns), dtype=torch.float64)
    batches = list(cut.batches(min(reader.batch_size for reader in readers)))
    for batch in tqdm(batches, desc="evaluate", unit="batch", disable=not progress):
        ids = torch.stack([window.ids for window in batch])
        units = torch.cat([window.units for window in batch])
        targets = torch.cat([window.ids[window.first :] for window in batch])
        length = ids.shape[1]
        # The logits that predict the scored tokens.
        rows = torch.cat(
            [
                torch.arange(window.first - 1, length - 1) + i * length
                for i, window in enumerate(batch)
            ]
        )
        read = [reader.read(ids) for reader in readers]
        vocabulary = read[0](rows[:1]).shape[1]
        for part in torch.arange(len(rows)).split(max(1, _CHUNK // vocabulary)):
            logits, *others = (each(rows[part]) for each in read)
            wanted = targets[part].to(logits.device)
            terms = _score(
                logits, wanted, *(each.to(logits.device) for each in others), top_p=top_p
            )
            for name, term in zip(names, terms, strict=True):
                totals[name] += term.sum(dtype=torch.float64).item()
            terms = [torch.ones(len(part)), *(term.cpu() for term in terms)]
            found.index_add_(0, units[part], torch.stack(terms, 1).double())
    sums = torch.full((len(found), len(SUMS)), math.nan, dtype=torch.float64)
    sums[:, [SUMS.index(name) for name in columns]] = found
    return totals, sums


@torch.no_grad()
def output_errors(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    activations: bool = False,
    progress: bool = True,
) -> dict[str, float]:
    """|y - y'| / |y| of every converted linear of `model`, on the inputs it has in `reference`.

    reference: the float model that was converted. batches: as for `calibrate`; best held out.
    y is W x. y' is the dequantized weight times x, or with `activations` what the converted linear
    makes of x, so that its quantized inputs count. nan for a linear that no batch reached.
    Raises StateError if the models are not a converted one and its original.
    """
    originals = dict(unwrap(reference).named_modules(remove_duplicate=False))
    sums: dict[str, list[float]] = {}
    handles = []
    for name, module in unwrap(model).named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        original = originals.get(name)
        if not isinstance(getattr(original, "weight", None), Tensor) or isinstance(
            original, QuantizedLinear
        ):
            raise StateError(
                f"{name or 'the model'}: the reference has no float linear of this name. Give the "
                "model as it was before convert, such as a copy.deepcopy of it."
            )
        assert original is not None
        sums[name] = [0.0, 0.0]
        measure = partial(_measure, sums[name], module, activations)
        handles.append(original.register_forward_hook(measure))
    if not handles:
        raise StateError("The model has no converted linear. Call fp4pass.convert(model) first.")
    device = next(reference.parameters()).device
    try:
        for batch in tqdm(batches, desc="output errors", unit="batch", disable=not progress):
            args, kwargs = call_arguments(batch, device)
            reference(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: math.sqrt(error / size) if size else (math.inf if error else math.nan)
        for name, (error, size) in sums.items()
    }


def _measure(
    sums: list[float],
    module: QuantizedLinear,
    activations: bool,
    original: nn.Module,
    args: Sequence[Tensor],
    output: Tensor,
) -> None:
    """Add |y - y'|^2 and |y|^2 of one call of a linear to `sums`."""
    weight = original.weight
    assert isinstance(weight, Tensor)
    x = args[0].flatten(0, -2)  # [T, K]
    matrix = (weight.t() if module.transposed else weight).float()  # [N, K]
    y = x.float() @ matrix.t()
    if activations:
        device = module.weight_packed.device
        bias = 0.0 if module.bias is None else module.bias.float()
        if module.folded:
            x = ops.rotate(x, module.rotation)
        found = (module(x.to(device)).float() - bias).to(y.device)
        if module.output_rotation:
            found = ops.rotate(found, module.output_rotation)
        difference = y - found
    else:
        dense = module.weight.to(weight.device)
        quantized = (dense.t() if module.transposed else dense).float()
        difference = x.float() @ (matrix - quantized).t()
    sums[0] += difference.square().sum(dtype=torch.float64).item()
    sums[1] += y.square().sum(dtype=torch.float64).item()


def _require_context(model: nn.Module, window: int) -> None:
    config = getattr(unwrap(model), "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and window > limit:
        raise OptionError(
            f"A window has {window} tokens, but the context of the model is {limit}. Choose a "
            f"window of at most {limit}."
        )


def _score(
    logits: Tensor, targets: Tensor, others: Tensor | None = None, *, top_p: float
) -> list[Tensor]:
    """Of each token: nll and, given the reference's logits, KL, agreement and KL in its nucleus.

    logits, others: [T, vocabulary]. targets: [T]. Returns tensors [T], the KLs float64.
    """
    if others is not None and others.shape != logits.shape:
        raise ShapeError(
            f"The reference has logits {tuple(others.shape)} and the model {tuple(logits.shape)}. "
            "Give the model that was converted."
        )
    log_q = logits.float().log_softmax(-1)
    nll = -log_q.gather(1, targets[:, None])[:, 0]
    if others is None:
        return [nll]
    log_p = others.float().log_softmax(-1)
    p = log_p.exp()
    # A token that the reference rules out (logit -inf) adds nothing.
    terms = torch.where(p == 0, 0.0, p * (log_p - log_q))
    kl = terms.sum(-1, dtype=torch.float64)
    agree = others.argmax(-1) == logits.argmax(-1)
    if top_p == 1:
        return [nll, kl, agree, kl]
    outside = log_p < _least_likely(log_p, top_p)[:, None]
    # log of the mass that each model has in the nucleus.
    mass_p = p.masked_fill(outside, 0.0).sum(-1, dtype=torch.float64)
    mass_q = log_q.exp().masked_fill_(outside, 0.0).sum(-1, dtype=torch.float64)
    inside = terms.masked_fill(outside, 0.0).sum(-1, dtype=torch.float64)
    inside = inside / mass_p + (mass_q.log() - mass_p.log())
    # A model that rules the whole nucleus out is infinitely far, and not inf - inf.
    return [nll, kl, agree, torch.where(mass_q == 0, math.inf, inside)]


def _least_likely(log_p: Tensor, top_p: float) -> Tensor:
    """The log probability of the last token that the mass `top_p` needs: [T, vocabulary] to [T]."""
    tokens, vocabulary = log_p.shape
    found = log_p.new_full((tokens,), -math.inf)
    left = torch.arange(tokens, device=log_p.device)
    count = _NUCLEUS
    while len(left):
        likeliest = log_p[left].topk(min(count, vocabulary)).values
        mass = likeliest.double().exp().cumsum(-1)
        # Where all of them have less by a rounding, all are needed.
        before = (mass < top_p).sum(-1).clamp(max=vocabulary - 1)
        enough = before < likeliest.shape[1]
        found[left[enough]] = likeliest[enough].gather(1, before[enough, None])[:, 0]
        left, count = left[~enough], count * 8
    return found
