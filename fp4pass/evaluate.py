"""How good a model is on a text, and how far a converted one is from its original."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .api import call_arguments
from .errors import OptionError, ShapeError, StateError
from .modules import QuantizedLinear
from .report import unwrap

# The line between two documents of a text; each document starts with the tokenizer's bos token.
_DOCUMENT_LINE = re.compile(r"\n?^<\|doc\|>$\n?", re.MULTILINE)

# Logits that are looked at together in float32: 64 MB.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Evaluation:
    """A model on a text.

    tokens: that were scored; perplexity: of them; bits_per_byte: over the bytes that they stand
    for, None without a tokenizer; kl: KL(reference || model) in nats per token, top1: the share of
    tokens whose likeliest successor is the reference's, both None without a reference.
    """

    windows: int
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None
    kl: float | None = None
    top1: float | None = None

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
) -> Evaluation:
    """Perplexity of `model` on `text`, and its distance from `reference`.

    model, reference: causal language models, called with ids [B, window]; their `.logits`
    [B, window, vocabulary] count. tokenizer: of transformers, None if `text` is token ids.
    text, window, windows: as for `token_windows`; each window is scored on all but its first token.
    Raises StateError for a model in training mode, ShapeError for a text shorter than one window
    or a reference with another vocabulary, OptionError for bad arguments.
    """
    for each in (model, reference):
        if each is not None and unwrap(each).training:
            raise StateError("The model is in training mode, so dropout is on. Call eval() first.")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; at least 1 is wanted.")
    ids = token_windows(tokenizer, text, window=window, windows=windows)
    _require_context(model, ids.shape[1])
    # nll, then KL and agreement with the reference.
    sums = [0.0, 0.0, 0.0]
    for batch in tqdm(ids.split(batch_size), desc="evaluate", unit="batch", disable=not progress):
        logits = _logits(model, batch)
        others = None if reference is None else _logits(reference, batch).to(logits.device)
        for i, term in enumerate(_score(logits, batch[:, 1:].to(logits.device), others)):
            sums[i] += term
    tokens = ids[:, 1:].numel()
    length = _scored_bytes(tokenizer, ids)
    return Evaluation(
        windows=len(ids),
        tokens=tokens,
        perplexity=math.exp(sums[0] / tokens),
        bits_per_byte=sums[0] / math.log(2) / length if length else None,
        kl=None if reference is None else sums[1] / tokens,
        top1=None if reference is None else sums[2] / tokens,
    )


def token_windows(
    tokenizer: Any, text: str | Tensor, *, window: int = 512, windows: int | None = None
) -> Tensor:
    """Cut a text into windows of tokens that do not overlap; what is left at the end is dropped.

    text: a string, whose documents are separated by a line `<|doc|>` and packed into one stream,
    each behind the tokenizer's bos token if it has one; or token ids [tokens]; or the windows
    themselves [n, window]. windows: how many to keep, spread evenly over the text; None for all.
    Returns int64 [n, window]. Raises ShapeError if there is not one window, OptionError.
    """
    if windows is not None and windows < 1:
        raise OptionError(f"windows is {windows}; at least 1 is wanted, or None for all.")
    if window < 2:
        raise OptionError(f"window is {window}; a window has at least 2 tokens.")
    stream = _tokenize(tokenizer, text) if isinstance(text, str) else text
    if not isinstance(stream, Tensor) or stream.is_floating_point() or stream.ndim not in (1, 2):
        raise OptionError(
            f"The text is a {type(text).__name__}; a string, or a tensor of token ids [tokens] or "
            "[n, window] is wanted."
        )
    tokens = stream.numel()
    if stream.ndim == 1:
        stream = stream[: len(stream) // window * window].view(-1, window)
    if not stream.numel() or stream.shape[1] < 2:
        raise ShapeError(
            f"The text has {tokens} tokens, and a window of {window} does not fit in it. Give a "
            "longer text or a smaller window."
        )
    if windows is not None and windows < len(stream):
        stream = stream[torch.arange(windows) * len(stream) // windows]
    return stream.long()


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
        difference = y - (module(x.to(device)).float() - bias).to(y.device)
    else:
        dense = module.weight.to(weight.device)
        quantized = (dense.t() if module.transposed else dense).float()
        difference = x.float() @ (matrix - quantized).t()
    sums[0] += difference.square().sum(dtype=torch.float64).item()
    sums[1] += y.square().sum(dtype=torch.float64).item()


def _tokenize(tokenizer: Any, text: str) -> Tensor:
    """The documents of a text as one stream of token ids [tokens]."""
    if tokenizer is None:
        raise OptionError("The text is a string, so a tokenizer is needed. Or give token ids.")
    documents = _DOCUMENT_LINE.split(text.removesuffix("\n"))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ShapeError("The text is empty. Give some documents.")
    # A long document is no mistake here: it is cut into windows.
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    start = () if bos is None else (bos,)
    return torch.tensor([i for ids in encoded for i in (*start, *ids)])


def _scored_bytes(tokenizer: Any, ids: Tensor) -> int:
    """Bytes of text that all but the first tokens of the windows stand for; 0 if not known."""
    if tokenizer is None:
        return 0
    return sum(
        len(text.encode()) * sign
        for part, sign in ((ids, 1), (ids[:, :1], -1))
        for text in tokenizer.batch_decode(
            part.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


def _require_context(model: nn.Module, window: int) -> None:
    config = getattr(unwrap(model), "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and window > limit:
        raise OptionError(
            f"A window has {window} tokens, but the context of the model is {limit}. Choose a "
            f"window of at most {limit}."
        )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """[B, window] ids to [B, window - 1, vocabulary] logits: those that predict a token of it."""
    tensors = (*model.parameters(), *model.buffers())
    output = model(ids.to(tensors[0].device) if tensors else ids)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise StateError(
            f"The model returned a {type(output).__name__} without logits [batch, tokens, "
            "vocabulary]. A causal language model is wanted."
        )
    return logits[:, :-1]


def _score(
    logits: Tensor, targets: Tensor, others: Tensor | None
) -> tuple[float, float, float] | tuple[float]:
    """Sums over the tokens: nll and, given the reference's logits, KL and agreement.

    logits, others: [B, T, vocabulary]. targets: [B, T].
    """
    if others is not None and others.shape != logits.shape:
        raise ShapeError(
            f"The reference has logits {tuple(others.shape)} and the model {tuple(logits.shape)}. "
            "Give the model that was converted."
        )
    flat, wanted = logits.flatten(0, 1), targets.flatten()
    rows = max(1, _CHUNK // flat.shape[1])
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        log_q = flat[part].float().log_softmax(-1)  # [rows, vocabulary]
        sums[0] -= log_q.gather(1, wanted[part, None]).sum(dtype=torch.float64)
        if others is not None:
            other = others.flatten(0, 1)[part]
            log_p = other.float().log_softmax(-1)
            p = log_p.exp()
            # A token that the reference rules out (logit -inf) adds nothing.
            terms = torch.where(p == 0, 0.0, p * (log_p - log_q))
            sums[1] += terms.sum(dtype=torch.float64)
            sums[2] += (other.argmax(-1) == flat[part].argmax(-1)).sum()
    nll, kl, agree = sums.tolist()
    return (nll,) if others is None else (nll, kl, agree)
