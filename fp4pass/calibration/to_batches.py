"""Any calibration data as batches that a model takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import OptionError, expected, require_type
from .collate import collate
from .data import Batches, source_of
from .examples import examples
from .sample import sample
from .target import Target
from .tokens import Tokens

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

    Texts are packed one behind the other into windows of tokens, each behind bos. Chats go through
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
        seed: draw the windows at random; None spreads them evenly over the data.

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
        require_type(name, f"at least {least}", value, int)
        if value < least:
            raise OptionError(expected(name, f"at least {least}", value))
    if data is None:
        if model is None:
            raise OptionError("data: expected calibration data, got None. Give model= to write it.")
        reader = Tokens(tokenizer, model).processor
        data = sample(model, reader, tokens=samples * seq_len, seq_len=seq_len)
    source = source_of(data)
    if isinstance(source, Batches):
        return source.items
    target = Target.of(model)
    tokens = Tokens(tokenizer, model)
    found = examples(source, tokens, target, samples=samples, seq_len=seq_len, seed=seed)
    return collate(found, batch_size, config=target.config, first_alone=target.sequential)
