"""Pack tokens of documents into windows, and windows into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Item = TypeVar("Item")

# A window [tokens], or the arguments that a processor makes of a row.
Example = Tensor | Mapping[str, Tensor]

# Windows with room that a next piece is tried in, so that many pieces take no longer each.
_OPEN = 32


def stream_windows(documents: Iterable[Sequence[int]], length: int) -> list[Tensor]:
    """Cut documents, one behind the other, into windows [length], and drop the rest at the end.

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


def collate(
    examples: Sequence[Example], batch_size: int, *, config: Any = None, first_alone: bool = False
) -> list[Any]:
    """Return examples as batches of at most `batch_size`, in their order.

    Args:
        examples: windows of one length become a tensor [batch, tokens]; of several lengths, a
            mapping with an attention_mask. Outputs of a processor stay together where all of their
            tensors have the same shapes.
        batch_size: how many run at once.
        config: of a model of transformers, which says whether it reads labels.
        first_alone: whether the first batch has one example: it runs through the whole model where
            the others run to its first layer.
    """
    alone = 1 if first_alone else 0
    groups = [*(examples[i : i + 1] for i in range(alone)), *_groups(examples[alone:], batch_size)]
    return [_batch(group, config) for group in groups if group]


def _groups(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    for _, same in itertools.groupby(examples, key=_shapes):
        while group := list(itertools.islice(same, size)):
            yield group


def _shapes(example: Example) -> Any:
    """Return the shapes that the examples of a batch share; None for windows, which are padded."""
    if isinstance(example, Tensor):
        return None
    return sorted((name, tuple(tensor.shape)) for name, tensor in example.items())


def _batch(group: Sequence[Example], config: Any) -> Any:
    first = group[0]
    if isinstance(first, Mapping):
        return {name: torch.cat([each[name] for each in group]) for name in first}  # type: ignore[index]
    windows: list[Tensor] = list(group)  # type: ignore[arg-type]
    lengths = torch.tensor([len(window) for window in windows])
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if int(lengths.min()) == int(lengths.max()):
        ids = torch.stack(windows)
        # Its decoder reads the labels, each a place later.
        return {"input_ids": ids, "labels": ids} if is_pair else ids
    pad = getattr(config, "pad_token_id", None)
    ids = pad_sequence(windows, batch_first=True, padding_value=pad if isinstance(pad, int) else 0)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | ({"labels": ids, "decoder_attention_mask": mask} if is_pair else {})
