"""Rows, texts and chats one after the other, each as a document."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CalibrationError, expected
from .columns import columns_of, document_of, require_columns
from .documents import Document, as_ids, is_chat, messages_of
from .images import with_own_images

# Rows are read until they have this many characters for each token that is wanted: four or five
# are usual, and windows are spread over what is left.
CHARACTERS = 16

# About the golden ratio: steps of it spread over a range however many they are.
_STEP = 0.618


@dataclass(frozen=True)
class Text:
    """A text, in which a line `<|doc|>` separates documents, by the name of its source."""

    name: str
    text: str


class Documents(NamedTuple):
    """Documents of rows, and the sentence that says which columns were read, empty without any."""

    items: list[Document]
    columns: str = ""


@dataclass(frozen=True)
class Rows:
    """What calibration data holds, by the name of its source.

    Attributes:
        name: for errors and news.
        items: texts, chats, rows or lists of tokens; what is no sequence is read once.
        numbers: the line of each item in a file, if it has lines.
        folder: where images lie that an item names by a relative path.
    """

    name: str
    items: Iterable[Any]
    numbers: Sequence[int] | None = None
    folder: Path | None = None

    def where(self, i: int) -> str:
        """Return where an item stands."""
        return (
            f"{self.name}, row {i}"
            if self.numbers is None
            else f"{self.name}, line {self.numbers[i]}"
        )

    def documents(
        self, tokens: int | None, examples: int = 0, seed: int | None = None
    ) -> Documents:
        """Return documents of the items in their order.

        Args:
            tokens: how many are wanted, None for all that there are. Of a sequence of items that
                has more, so many are taken as are enough, spread evenly or, with a seed, at random;
                of others the first.
            examples: how many documents with images are enough.
            seed: of the order in which items are read.

        Raises:
            CalibrationError: an item is none that is known, or there are none.
        """
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        found: dict[int, Document] = {}
        characters = seen = images = 0
        for i, item in self._visited(tokens, seed):
            seen += 1
            document = self._document(item, self.where(i), known)
            if not document:
                continue
            found[i] = document
            images += bool(document.images)
            characters += 0 if document.images else document.characters
            enough = tokens is not None and characters >= CHARACTERS * tokens
            if enough or (examples and images >= examples):
                break
        if not found:
            what = "no rows" if not seen else f"{seen} rows without text"
            raise CalibrationError(f"{self.name}: expected text to learn from, got {what}.")
        return Documents([found[i] for i in sorted(found)], _sentence(self.name, known))

    def _visited(self, tokens: int | None, seed: int | None) -> Iterator[tuple[int, Any]]:
        items: Any = self.items
        # Rows of `datasets` have an order and a length, and are no sequences by their class.
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__") or tokens is None:
            yield from enumerate(items)
            return
        for i in _order(len(items), seed):
            yield i, items[i]

    def _document(
        self, item: Any, where: str, known: dict[tuple[str, ...], tuple[str, ...]]
    ) -> Document:
        if isinstance(item, str):
            return Document(item, where=where)
        if is_chat(item):
            return with_own_images(Document(messages=messages_of(item), where=where))
        if not isinstance(item, Mapping):
            ids = as_ids(item)
            if ids is None:
                kinds = "a text, a chat, a row or a list of token ids"
                raise CalibrationError(expected(where, kinds, type(item).__name__))
            return Document(ids=ids, where=where)
        # By its names alone: what one row holds, the next one may lack.
        names = tuple(item)
        columns = known.get(names)
        if columns is None:
            columns = known[names] = require_columns(item, where)
        document = with_own_images(document_of(item, columns, where))
        if self.folder is None or not document.images:
            return document
        beside = tuple(_beside(image, self.folder) for image in document.images)
        return dataclasses.replace(document, images=beside)


def _beside(image: Any, folder: Path) -> Any:
    """An image that lies in a folder by its path there, others as they are."""
    is_there = isinstance(image, str) and not os.path.exists(image) and (folder / image).is_file()
    return str(folder / image) if is_there else image


def _sentence(name: str, known: Mapping[tuple[str, ...], tuple[str, ...]]) -> str:
    """What was read of the rows, by the first of them."""
    for names, columns in known.items():
        others = f", of {', '.join(names)}" if len(names) > len(columns) else ""
        return f"{name}: reads {' + '.join(columns)}{others}."
    return ""


def is_document(item: object) -> bool:
    """Return whether an item is a text, a chat, a row with text, or token ids; not a batch."""
    if isinstance(item, Mapping):
        return bool(columns_of(item))
    return (
        isinstance(item, str)
        or is_chat(item)
        or (isinstance(item, list) and as_ids(item) is not None)
    )


def _order(count: int, seed: int | None) -> Iterator[int]:
    """Every index once, so that any number of the first ones are spread evenly, or at random."""
    if seed is not None:
        yield from torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        return
    step = max(1, round(_STEP * count))
    while math.gcd(step, count) > 1:
        step += 1
    for i in range(count):
        yield i * step % count
