"""The batches of a distillation, and the divergence of the models on them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import reshard
from ...errors import CalibrationError, OptionError, StateError, expected, require_number
from ...quantization.observers.batches import call_arguments, device_of, require_tokens
from ...record.state import unwrap
from .loss import kl_loss

# One window or batch in this many is held out.
_HELD_OUT = 12


@dataclass(frozen=True)
class Batches:
    """The inputs of a model: windows of token ids that steps draw, or batches as they are.

    Attributes:
        items: token ids [n, window], or a sequence of what `calibrate` takes.
        size: windows of a batch.
        ranks: the processes that share each step, and the number of this one.
    """

    items: Tensor | Sequence[Any]
    size: int
    ranks: tuple[int, int] = (1, 0)

    def __len__(self) -> int:
        """Return how many windows or batches there are."""
        return len(self.items)

    @property
    def together(self) -> int:
        """The number of them that a step reads."""
        size = self.size if isinstance(self.items, Tensor) else 1
        return max(min(size, len(self)) // self.ranks[0], 1) * self.ranks[0]

    @property
    def steps(self) -> int:
        """Steps in which all are read once; a rest that is too small for a step is not."""
        return len(self) // self.together

    @property
    def tokens(self) -> int:
        """The tokens in all of them."""
        if isinstance(self.items, Tensor):
            return self.items.numel()
        return sum(_token_count(each) for each in self.items)

    @property
    def tokens_of_a_step(self) -> int:
        """The tokens that all processes read in a step, the mean if batches differ."""
        return self.tokens * self.together // len(self)

    def select(self, chosen: Sequence[int]) -> Batches:
        """Return some of them."""
        if isinstance(self.items, Tensor):
            return dataclasses.replace(self, items=self.items[list(chosen)])
        return dataclasses.replace(self, items=[self.items[i] for i in chosen])

    def to(self, device: torch.device | None) -> Batches:
        """Return them with windows on a device, so that no step waits for them."""
        if device is None or not isinstance(self.items, Tensor):
            return self
        return dataclasses.replace(self, items=self.items.to(device))

    def at(self, step: int, seed: int) -> Any:
        """Return the batch of this process in a step; each epoch has its own order."""
        epoch, place = divmod(step, self.steps)
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(self), generator=generator)
        size, rank = self.ranks
        chosen = order[place * self.together : (place + 1) * self.together][rank::size]
        return self.items[chosen] if isinstance(self.items, Tensor) else self.items[int(chosen)]

    def in_order(self) -> Sequence[Any]:
        """Return all as batches."""
        return self.items.split(self.size) if isinstance(self.items, Tensor) else self.items


def batches_of(
    model: nn.Module, given: Any, size: int, ranks: tuple[int, int], name: str
) -> Batches:
    """Return the batches of a model that a user gave.

    Raises CalibrationError or OptionError for others.
    """
    share = f", a multiple of the {ranks[0]} processes" if ranks[0] > 1 else ""
    require_number("batch_size", f"1, 2, ...{share}", size, least=1)
    if size % ranks[0]:
        raise OptionError(expected("batch_size", f"1, 2, ...{share}", size))
    wanted = "windows of token ids [n, window], or a list of batches"
    if isinstance(given, Tensor):
        if given.ndim != 2 or given.is_floating_point() or not given.numel():
            got = f"a tensor of {given.dtype} {list(given.shape)}"
            raise CalibrationError(expected(name, wanted, got))
    elif isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise CalibrationError(expected(name, wanted, type(given).__name__))
    elif not given:
        raise CalibrationError(expected(name, wanted, "an empty list"))
    found = Batches(given, size, ranks)
    for i, batch in enumerate(found.in_order()):
        require_tokens(model, batch, f"{name}: batch {i}")
    return found


def hold_out(batches: Batches) -> tuple[Batches, Batches]:
    """Return the training and the held-out batches, spread evenly."""
    if len(batches) < 2:
        raise CalibrationError(
            "batches: expected at least 2 windows or batches, one of them to hold out, got 1. "
            "Give more, or held_out=."
        )
    own = {i for i in range(len(batches)) if i % _HELD_OUT == _HELD_OUT // 2} or {1}
    rest = [i for i in range(len(batches)) if i not in own]
    return batches.select(rest), batches.select(sorted(own))


def divergence(student: nn.Module, teacher: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return KL(teacher || student) as the mean over the tokens of a batch, and how many these are.

    Padding, where a 2-d attention_mask is zero, is left out.
    """
    with torch.no_grad():
        other = visible_logits(teacher, batch)
    own = visible_logits(student, batch)
    return logits_divergence(own, other), own.shape[:-1].numel()


def visible_logits(model: nn.Module, batch: Any) -> Tensor:
    """Return the logits [n, vocabulary] of the tokens that an attention_mask shows, or of all."""
    args, kwargs = call_arguments(batch, device_of(model))
    mask = kwargs.get("attention_mask")
    found = _logits(model, args, kwargs)
    is_of_tokens = isinstance(mask, Tensor) and mask.shape == found.shape[:-1]
    return found[mask != 0] if is_of_tokens else found


def logits_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of logits, wherever they are, as the mean over tokens."""
    return kl_loss(student, teacher.to(student.device))


@torch.no_grad()
def mean_divergence(student: nn.Module, teacher: nn.Module, batches: Batches) -> float:
    """Return the mean of `divergence` over all tokens."""
    found = [divergence(student, teacher, batch) for batch in batches.in_order()]
    # No backward has done so.
    reshard(student)
    count = sum(tokens for _, tokens in found)
    # One wait for a GPU.
    means = torch.stack([each for each, _ in found]).double().tolist()
    total = sum(mean * n for mean, (_, n) in zip(means, found, strict=True) if n)
    return total / count if count else math.nan


@torch.no_grad()
def logits_kl(model: nn.Module, original: nn.Module, batches: Sequence[Any]) -> float | None:
    """Return the mean KL of a model's tokens from the original's, in nats.

    None without a visible token, or for a model whose output has no `logits`.
    """
    args, kwargs = call_arguments(batches[0], device_of(original))
    if not hasattr(original(*args, **kwargs), "logits"):
        return None
    found = mean_divergence(model, original, Batches(batches, 1))
    return None if math.isnan(found) else found


def _logits(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return the logits [..., vocabulary] of a model. Raises StateError without them."""
    if "use_cache" in inspect.signature(unwrap(model).forward).parameters:
        kwargs = {"use_cache": False, **kwargs}
    output = model(*args, **kwargs)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 2:
        raise StateError(
            "The output of the model: expected logits [..., vocabulary], got "
            f"{type(output).__name__} without them. Give a model that predicts tokens."
        )
    return logits


def _token_count(batch: Any) -> int:
    """Return the tokens of a batch: the elements of its token ids, or of its first tensor."""
    if isinstance(batch, Mapping):
        first = batch.get("input_ids", next(iter(batch.values()), None))
    else:
        first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return first.numel() if isinstance(first, Tensor) else 0
