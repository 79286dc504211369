"""Which kind of calibration data an argument is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import CalibrationError, expected
from .columns import require_columns
from .documents import holds_tensor, is_chat
from .rows import Rows, Text, is_document
from .sources import dataset_rows, is_source, open_source

_KINDS = "batches, texts, chats, rows, token windows [n, length], a path, or the name of a data set"


@dataclass(frozen=True)
class Batches:
    """Batches that a model takes as they are."""

    items: Iterable[Any]


# What batches are made of: a text, rows, token windows [n, length] or token ids [tokens].
Source = Text | Rows | Tensor


def source_of(data: Any) -> Source | Batches:
    """Return what an argument holds.

    Of an iterator the first item is read, which tells its kind; of a DataLoader none.

    Raises CalibrationError for what is no calibration data.
    """
    if isinstance(data, str) and not is_source(data):
        return Text("data", data)
    if isinstance(data, str | os.PathLike):
        return open_source(os.fspath(data))
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.ndim not in (1, 2):
            raise _unknown(f"a tensor of {data.dtype} {list(data.shape)}")
        return data
    if isinstance(data, DataLoader):
        return Batches(data)
    rows = dataset_rows(data)
    if rows is not None:
        return _told_by_first(rows.items, rows.name)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise _unknown(type(data).__name__)
    return Rows("data", [data]) if is_chat(data) else _told_by_first(data, "data")


def _told_by_first(items: Any, name: str) -> Rows | Batches:
    """Rows or batches, by the first of them."""
    if hasattr(items, "__getitem__") and hasattr(items, "__len__"):
        first = items[0] if len(items) else None
    else:
        rest = iter(items)
        first = next(rest, None)
        if first is None:
            return Batches(())
        # Read on from here: what is read once cannot begin again.
        items = itertools.chain([first], rest)
    if is_document(first):
        return Rows(name, items)
    if (
        isinstance(first, Mapping)
        and not holds_tensor(first)
        and any(map(_is_plain, first.values()))
    ):
        require_columns(first, f"{name}, row 0")
    return Batches(items)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | list | dict)


def _unknown(got: str) -> CalibrationError:
    return CalibrationError(
        f"{expected('data', _KINDS, got)} Put a single batch, or a single row, into a list: "
        "calibrate(model, [batch])."
    )
