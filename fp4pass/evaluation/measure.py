"""Evaluate a causal language model on a text, or single linear layers: errors and differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .._compat.transformers_cache import cache_given
from ..calibration.windows import Windows, cut_windows, scored_bytes, unit_count
from ..core.progress import current, shown
from ..errors import ABOVE_0, OptionError, ShapeError, StateError, expected, require_number
from ..nn import experts
from ..nn.linear import QuantizedLinear
from ..quantization.observers import batches as batching
from ..quantization.observers.kv_cache import cache_format_of, quantized_cache
from ..quantization.observers.observer import rows_of_experts
from ..quantization.observers.visible_tokens import visible_rows, watching_tokens
from ..record.state import unwrap
from .intervals import SUMS, Change, changes, intervals

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24

# Logits of one batch: 256 MB.
_LARGEST = 1 << 28

# The measures of score_tokens: negative log-likelihood, KL, agreement of the likeliest token, the
# change of the probability of the right token, and its square.
MEASURED = ("nll", "kl", "top1", "delta_p", "delta_p2")


@dataclass(frozen=True)
class Evaluation:
    """Measures of a model on a text.

    Attributes:
        windows: windows that were run.
        tokens: tokens that were scored.
        perplexity: of the scored tokens.
        bits_per_byte: over the bytes that the scored tokens stand for; None without a tokenizer.
        kl: KL(reference || model), nats per token; None without a reference.
        kl_999: the KL that 99.9 % of the tokens stay below; None without a reference.
        top1: share of tokens whose likeliest successor is the reference's; None without one.
        delta_p: mean of what the model gives the right token more than the reference, as
            probabilities; None without a reference.
        rms_delta_p: root of the mean square of the same; None without a reference.
        unit: what is resampled: "document", or "window" where documents are not known.
        units: units with scored tokens.
        confidence: of the intervals.
        intervals: lower and upper end by the name of the measure; empty for fewer than two units.
        digest: SHA-256 of the tokens and of the scored positions.
        sums: [units, SUMS] float64, sums over the tokens of each unit.

    Example:
        >>> found = fp4pass.evaluate(model, tokenizer, text, model, window=16, progress=False)
        >>> found.kl, found.top1
        (0.0, 1.0)
    """

    windows: int
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None
    kl: float | None = None
    top1: float | None = None
    kl_999: float | None = None
    delta_p: float | None = None
    rms_delta_p: float | None = None
    unit: str = "window"
    units: int = 0
    confidence: float = 0.95
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    digest: str = ""
    sums: Tensor | None = field(default=None, repr=False, compare=False)

    def to_dict(self, *, sums: bool = False) -> dict[str, Any]:
        """Return the fields as JSON values; with `sums`, those of each unit too.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> found.to_dict()["unit"]
            'window'
        """
        ends = {name: list(each) for name, each in self.intervals.items()}
        of_units = self.sums.tolist() if sums and self.sums is not None else None
        plain = {**vars(self), "intervals": ends, "sums": of_units}
        if not sums:
            del plain["sums"]
        return plain

    def row(self, text: str, before: Evaluation | None = None) -> dict[str, Any]:
        """Return the row that `fp4pass eval --json` prints; `before` is that of the original.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, model, window=16, progress=False)
            >>> found.row("a text", before=found)["difference"]["perplexity"]["value"]
            0.0
        """
        found = {"text": text, **self.to_dict()}
        if before is not None:
            found["reference_perplexity"] = before.perplexity
            found["reference_intervals"] = before.to_dict()["intervals"]
            found["difference"] = self.difference(before).to_dict()
        return found

    def difference(self, other: Evaluation, *, confidence: float = 0.95) -> Difference:
        """Return this evaluation minus another of the same tokens, with intervals.

        Units are resampled for both together, so that what a hard document costs both cancels.

        Args:
            other: an evaluation by `fp4pass.evaluate` of the same tokens.
            confidence: of the intervals, in (0, 1).

        Raises:
            StateError: the tokens differ, or an evaluation has no sums.
            OptionError: confidence is out of range.

        Example:
            >>> before = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> packed = fp4pass.convert(model, "nvfp4a16", "sse")
            >>> found = fp4pass.evaluate(packed, tokenizer, text, window=16, progress=False)
            >>> change = found.difference(before).perplexity_ratio
            >>> change.low < change.value < change.high
            True
        """
        if self.sums is None or other.sums is None:
            raise StateError(
                "Expected two evaluations by fp4pass.evaluate, got one that has no sums. Make "
                "both with fp4pass.evaluate."
            )
        if self.digest != other.digest:
            raise StateError(
                "Expected evaluations of the same tokens, got different tokens: "
                f"{self.tokens} scored in {self.windows} windows (digest {self.digest}), and "
                f"{other.tokens} in {other.windows} (digest {other.digest}). Evaluate both on the "
                "same text, with the same window and stride."
            )
        _require_confidence(confidence)
        found = changes(self.sums.numpy(), other.sums.numpy(), confidence)
        return Difference(confidence=confidence, **found)


@dataclass(frozen=True)
class Difference:
    """One evaluation minus another of the same tokens.

    `perplexity_ratio` is perplexity over perplexity, the others are differences. A measure that one
    of them lacks is None. `confidence` is of the intervals.

    Example:
        >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
        >>> found.difference(found).perplexity.value
        0.0
    """

    confidence: float
    perplexity: Change
    perplexity_ratio: Change
    bits_per_byte: Change | None = None
    kl: Change | None = None
    top1: Change | None = None
    delta_p: Change | None = None
    rms_delta_p: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> found.difference(found).to_dict()["kl"] is None
            True
        """
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
    confidence: float = 0.95,
) -> Evaluation:
    """Measure the perplexity of a model on a text, and its distance from a reference.

    Each window is scored on all but its first token or, with a stride, on the tokens that the
    window before it has not scored. Fewer windows than `batch_size` run at once where their logits
    would take more than 256 MB. On a CPU that is slow in bfloat16 models compute in float32, see
    `fast_dtype`. A model converted with `kv_cache` reads keys and values from such a cache.

    Args:
        model: a causal language model; it is called with ids [B, window] and returns logits
            [B, window, vocabulary], or an object with such `.logits`.
        tokenizer: of transformers; None if `text` is token ids.
        text: a string, whose documents are separated by a line `<|doc|>`; or token ids [tokens];
            or windows of token ids [n, window].
        reference: the original of `model`, called in the same way.
        window: tokens of a window.
        windows: how many windows to keep, spread evenly over the text; None for all.
        batch_size: windows that run at once.
        progress: as for `convert`.
        stride: new tokens of each window; None for `window`.
        within_documents: whether each document is cut into windows by itself.
        confidence: of the intervals, in (0, 1), by a bootstrap over documents, or over windows
            where they are not known.

    Raises:
        StateError: a model is in training mode or returns no logits.
        ShapeError: the text is shorter than a window, or the reference has another vocabulary.
        OptionError: an argument is out of range, or the window is longer than the context.

    Example:
        >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
        >>> found.perplexity < 100 and found.tokens == 15 * found.windows
        True
    """
    models = [model] if reference is None else [model, reference]
    if isinstance(tokenizer, str):
        raise OptionError(
            f"{expected('tokenizer', 'one of transformers, or None', 'a string')} It comes before "
            "the text: fp4pass.evaluate(model, tokenizer, text)."
        )
    require_evaluating(*map(unwrap, models))
    require_number("batch_size", "at least 1", batch_size, least=1)
    _require_confidence(confidence)
    cut = cut_windows(
        tokenizer,
        text,
        window=window,
        stride=stride,
        windows=windows,
        within_documents=within_documents,
    )
    limit = getattr(getattr(unwrap(model), "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and cut.longest > limit:
        most = f"at most {limit} tokens, the context of the model"
        raise OptionError(expected("window", most, cut.longest))
    for each in models:
        for i, part in enumerate(cut):
            batching.require_tokens(each, part.ids[None], f"text: window {i}")
    with shown("evaluate", progress), batching.fast_dtype(*models):
        totals, sums, kls = _sum_up(models, cut, batch_size)
    if tokenizer is not None:
        size = scored_bytes(tokenizer, cut)
        if size.sum() > 0:
            sums[:, SUMS.index("bytes")] = size
    # Documents that no window reaches are no part of the sample.
    sums = sums[sums[:, SUMS.index("tokens")] > 0]
    tokens = int(sums[:, SUMS.index("tokens")].sum())
    length = sums[:, SUMS.index("bytes")].sum().item()
    means = {name: totals[name] / tokens for name in totals if name != "nll"}
    if means:
        means["rms_delta_p"] = math.sqrt(means.pop("delta_p2"))
    return Evaluation(
        windows=len(cut),
        tokens=tokens,
        perplexity=math.exp(totals["nll"] / tokens),
        bits_per_byte=None if math.isnan(length) else totals["nll"] / math.log(2) / length,
        **means,
        kl_999=quantile(kls, 0.999) if means else None,
        unit=cut.unit,
        units=len(sums),
        confidence=confidence,
        intervals=intervals(sums.numpy(), confidence),
        digest=cut.digest,
        sums=sums,
    )


def _require_confidence(confidence: float) -> None:
    number = "a number between 0 and 1, such as 0.95"
    require_number("confidence", number, confidence, float, ABOVE_0, 1 - 2**-53)


def _sum_up(
    models: Sequence[nn.Module], cut: Windows, batch_size: int
) -> tuple[dict[str, float], Tensor, Tensor]:
    """Return sums over all tokens, those of each unit [units, SUMS], and the KL of each token."""
    names = MEASURED[: 1 if len(models) == 1 else None]
    kls: list[Tensor] = []
    totals = dict.fromkeys(names, 0.0)
    columns = ("tokens", *names)
    found = torch.zeros(unit_count(cut), len(columns), dtype=torch.float64)
    together = min(fitting_batch_size(each, cut.longest, batch_size) for each in models)
    batches = list(cut.batches(together))
    for batch in current().each(batches, "batches"):
        ids = torch.stack([window.ids for window in batch])
        units = torch.cat([window.units for window in batch])
        targets = torch.cat([window.ids[window.first :] for window in batch])
        length = len(batch[0].ids)
        # Those of the logits [B * length] that predict the scored tokens.
        before = [torch.arange(each.first - 1, length - 1) for each in batch]
        rows = torch.cat([places + i * length for i, places in enumerate(before)])
        outputs = [read_logits(each, ids) for each in models]
        device, vocabulary = outputs[0].device, outputs[0].shape[1]
        for part in torch.arange(len(rows)).split(max(1, _CHUNK // vocabulary)):
            logits = [each[rows[part].to(each.device)].to(device) for each in outputs]
            terms = score_tokens(targets[part].to(device), *logits)
            for name, term in zip(names, terms, strict=True):
                totals[name] += term.sum(dtype=torch.float64).item()
            terms = [torch.ones(len(part)), *(term.cpu() for term in terms)]
            kls += terms[2:3]
            found.index_add_(0, units[part], torch.stack(terms, 1).double())
    # Columns that are not measured here, as the bytes, are nan.
    sums = torch.full((len(found), len(SUMS)), math.nan, dtype=torch.float64)
    sums[:, [SUMS.index(name) for name in columns]] = found
    return totals, sums, torch.cat(kls) if kls else torch.empty(0)


def fitting_batch_size(
    model: nn.Module, window: int, batch_size: int, largest: int | None = None
) -> int:
    """Return how many windows run at once so that their logits fit, by default into 256 MB."""
    head = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    vocabulary = getattr(head, "out_features", None)
    if vocabulary is None:
        return batch_size
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return max(1, min(batch_size, (largest or _LARGEST) // (window * vocabulary * size)))


def read_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [B * length, vocabulary] of windows [B, length]. Raises StateError."""
    # As `generate` would, for the cache is a part of what was converted.
    has_cache = cache_format_of(model) is not None
    cache = cache_given(unwrap(model), quantized_cache(model)) if has_cache else {}
    return logits_in(model(ids.to(batching.device_of(model)), **cache)).flatten(0, 1)


def logits_in(output: Any) -> Tensor:
    """Return the logits [B, T, vocabulary] in the output of a model. Raises StateError."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim != 3:
        raise StateError(
            "The output of the model: expected logits [batch, tokens, vocabulary], got "
            f"{type(output).__name__} without them. Give a causal language model."
        )
    return logits


def require_evaluating(*models: nn.Module) -> None:
    """Raise StateError for a model in training mode."""
    if any(model.training for model in models):
        raise StateError(
            "Expected a model in evaluation mode, got one in training mode, in which dropout is "
            "on. Call model.eval() first."
        )


def score_tokens(targets: Tensor, logits: Tensor, others: Tensor | None = None) -> list[Tensor]:
    """Return metrics [T] of tokens, in the order of MEASURED: all but nll only with `others`.

    logits and others, those of the reference, are [T, vocabulary], targets the tokens that follow
    [T]. KL and differences of probabilities are float64, agreement of top-1 is bool.
    """
    nll = _nll(logits, targets)
    if others is None:
        return [nll]
    if others.shape != logits.shape:
        raise ShapeError(
            f"The reference has logits {tuple(others.shape)}: expected {tuple(logits.shape)}, "
            "those of the model. Give the model that was converted."
        )
    agree = others.argmax(-1) == logits.argmax(-1)
    delta = (-nll.double()).exp() - (-_nll(others, targets).double()).exp()
    return [nll, token_kl(logits, others), agree, delta, delta.square()]


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def token_kl(logits: Tensor, others: Tensor) -> Tensor:
    """Return KL(others || logits) [T] float64 of tokens, of logits [T, vocabulary] each."""
    log_q, log_p = logits.float().log_softmax(-1), others.float().log_softmax(-1)
    p = log_p.exp()
    # A token that the reference rules out (logit -inf) adds nothing.
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1, dtype=torch.float64)


def quantile(values: Tensor, share: float) -> float:
    """Return the quantile of values [n], between two of them on the line through both."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    # Two infinite values have no line.
    found = low if low == high else low + (high - low) * (place % 1)
    return float(found)


@torch.no_grad()
def output_errors(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    activations: bool = False,
    progress: bool = True,
) -> dict[str, float]:
    """Measure |y - y'| / |y| of every converted linear layer on the inputs it has in `reference`.

    y is W x. y' is the dequantized weight times x or, with `activations`, the output of the
    converted layer without its bias, so that its quantized inputs count. A stack of experts is one
    layer, whose inputs are those that each expert is chosen for.

    Args:
        model: a converted model.
        reference: the float model that was converted.
        batches: as for `calibrate`; best held out from the calibration. Tokens that
            `attention_mask` hides do not count.
        activations: whether the converted layers see x, and not only their weights.
        progress: as for `convert`.

    Returns:
        The error by the name of the layer, nan for a layer that no batch reached.

    Raises:
        StateError: the models are not a converted model and its original.

    Example:
        >>> packed = fp4pass.convert(copy.deepcopy(model), "nvfp4a16", "sse")
        >>> errors = fp4pass.evaluation.output_errors(packed, model, batches, progress=False)
        >>> 0 < errors["0"] < 0.15
        True
    """
    batching.require_batches(batches)
    originals = dict(unwrap(reference).named_modules(remove_duplicate=False))
    sums: dict[str, list[float]] = {}
    with ExitStack() as hooks:
        for name, module in unwrap(model).named_modules():
            original = originals.get(name)
            if isinstance(module, experts.QuantizedExperts):
                stacks = {} if original is None else experts.stacks_of(original)
                measures: dict[str, Any] = {}
                for key, stack in experts.packed_stacks(module).items():
                    found = sums[f"{name}.{key}"] = [0.0, 0.0]
                    if key not in stacks or stacks[key].weight.shape != stack.weight.shape:
                        raise _no_original(f"{name}.{key}")
                    measures[key] = partial(_measure_stack, found, stack, activations)
                if original is not None:
                    hook = partial(_call_stacks, measures)
                    hooks.callback(
                        original.register_forward_pre_hook(hook, with_kwargs=True).remove
                    )
            elif isinstance(module, QuantizedLinear):
                weight = getattr(original, "weight", None)
                fits = isinstance(weight, Tensor) and weight.shape == module.weight.shape
                if original is None or not fits or isinstance(original, QuantizedLinear):
                    raise _no_original(name)
                sums[name] = [0.0, 0.0]
                measure = partial(_measure, sums[name], module, activations)
                hooks.callback(original.register_forward_hook(measure).remove)
        if not sums:
            raise StateError(
                "Expected a converted model, got one that has no converted linear layer. Call "
                "fp4pass.convert(model) first."
            )
        device = next(reference.parameters()).device
        bar = hooks.enter_context(shown("output errors", progress))
        with batching.fast_dtype(model, reference), watching_tokens(unwrap(reference)):
            for batch in bar.each(batches, "batches"):
                args, kwargs = batching.call_arguments(batch, device)
                reference(*args, **kwargs)
    return {
        name: math.sqrt(error / size) if size else (math.inf if error else math.nan)
        for name, (error, size) in sums.items()
    }


def _no_original(name: str) -> StateError:
    return StateError(
        f"{name or 'the model'}: expected a float linear layer of this name and shape in the "
        "reference, got none. Give the model as it was before convert, such as a copy.deepcopy of "
        "it."
    )


def _call_stacks(
    measures: Mapping[str, Any], owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call a function with each stack of float experts, its inputs and their experts."""
    hidden, ids, _ = experts.require_adapter(owner).routed(owner, args, kwargs)
    visible = rows_of_experts(owner, hidden)
    if visible is not None:
        hidden, ids = hidden[visible], ids[visible]
    stacks = experts.stacks_of(owner)
    for stage, x in experts.stage_inputs(owner, hidden, ids):
        for key in stage:
            if key in measures:
                measures[key](stacks[key], x, ids)


def _measure_stack(
    sums: list[float], module: experts.QuantizedExpertStack, activations: bool, *inputs: Any
) -> None:
    """Count the inputs x [T, K] or [T, k, K] of experts ids [T, k] of a float stack."""
    original, x, ids = inputs
    weights = [original.dense.float(), module.view.of(module.weight).to(x.device).float()]
    y, rounded = (ops.experts_dense(x.float(), ids, weight, None) for weight in weights)
    if activations:
        there = module.weight_packed.device
        rounded = module(x.to(there), ids.to(there)).to(y.device).float()
    _add(sums, rounded, y)


def _measure(sums: list[float], module: QuantizedLinear, activations: bool, *call: Any) -> None:
    """Count one call of a float linear layer: the layer, its arguments and its output."""
    original, args, _ = call
    visible, x = visible_rows(args[0]), args[0].flatten(0, -2)  # [T, K]
    x = x if visible is None else x[visible]
    weights = (each.t() if module.transposed else each for each in (original.weight, module.weight))
    y, rounded = (x.float() @ each.to(x.device).float().t() for each in weights)
    if activations:
        config, inputs = module.config, x
        # A layer with folded rotations reads and writes what its neighbours rotate.
        if config.folded:
            inputs = ops.rotate(x, config.rotation)
        rounded = module(inputs.to(module.weight_packed.device)).float()
        rounded = rounded if module.bias is None else rounded - module.bias.float()
        if config.output_rotation:
            rounded = ops.rotate(rounded, config.output_rotation)
    _add(sums, rounded.to(y.device), y)


def _add(sums: list[float], rounded: Tensor, y: Tensor) -> None:
    for i, each in enumerate((y - rounded, y)):
        sums[i] += each.square().sum(dtype=torch.float64).item()
