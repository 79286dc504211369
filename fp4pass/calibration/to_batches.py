"""Make batches of any calibration data."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from ..errors import CalibrationError, OptionError, require_number
from ..quantization.observers.batches import require_tokens
from .documents import Document
from .images import processed
from .packing import Example, choose, collate, stream_windows, whole_windows
from .rows import Rows
from .sample import sample
from .sources import source_of
from .target import Target
from .tokens import Tokens

_log = logging.getLogger(__name__)

# Tokens of a window.
SEQ_LEN = 512


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
            - a path: .txt, .jsonl, .csv, .json, .parquet, or a folder that `save_to_disk` wrote;
            - `name[:config][:split]` of `datasets`;
            - None: the model samples texts of its own.
        tokenizer: of transformers, or the processor of a model that reads images; by default that
            of the folder that `model` came from.
        model: what the batches are for; None for any model that reads tokens.
        samples: how many windows, or rows with images, to take at most.
        seq_len: tokens of a window, at most the context of the model. Less text than a window is
            one shorter window.
        batch_size: windows of a batch; after `prepare(sequential=True)` the first batch has one.
        seed: draw the windows at random; None spreads them evenly over the data. Of text that the
            model samples, the seed of that; None is 0.

    Raises:
        CalibrationError: the data holds nothing to learn from, or has no columns that are known.
        OptionError: a tokenizer is needed and there is none, the model needs more than text, or an
            argument is out of range.

    Example:
        >>> import fp4pass, torch
        >>> fp4pass.calibration.batches(torch.ones(3, 16, dtype=torch.long), batch_size=2)[1].shape
        torch.Size([1, 16])
    """
    for name, value, least in (
        ("samples", samples, 1),
        ("seq_len", seq_len, 2),
        ("batch_size", batch_size, 1),
    ):
        require_number(name, f"at least {least}", value, least=least)
    if data is None:
        if model is None:
            raise OptionError("data: expected calibration data, got None. Give model= to write it.")
        reader, length = Tokens(tokenizer, model).processor, Target.of(model).fitting(seq_len)
        data = sample(model, reader, tokens=samples * length, seq_len=length, seed=seed or 0)
    source = source_of(data)
    if isinstance(source, Rows | Tensor):
        target, tokens = Target.of(model), Tokens(tokenizer, model)
        found = examples(source, tokens, target, samples=samples, seq_len=seq_len, seed=seed)
        source = collate(found, batch_size, config=target.config, first_alone=target.sequential)
    if model is not None and isinstance(source, list | tuple):
        for i, batch in enumerate(source):
            require_tokens(model, batch, f"data: batch {i}")
    return source


def examples(
    source: Rows | Tensor,
    tokens: Tokens,
    target: Target,
    *,
    samples: int,
    seq_len: int,
    seed: int | None = None,
) -> list[Example]:
    """Return the examples that a model runs on: at most `samples`, but all token windows.

    Args:
        source: as `source_of` returns it.
        tokens: makes tokens of documents.
        target: the model.
        samples: how many windows, or rows with images, are wanted.
        seq_len: tokens of a window.
        seed: draw them at random; None spreads them evenly.

    Raises:
        CalibrationError: there is nothing to learn from, or a document is not as expected.
        OptionError: the model needs more than text.
    """
    if isinstance(source, Tensor):
        target.require_text()
        if source.ndim == 2:
            target.require_context(source)
            return list(source.long())
        cut = stream_windows([source.tolist()], target.fitting(seq_len))
        if not cut:
            raise CalibrationError("data: expected token ids [tokens], got none.")
        return choose(cut, samples, seed)
    seq_len = target.fitting(seq_len)
    documents = source.documents(samples * seq_len, samples, seed)
    pictures = [document for document in documents if document.images]
    plain = [document for document in documents if not document.images]
    windows: list[Tensor] = []
    if plain:
        target.require_text()
        known = [list(document.ids) for document in plain if document.ids]
        others = [document for document in plain if not document.ids]
        chats = [document for document in others if tokens.is_chat(document)]
        texts = [document for document in others if not tokens.is_chat(document)]
        windows = stream_windows(tokens.of_texts(texts), seq_len)
        windows += whole_windows([*known, *tokens.of_chats(chats)], seq_len)
        if not windows:
            raise CalibrationError(f"{source.name}: expected text to learn from, got no tokens.")
    # Of images the rows are chosen before they are read.
    chosen: list[Any] = choose([*pictures, *windows], samples, seed)
    made: list[Example] = [
        processed(each, tokens.processor) if isinstance(each, Document) else each for each in chosen
    ]
    source.tell()
    if len(made) < samples:
        what = "rows with images" if pictures else f"windows of up to {seq_len} tokens"
        _log.info("%s has %s %s, %s were asked for.", source.name, len(made), what, samples)
    return made
