"""Make batches of any calibration data."""

from __future__ import annotations

import itertools
import json
import logging
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..errors import CalibrationError, OptionError, ShapeError, require_number
from ..quantization.observers.batches import require_tokens
from .processor import SEQ_LEN, Document, Processor, Target
from .rows import Rows, source_of
from .sample import in_turn, sample

Item = TypeVar("Item")

# A window [tokens], or the arguments that a processor makes of a row.
Example = Tensor | Mapping[str, Tensor]

_log = logging.getLogger(__name__)

# Windows with room that a next piece is tried in, so that many pieces take no longer each.
_OPEN = 32


def batches(
    data: Any,
    tokenizer: Any = None,
    *,
    model: nn.Module | None = None,
    samples: int = 128,
    seq_len: int = SEQ_LEN,
    batch_size: int = 8,
    seed: int | None = None,
) -> Any:
    """Return data as a list of batches that a model takes.

    Texts are concatenated and cut into windows of tokens; each starts with BOS. Chats go through
    the chat template, and stay whole where they fit into a window; batches of windows of several
    lengths have an attention_mask. Rows with images go through the processor.

    Args:
        data: one of

            - batches: an iterable of mappings of tensors, tuples or tensors, which is returned as
              it is;
            - a text, in which a line `<|doc|>` separates documents, or a list of texts;
            - token windows, an integer tensor [n, length], all of which are taken;
            - chats, lists of messages {"role", "content"};
            - rows, mappings or a data set of `datasets`, with one of these columns: input_ids;
              messages or conversations, and tools; text; prompt, question or instruction (and
              input or context) with response, completion, answer or output; images or image,
              alone or beside these;
            - a path: .txt, or what `datasets.load_dataset` opens: .jsonl, .csv, .json, .parquet;
            - `name[:config][:split]` of `datasets`;
            - None: `mixture`.
        tokenizer: of transformers, or the processor of a model that reads images; by default that
            of the folder that `model` came from.
        model: what the batches are for; None for any model that reads tokens.
        samples: how many windows, or rows with images, to take at most.
        seq_len: tokens of a window, at most the context of the model. Less text than a window is
            one shorter window.
        batch_size: windows of a batch; after `prepare(sequential=True)` the first batch has one.
        seed: draw the windows at random; None spreads them evenly over the data. Of `mixture`, its
            seed; None is 0.

    Raises:
        CalibrationError: the data holds nothing to learn from, or has no columns that are known.
        OptionError: a tokenizer is needed and there is none, the model needs more than text, or an
            argument is out of range.

    Example:
        >>> import fp4pass, torch
        >>> fp4pass.calibration.batches(torch.ones(3, 16, dtype=torch.long), batch_size=2)[1].shape
        torch.Size([1, 16])
    """
    require_number("samples", "at least 1", samples, least=1)
    require_number("seq_len", "at least 2", seq_len, least=2)
    require_number("batch_size", "at least 1", batch_size, least=1)
    if data is None:
        if model is None:
            raise OptionError("data: expected calibration data, got None. Give model= to write it.")
        length = Target.of(model).fitting(seq_len)
        data = mixture(model, tokenizer, tokens=samples * length, seq_len=length, seed=seed or 0)
    source = source_of(data)
    if isinstance(source, Rows | Tensor):
        target, reader = Target.of(model), Processor(tokenizer, model)
        found = examples(source, reader, target, samples=samples, seq_len=seq_len, seed=seed)
        source = collate(found, batch_size, config=target.config, first_alone=target.sequential)
    if model is not None and isinstance(source, list | tuple):
        for i, batch in enumerate(source):
            require_tokens(model, batch, f"data: batch {i}")
    return source


def mixture(
    model: nn.Module, tokenizer: Any = None, *, tokens: int, seq_len: int = SEQ_LEN, seed: int = 0
) -> Tensor:
    """Return text to calibrate a causal language model on where there is no other.

    A third each are plain text and conversations that the model samples, and packaged text of many
    kinds: code, encyclopaedia, web, prose, maths, other languages. texts.md names its sources and
    licenses. Each piece of it is taken twice at most, and plain text fills up the rest.

    Args:
        model: as for `sample`.
        tokenizer: as for `batches`.
        tokens: how many, rounded up to whole windows.
        seq_len: tokens of a window, at most the context of the model.
        seed: of what is sampled, and of the choice of pieces.

    Returns:
        windows: [ceil(tokens / seq_len), seq_len] int64, on the CPU, all kinds mixed.

    Raises:
        OptionError: as `sample`.

    Example:
        >>> mixture = fp4pass.calibration.mixture
        >>> mixture(model, tokenizer, tokens=96, seq_len=32).shape
        torch.Size([3, 32])
    """
    reader, length = Processor(tokenizer, model), Target.of(model).fitting(seq_len)
    count = math.ceil(tokens / length)
    with lzma.open(str(files(__package__) / "texts.jsonl.xz"), "rt", encoding="utf-8") as lines:
        texts = [Document(text=json.loads(line)["text"]) for line in lines]
    windows = _stream_windows(reader.of_texts(texts), length)
    pieces = [each for each in windows if len(each) == length]
    chosen = [*_choose(pieces, count, seed), *_choose(pieces, count, seed + 1)][: round(count / 3)]
    rest = count - len(chosen)
    own = sample(
        model,
        reader.processor,
        tokens=rest * length,
        seq_len=length,
        chat_share=min(0.5, count / 3 / max(rest, 1)),
        seed=seed,
    )
    return in_turn([own, *([torch.stack(chosen)] if chosen else [])])


def examples(
    source: Rows | Tensor,
    reader: Processor,
    target: Target,
    *,
    samples: int,
    seq_len: int,
    seed: int | None = None,
) -> list[Example]:
    """Return the examples that a model runs on: at most `samples`, but all token windows."""
    # The other arguments are those of `batches`. Raises CalibrationError if there is nothing to
    # learn from, or a document is not as expected; OptionError if the model needs more than text.
    length = target.fitting(seq_len)
    if isinstance(source, Tensor):
        target.require_text()
        if not source.numel():
            raise CalibrationError(f"data: expected token ids, got {list(source.shape)}.")
        if source.ndim == 1:
            return _choose(_stream_windows([source.tolist()], length), samples, seed)
        if target.context is not None and source.shape[1] > target.context:
            raise ShapeError(
                f"data: windows have {source.shape[1]} tokens, but the context of the model is "
                f"{target.context}. Cut them: data.reshape(-1, {target.context}), or give token "
                "ids [tokens] and seq_len."
            )
        return list(source.long())
    documents = source.documents(samples * length, samples, seed)
    # Of images the rows are chosen before they are read.
    pictures = [document for document in documents if document.has_images]
    known = [list(document.ids) for document in documents if document.ids]
    others = [each for each in documents if not (each.ids or each.has_images)]
    windows: list[Tensor] = []
    if known or others:
        target.require_text()
        texts = [document for document in others if not reader.is_chat(document)]
        chats = [document for document in others if reader.is_chat(document)]
        windows = _stream_windows(reader.of_texts(texts), length)
        windows += _whole_windows([*known, *reader.of_chats(chats)], length)
        if not windows:
            raise CalibrationError(f"{source.name}: expected text to learn from, got no tokens.")
    chosen: list[Any] = _choose([*pictures, *windows], samples, seed)
    if len(chosen) < samples:
        _log.info("%s has %s examples, %s were asked for.", source.name, len(chosen), samples)
    return [reader.of_images(each) if isinstance(each, Document) else each for each in chosen]


def _stream_windows(documents: Iterable[Sequence[int]], length: int) -> list[Tensor]:
    """Cut documents, one behind the other, into windows [length]; fewer tokens are one window."""
    ids = torch.tensor(list(itertools.chain.from_iterable(documents)), dtype=torch.long)
    if 0 < len(ids) < length:
        return [ids]
    return [*ids[: len(ids) // length * length].view(-1, length)]


def _whole_windows(documents: Iterable[Sequence[int]], length: int) -> list[Tensor]:
    """Put documents into windows of `length`, each whole in the first with room; longer are cut."""
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


def _choose(items: Sequence[Item], count: int, seed: int | None = None) -> list[Item]:
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
    """Return examples as batches of at most `batch_size`, in their order."""
    # Windows of one length become a tensor [batch, tokens]; of several lengths, a mapping with an
    # attention_mask. Outputs of a processor stay together where all of their tensors have the same
    # shapes. `config` says whether the model reads labels; with `first_alone` the first batch has
    # one example, for it runs through the whole model where the others run to its first layer.
    alone = 1 if first_alone else 0
    groups = [examples[:alone], *_groups(examples[alone:], batch_size)]
    return [_batch(group, config) for group in groups if group]


def _groups(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    def shapes(example: Example) -> Any:
        """Return the shapes that a batch shares; None for windows, which are padded."""
        if isinstance(example, Tensor):
            return None
        return sorted((name, tuple(tensor.shape)) for name, tensor in example.items())

    for _, same in itertools.groupby(examples, key=shapes):
        while group := list(itertools.islice(same, size)):
            yield group


def _batch(group: Sequence[Any], config: Any) -> Any:
    first = group[0]
    if isinstance(first, Mapping):
        return {name: torch.cat([each[name] for each in group]) for name in first}
    lengths = torch.tensor([len(window) for window in group])
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if int(lengths.min()) == int(lengths.max()):
        ids = torch.stack(list(group))
        # Its decoder reads the labels, each a place later.
        return {"input_ids": ids, "labels": ids} if is_pair else ids
    pad = getattr(config, "pad_token_id", None)
    ids = pad_sequence(list(group), True, pad if isinstance(pad, int) else 0)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | ({"labels": ids, "decoder_attention_mask": mask} if is_pair else {})
