"""Read rows, texts and chats one after the other, each as a document."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CalibrationError, expected
from .documents import Document, as_ids, document_of, is_chat, messages_of, require_columns
from .images import with_own_images
from .windows import split_documents

_log = logging.getLogger(__name__)

# Rows are read until they have this many characters for each token that is wanted: four or five
# are usual, and windows are spread over what is left.
CHARACTERS = 16

# About the golden ratio: steps of it spread over a range however many they are.
_STEP = 0.618


@dataclass(frozen=True)
class Rows:
    """Items of calibration data, by the name of their source.

    Attributes:
        name: for errors and news.
        items: texts, chats, rows or lists of tokens; an iterable without a length is read once.
        numbers: the line of each item in a file, if it has lines.
        folder: where images lie that an item names by a relative path.
        is_text: whether the items are the documents of one text, all of which are read.
        news: the columns that were read, to be told once the data are known to be good.
    """

    name: str
    items: Iterable[Any]
    numbers: Sequence[int] | None = None
    folder: Path | None = None
    is_text: bool = False
    news: list[str] = field(default_factory=list)

    @staticmethod
    def of_text(name: str, text: str) -> Rows:
        """Return the documents of a text, which lines `<|doc|>` separate."""
        return Rows(name, split_documents(text), is_text=True)

    def documents(
        self, tokens: int | None, examples: int = 0, seed: int | None = None
    ) -> list[Document]:
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
        columns: dict[tuple[str, ...], tuple[str, ...]] = {}
        found: dict[int, Document] = {}
        characters = seen = images = 0
        for i, item in self._visited(tokens, seed):
            seen += 1
            document = self._document(item, self._where(i), columns)
            if not document:
                continue
            found[i] = document
            images += bool(document.images)
            characters += 0 if document.images else document.characters
            enough = tokens is not None and characters >= CHARACTERS * tokens
            if not self.is_text and (enough or (examples and images >= examples)):
                break
        if not found:
            what = f"{seen} rows without text" if seen else "no rows"
            what = "an empty text" if self.is_text else what
            raise CalibrationError(f"{self.name}: expected text to learn from, got {what}.")
        for names, read in itertools.islice(columns.items(), 1):
            others = f", of {', '.join(names)}" if len(names) > len(read) else ""
            self.news.append(f"{self.name}: reads {' + '.join(read)}{others}.")
        return [found[i] for i in sorted(found)]

    def tell(self) -> None:
        """Log the news."""
        for each in self.news:
            _log.info("%s", each)

    def _where(self, i: int) -> str:
        if self.is_text:
            return self.name
        line = f"row {i}" if self.numbers is None else f"line {self.numbers[i]}"
        return f"{self.name}, {line}"

    def _visited(self, tokens: int | None, seed: int | None) -> Iterator[tuple[int, Any]]:
        """Yield items with their indices, so that the first of them are spread over all."""
        items: Any = self.items
        # Rows of `datasets` have an order and a length, and are no sequences by their class.
        has_order = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        if self.is_text or not has_order or tokens is None:
            yield from enumerate(items)
            return
        for i in _order(len(items), seed):
            yield i, items[i]

    def _document(
        self, item: Any, where: str, known: dict[tuple[str, ...], tuple[str, ...]]
    ) -> Document:
        """Return the document of an item; known: the columns that are read, by those of a row."""
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
        if names not in known:
            known[names] = require_columns(item, where)
        document = with_own_images(document_of(item, known[names], where))
        return dataclasses.replace(document, images=tuple(map(self._beside, document.images)))

    def _beside(self, image: Any) -> Any:
        """Return the path of an image that lies in the folder, others as they are."""
        if self.folder is None or not isinstance(image, str) or os.path.exists(image):
            return image
        path = self.folder / image
        return str(path) if path.is_file() else image


def _order(count: int, seed: int | None) -> Iterator[int]:
    """Yield every index once, so that the first ones are spread evenly, or at random."""
    if seed is not None:
        yield from torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        return
    step = max(1, round(_STEP * count))
    while math.gcd(step, count) > 1:
        step += 1
    for i in range(count):
        yield i * step % count
