"""Make token ids and model inputs of documents, by a tokenizer or a processor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..checkpoint.float_models import load_tokenizer, model_class
from ..errors import CalibrationError, OptionError, as_option, expected
from ..record.state import PreparedState, get_state, source_folder, unwrap
from .windows import tokenize

_log = logging.getLogger(__name__)

# Tokens of a window.
SEQ_LEN = 512

# Raised by templates and processors that refuse an example.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError)


@dataclass(frozen=True)
class Document:
    """One example of calibration data."""

    text: str | None = None  # read where there is no chat, or no chat template for it
    messages: tuple[Mapping[str, Any], ...] = ()  # of a chat, with the keys "role" and "content"
    tools: tuple[Any, ...] = ()  # JSON schemas that a chat can use
    ids: tuple[int, ...] = ()  # tokens, where they are known
    has_images: bool = False  # parts of messages are images
    where: str = "data"  # it stands, for errors

    def __bool__(self) -> bool:
        return bool(self.messages or self.ids or (self.text or "").strip())

    @property
    def characters(self) -> int:
        """The number of characters, four for each known token."""
        if self.messages:
            return sum(len(str(message.get("content") or "")) for message in self.messages)
        return len(self.text or "") or 4 * len(self.ids)


@dataclass(frozen=True)
class Target:
    """The facts of a model that batches are made for."""

    config: Any = None  # of a model of transformers, None for others
    main_input: str = "input_ids"  # the first argument of its forward
    sequential: bool = False  # whether it was prepared with sequential=True

    @staticmethod
    def of(model: nn.Module | None) -> Target:
        """Return the facts of a model; of None those of any model that reads tokens."""
        if model is None:
            return Target()
        root: Any = unwrap(model)
        config, state = getattr(root, "config", None), get_state(root)
        return Target(
            config if hasattr(config, "get_text_config") else None,
            getattr(root, "main_input_name", "input_ids"),
            isinstance(state, PreparedState) and state.recording is not None,
        )

    @staticmethod
    def of_config(config: Any) -> Target:
        """Return the facts of a model that is not loaded."""
        return Target(config, getattr(model_class(config), "main_input_name", "input_ids"))

    @property
    def context(self) -> int | None:
        """The number of positions that the model has, None where its config does not say it."""
        text = None if self.config is None else self.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def require_text(self) -> None:
        """Raise OptionError for a model that text alone cannot run."""
        starts = getattr(self.config, "decoder_start_token_id", None) is not None
        is_pair = getattr(self.config, "is_encoder_decoder", False)
        if self.main_input != "input_ids" or (is_pair and not starts):
            kind = "" if self.config is None else f" of type {self.config.model_type}"
            raise OptionError(
                f"A model{kind} needs more than text. Calibrate it in Python on batches of what "
                "it reads, with fp4pass.prepare and fp4pass.calibrate, or choose a method that "
                "needs no data."
            )

    def fitting(self, seq_len: int) -> int:
        """Return tokens of a window that the model has positions for."""
        if self.context is None or seq_len <= self.context:
            return seq_len
        _log.info(
            "windows have %s tokens, the context of the model, and not %s.", self.context, seq_len
        )
        return self.context


class Processor:
    """The tokenizer of documents, or a processor of texts and images, found when it is needed."""

    def __init__(self, given: Any = None, model: nn.Module | None = None) -> None:
        if given is not None and not callable(given):
            wanted = "a tokenizer or a processor of transformers"
            raise OptionError(expected("tokenizer", wanted, repr(given)))
        self._given, self._model = given, model

    @cached_property
    def processor(self) -> Any:
        """The one given, or that of the model's folder. Raises OptionError for neither."""
        found = self._given
        root: Any = None if self._model is None else unwrap(self._model)
        folder = None if root is None or found is not None else source_folder(root)
        if folder is not None and folder.is_dir():
            found = load_tokenizer(str(folder))
            # The cache of the hub may have the weights of a model alone.
            if found is None and str(root.name_or_path) != str(folder):
                found = load_tokenizer(str(root.name_or_path))
        if found is None:
            raise OptionError(
                "tokenizer: expected one for data that is text, got none, and none lies in a "
                f"folder that the model came from. Pass {as_option('tokenizer')}, or give batches "
                "of tensors."
            )
        return found

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of text. Raises OptionError for a processor of images alone."""
        found = getattr(self.processor, "tokenizer", self.processor)
        if not hasattr(found, "bos_token_id"):
            kinds = "one that reads text"
            raise OptionError(expected("tokenizer", kinds, type(found).__name__))
        return found

    def is_chat(self, document: Document) -> bool:
        """Return whether a document goes through a chat template, and not as text."""
        known = _has_template(self.processor) or _has_template(self.tokenizer)
        return bool(document.messages) and (known or document.text is None)

    def of_texts(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the tokens of texts, each behind bos."""
        texts = [document.text or "" for document in documents]
        return tokenize(self.tokenizer, texts) if texts else []

    def of_chats(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the tokens of chats, as their template has them."""
        texts = [self._rendered(document, tokenize=False) for document in documents]
        # The template has written special tokens.
        options = {"add_special_tokens": False, "verbose": False}
        return self.tokenizer(texts, **options)["input_ids"] if texts else []

    def text(self, document: Document) -> str:
        """Return a document as text, without the bos that it gets when it is cut into windows."""
        if document.ids:
            return str(self.tokenizer.decode(document.ids, skip_special_tokens=True))
        if not self.is_chat(document):
            return document.text or ""
        found = self._rendered(document, tokenize=False)
        return str(found).removeprefix(self.tokenizer.bos_token or "")

    def of_images(self, document: Document) -> Mapping[str, Tensor]:
        """Return the batch of one of a document with images, or raise CalibrationError."""
        made: Any
        if hasattr(self.processor, "image_processor"):
            made = self._rendered(document, tokenize=True, return_dict=True, return_tensors="pt")
        elif hasattr(self.processor, "image_mean") or hasattr(self.processor, "do_resize"):
            parts = [p for m in document.messages for p in m["content"] if isinstance(p, Mapping)]
            images = [p.get("image", p.get("url")) for p in parts if p.get("type") == "image"]
            made = _made(document.where, self.processor, images=images, return_tensors="pt")
        else:
            raise CalibrationError(
                f"{document.where}: an image, but {type(self.processor).__name__} reads text "
                "alone. Pass the processor of the model, "
                "transformers.AutoProcessor.from_pretrained(...), as tokenizer=."
            )
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}

    def _rendered(self, document: Document, **options: Any) -> Any:
        """Return what a chat template makes of a document: the processor's, or its tokenizer's."""
        owner = self.processor if _has_template(self.processor) else self.tokenizer
        if not _has_template(owner):
            raise CalibrationError(
                f"{document.where}: a chat, but the tokenizer has no chat template. Set "
                "tokenizer.chat_template, as that of the instruct version of the model, or give "
                "texts."
            )
        chat = [
            {**message, "content": _shaped(message["content"], owner is not self.tokenizer)}
            for message in document.messages
        ]
        tools = list(document.tools) or None
        return _made(document.where, owner.apply_chat_template, chat, tools=tools, **options)


def _made(where: str, call: Any, *args: Any, **options: Any) -> Any:
    """Return what a processor or a template makes of an example. Raises CalibrationError."""
    from jinja2 import TemplateError

    try:
        return call(*args, **options)
    except (TemplateError, *_REFUSALS) as error:
        kind = type(getattr(call, "__self__", call)).__name__
        raise CalibrationError(
            f"{where}: {kind} refuses it: {error!s:.300}. Correct it, or leave it out."
        ) from error


def _has_template(reader: Any) -> bool:
    return bool(getattr(reader, "chat_template", None))


def _shaped(content: Any, in_parts: bool) -> Any:
    """Return the content of a message as its template reads it: as parts, or text as a string."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if in_parts else content
    if not in_parts and all(part.get("type") == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content
