"""KL of one model's next tokens from another's, on batches of any kind."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import calibration
from ..errors import NonFiniteError, ShapeError
from ..evaluation import fitting_batch_size, logits_in, token_kl
from ..quantization import call_arguments, device_of
from ..record import unwrap

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24

# Windows that run at once, if their logits fit.
TOGETHER = 8

# Why a KL is NaN, and what to do.
NAN = (
    "A model returns NaN, or no token is visible. Look for NaN in the weights of both, try both in "
    "float32, and look at attention_mask."
)


def kl_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student), the mean over tokens: a float32 scalar with a gradient.

    Args:
        student: logits [..., vocabulary].
        teacher: logits of the same shape, on any device; no gradient flows to them.

    Raises:
        ShapeError: the shapes differ, as those of two vocabularies do.

    Example:
        >>> logits = torch.randn(2, 5, 40)
        >>> fp4pass.lab.kl_loss(logits, logits)
        tensor(0.)
    """
    require_equal(student, teacher)
    return _Kl.apply(student, teacher.detach().to(student.device))


class _Kl(torch.autograd.Function):
    """The mean KL of tokens, whose gradient is computed with it: the difference of probabilities.

    In chunks of tokens, for float32 takes memory.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        rows, others = student.flatten(0, -2), teacher.flatten(0, -2)
        size = max(1, _CHUNK // rows.shape[1])
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        grad = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            log_q, log_p = (each[part].float().log_softmax(-1) for each in (rows, others))
            p = log_p.exp()
            # A token that the reference rules out (logit -inf) adds nothing.
            each = torch.where(p == 0, 0.0, p * (log_p - log_q))
            total += each.sum(dtype=torch.float64)
            if grad is not None:
                grad[part] = log_q.exp_().sub_(p).div_(len(rows))
        ctx.save_for_backward(None if grad is None else grad.view_as(student))
        return (total / len(rows)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0], None


def require_equal(logits: Tensor, others: Tensor) -> None:
    """Raise ShapeError for logits of another vocabulary."""
    if logits.shape != others.shape:
        raise ShapeError(
            f"The original has logits {tuple(others.shape)}: expected {tuple(logits.shape)}, those "
            "of the converted model. Give the model that was converted."
        )


def logits_of(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the logits [B, T, vocabulary] of a batch, and which tokens are visible [B, T].

    None for all; padding, where a 2-d attention_mask is zero, is not. Raises StateError for other
    outputs.
    """
    args, kwargs = call_arguments(batch, device_of(model))
    mask = kwargs.get("attention_mask")
    if "use_cache" in inspect.signature(unwrap(model).forward).parameters:
        kwargs = {"use_cache": False, **kwargs}
    logits = logits_in(model(*args, **kwargs))
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
        return logits, mask.bool().to(logits.device)
    return logits, None


# Batches, the logits of a model on the CPU or its device, and which tokens are visible.
Predictions = Iterable[tuple[Any, Tensor, Tensor | None]]


@torch.no_grad()
def predicted(model: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor, Any]]:
    """Yield batches and the predictions of a model, one at a time."""
    for batch in batches:
        yield batch, *logits_of(model, batch)


def predictions(model: nn.Module, batches: Iterable[Any]) -> Predictions:
    """Return the predictions of a model, to which others are compared later."""
    return [(batch, logits.cpu(), seen) for batch, logits, seen in predicted(model, batches)]


@torch.no_grad()
def compare(model: nn.Module, others: Predictions) -> Tensor:
    """Return KL(others || model) and tokens of each sequence: [S, 2] float64."""
    found = []
    for batch, wanted, visible in others:
        logits = logits_of(model, batch)[0]
        require_equal(logits, wanted)
        size = max(1, _CHUNK // logits.shape[-1])
        parts = (each.flatten(0, -2).split(size) for each in (logits, wanted))
        kl = torch.cat([token_kl(a, b.to(a.device)) for a, b in zip(*parts, strict=True)])
        kl = kl.view(logits.shape[:-1])
        seen = torch.ones_like(kl) if visible is None else visible.to(kl)
        found.append(torch.stack([torch.where(seen > 0, kl, 0.0), seen], -1).sum(1).cpu())
    return torch.cat(found)


def mean_kl(sums: Tensor) -> float:
    """Return nats per token of KL and tokens [S, 2]. Raises NonFiniteError for NaN."""
    found = float(sums[:, 0].sum() / sums[:, 1].sum())
    if found != found:
        raise NonFiniteError(f"The KL is NaN. {NAN}")
    return max(found, 0.0)


def read_windows(
    model: nn.Module, data: Any, tokenizer: Any, samples: int, **options: Any
) -> list[Any]:
    """Return data as `calibration.batches` takes it: windows [1, length], or batches as they are.

    options: seq_len and seed.
    """
    found = calibration.batches(
        data, tokenizer, model=model, samples=samples, batch_size=1, **options
    )
    return [row for batch in found for row in (batch.split(1) if _is_window(batch) else [batch])]


def together(
    model: nn.Module, windows: Sequence[Any], most: int = TOGETHER, **room: int
) -> list[Any]:
    """Return windows of one length as batches whose logits fit, and others as they are."""
    alike: dict[int, list[Tensor]] = {}
    for each in windows:
        if _is_window(each):
            alike.setdefault(each.shape[1], []).append(each)
    found = [each for each in windows if not _is_window(each)]
    for length, same in alike.items():
        found += torch.cat(same).split(fitting_batch_size(model, length, most, **room))
    return found


def divided(things: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Return `count` of some things, spread evenly, and the others."""
    places = {(2 * i + 1) * len(things) // (2 * count) for i in range(count)}
    chosen = [each for i, each in enumerate(things) if i in places]
    return chosen, [each for i, each in enumerate(things) if i not in places]


def token_count(batches: Sequence[Any]) -> int:
    """Return the tokens of batches: the elements of their token ids, or of their first tensors."""
    found = 0
    for batch in batches:
        args, kwargs = call_arguments(batch, None)
        first = kwargs.get("input_ids", next(iter((*args, *kwargs.values())), None))
        found += first.numel() if isinstance(first, Tensor) else 0
    return found


def _is_window(batch: Any) -> bool:
    return isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point()
