"""Divide text into windows to measure groups on, windows that are held out, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import calibration
from ...errors import CalibrationError, require_number
from ...evaluation.measure import fitting_batch_size
from ...quantization.observers.batches import size_of

# Windows of a batch, and windows beside those that are measured, for methods that need text.
_BATCH, _MORE = 8, 128


@dataclass(frozen=True)
class Texts:
    """Batches of three parts of a text.

    Attributes:
        measured: on which each group is measured.
        held_out: on which whole models are measured; in no other part.
        calibration: for methods that need text: all but what is held out.
    """

    measured: list[Any]
    held_out: list[Any]
    calibration: list[Any]

    def to_dict(self) -> dict[str, int]:
        """Return the tokens of each part."""
        return {name: sum(map(size_of, part)) for name, part in vars(self).items()}


def read_texts(
    root: nn.Module,
    data: Any,
    tokenizer: Any,
    *,
    windows: int,
    held_out: int,
    seq_len: int,
    calibrates: bool,
) -> Texts:
    """Return the parts of some data, as `allocate` takes it.

    Raises:
        OptionError: a number is out of range.
        CalibrationError: there is too little text for two parts.
    """
    for name, value in (("windows", windows), ("held_out", held_out)):
        require_number(name, "at least 1", value, least=1)
    samples = windows + held_out + (_MORE if calibrates else 0)
    options: dict[str, Any] = {"samples": samples, "seq_len": seq_len, "batch_size": 1}
    found = list(calibration.batches(data, tokenizer, model=root, **options))
    found = [row for batch in found for row in _rows(batch)]
    if len(found) < 2:
        raise CalibrationError(
            "data: expected two windows or more, one to measure on and one to hold out, got "
            f"{len(found)} of up to {seq_len} tokens. Give more text, or a smaller seq_len."
        )
    apart = set(_spread(len(found), min(held_out, len(found) // 2)))
    rest = [batch for i, batch in enumerate(found) if i not in apart]
    chosen = [rest[i] for i in _spread(len(rest), min(windows, len(rest)))]
    parts = (chosen, [found[i] for i in sorted(apart)], rest)
    return Texts(*(_together(root, part) for part in parts))


def _rows(batch: Any) -> Sequence[Any]:
    """Return the windows of a batch of token ids; other contents of a batch stay together."""
    return batch.split(1) if isinstance(batch, Tensor) and batch.ndim > 1 else [batch]


def _spread(count: int, chosen: int) -> list[int]:
    """Return the places of some of `count` things, spread evenly."""
    return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]


def _together(root: nn.Module, batches: Sequence[Any]) -> list[Any]:
    """Return windows of one length in batches whose logits fit."""
    found: list[Any] = []
    groups: dict[object, list[Tensor]] = {}
    for batch in batches:
        if isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point():
            groups.setdefault(batch.shape[1], []).append(batch)
        else:
            found.append(batch)
    for same in groups.values():
        size = fitting_batch_size(root, same[0].shape[1], _BATCH)
        found += torch.cat(same).split(size)
    return found
