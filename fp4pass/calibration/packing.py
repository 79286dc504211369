"""Windows of the tokens of documents: texts as one stream, chats whole where they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

# Windows with room that a next piece is tried in, so that many pieces take no longer each.
_OPEN = 32


def stream_windows(documents: Iterable[Sequence[int]], length: int) -> list[Tensor]:
    """Cut documents, one behind the other, into windows [length]; what is left at the end is not.

    Fewer tokens than a window are one shorter window.
    """
    ids = torch.tensor(list(itertools.chain.from_iterable(documents)), dtype=torch.long)
    if 0 < len(ids) < length:
        return [ids]
    return [*ids[: len(ids) // length * length].view(-1, length)]


def whole_windows(documents: Iterable[Sequence[int]], length: int) -> list[Tensor]:
    """Put documents into windows of at most `length` tokens, each whole in the first with room.

    Longer ones are cut.
    """
    windows: list[list[int]] = []
    room: list[int] = []
    for ids in documents:
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            place = next((i for i in room if len(windows[i]) + len(piece) <= length), None)
            if place is None:
                windows.append([])
                place = len(windows) - 1
                room = [*room, place][-_OPEN:]
            windows[place].extend(piece)
    return [torch.tensor(ids, dtype=torch.long) for ids in windows]


def choose(items: Sequence[Item], count: int, seed: int | None = None) -> list[Item]:
    """Return `count` items, or all if they are fewer: spread evenly or, with a seed, drawn."""
    if seed is not None:
        drawn = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
        return [items[i] for i in drawn[:count].tolist()]
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
