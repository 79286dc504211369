"""Evaluate a causal language model on a text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers_cache import cache_given
from ..calibration.windows import Windows, cut_windows, scored_bytes, unit_count
from ..core.progress import current, shown
from ..errors import ABOVE_0, OptionError, StateError, expected, require_number
from ..quantization.observers.batches import device_of, require_tokens
from ..quantization.observers.computing import fast_dtype
from ..quantization.observers.kv_cache import cache_format_of, quantized_cache
from ..record.state import unwrap
from .intervals import SUMS, Bootstrap, intervals
from .metrics import MEASURED, quantile, score_tokens
from .results import Evaluation

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24

# Logits of one batch: 256 MB.
_LARGEST = 1 << 28


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
        top_p: mass of the reference's nucleus, in (0, 1].
        confidence: of the intervals, in (0, 1).
        resamples: of the bootstrap over documents, or over windows where they are not known.
        seed: of the bootstrap.

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
    for each in models:
        if unwrap(each, tokenizer, text).training:
            raise StateError(
                "Expected a model in evaluation mode, got one in training mode, in which dropout "
                "is on. Call model.eval() first."
            )
    require_number("batch_size", "at least 1", batch_size, least=1)
    require_number("top_p", "a number above 0 and at most 1", top_p, float, ABOVE_0, 1)
    options = Bootstrap(confidence, resamples, seed)
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
            require_tokens(each, part.ids[None], f"text: window {i}")
    with shown("evaluate", progress), fast_dtype(*models):
        totals, sums, kls = _sum_up(model, reference, cut, batch_size, top_p)
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
        kl_999=quantile(kls, 0.999) if compared else None,
        delta_p=totals["delta_p"] / tokens if compared else None,
        rms_delta_p=math.sqrt(totals["delta_p2"] / tokens) if compared else None,
        top_p=top_p,
        unit=cut.unit,
        units=len(sums),
        confidence=confidence,
        intervals=intervals(sums.numpy(), options),
        digest=cut.digest,
        sums=sums,
    )


def _sum_up(
    model: nn.Module,
    reference: nn.Module | None,
    cut: Windows,
    batch_size: int,
    top_p: float,
) -> tuple[dict[str, float], Tensor, Tensor]:
    """Run the models on all windows.

    Returns:
        The sums over all scored tokens; those over the tokens of each unit [units, SUMS]; and the
        KL of each token [tokens], of none without a reference.
    """
    models = [each for each in (model, reference) if each is not None]
    names = MEASURED[:1] if reference is None else MEASURED
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
            logits, *others = (each[rows[part].to(each.device)].to(device) for each in outputs)
            terms = score_tokens(logits, targets[part].to(device), *others, top_p=top_p)
            for name, term in zip(names, terms, strict=True):
                totals[name] += term.sum(dtype=torch.float64).item()
            terms = [torch.ones(len(part)), *(term.cpu() for term in terms)]
            kls += [] if reference is None else [terms[columns.index("kl")]]
            found.index_add_(0, units[part], torch.stack(terms, 1).double())
    # Columns that are not measured here, as the bytes, are nan.
    sums = torch.full((len(found), len(SUMS)), math.nan, dtype=torch.float64)
    sums[:, [SUMS.index(name) for name in columns]] = found
    return totals, sums, torch.cat(kls) if kls else torch.empty(0)


def fitting_batch_size(model: nn.Module, window: int, batch_size: int) -> int:
    """Return how many windows run at once so that their logits take at most 256 MB."""
    head = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    vocabulary = getattr(head, "out_features", None)
    if vocabulary is None:
        return batch_size
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return max(1, min(batch_size, _LARGEST // (window * vocabulary * size)))


def read_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [B * length, vocabulary] of windows [B, length]. Raises StateError."""
    # As `generate` would, for the cache is a part of what was converted.
    has_cache = cache_format_of(model) is not None
    cache = cache_given(unwrap(model), quantized_cache(model)) if has_cache else {}
    output = model(ids.to(device_of(model)), **cache)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise StateError(
            "The output of the model: expected logits [batch, tokens, vocabulary], got "
            f"{type(output).__name__} without them. Give a causal language model."
        )
    return logits.flatten(0, 1)
