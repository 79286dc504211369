"""Make token ids of documents, by the tokenizer and the chat template of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from ..checkpoint.float_models import load_tokenizer
from ..errors import CalibrationError, OptionError, as_option, expected
from ..record.source_folder import source_folder
from ..record.state import unwrap
from .documents import Document
from .windows import tokenize


class Tokens:
    """The tokenizer of documents, or that of a processor, found when it is needed."""

    def __init__(self, tokenizer: Any = None, model: nn.Module | None = None) -> None:
        if tokenizer is not None and not callable(tokenizer):
            wanted = "a tokenizer or a processor of transformers"
            raise OptionError(expected("tokenizer", wanted, repr(tokenizer)))
        self._given, self._model = tokenizer, model

    @cached_property
    def processor(self) -> Any:
        """The one that was given, or that lies in the folder that the model came from.

        Raises OptionError for neither.
        """
        found = _tokenizer_beside(self._model) if self._given is None else self._given
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
        known = has_template(self.processor) or has_template(self.tokenizer)
        return bool(document.messages) and (known or document.text is None)

    def of_texts(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the tokens of texts, each behind bos."""
        texts = [document.text or "" for document in documents]
        return tokenize(self.tokenizer, texts) if texts else []

    def of_chats(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the tokens of chats, as their template has them."""
        texts = [render_chat(document, self.processor) for document in documents]
        # The template has written special tokens.
        options = {"add_special_tokens": False, "verbose": False}
        return self.tokenizer(texts, **options)["input_ids"] if texts else []

    def text(self, document: Document) -> str:
        """Return a document as text, without the bos that it gets when it is cut into windows."""
        if document.ids:
            return str(self.tokenizer.decode(document.ids, skip_special_tokens=True))
        if not self.is_chat(document):
            return document.text or ""
        return render_chat(document, self.processor).removeprefix(self.tokenizer.bos_token or "")


def _tokenizer_beside(model: nn.Module | None) -> Any:
    """Return the processor or tokenizer of the folder that a model came from, None without."""
    root: Any = None if model is None else unwrap(model)
    folder = None if root is None else source_folder(root)
    if folder is None or not folder.is_dir():
        return None
    found = load_tokenizer(str(folder))
    # The cache of the hub may have the weights of a model alone.
    name = str(root.name_or_path)
    return load_tokenizer(name) if found is None and name != str(folder) else found


def has_template(reader: Any) -> bool:
    """Return whether a tokenizer or a processor has a chat template."""
    return bool(getattr(reader, "chat_template", None))


def render_chat(document: Document, processor: Any) -> str:
    """Return the text that a chat template makes of a document, special tokens included.

    The template is that of the processor, or of its tokenizer.

    Raises:
        CalibrationError: there is no template, or it refuses the chat.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    reads_parts = has_template(processor) and tokenizer is not processor
    owner = processor if reads_parts else tokenizer
    if not has_template(owner):
        raise CalibrationError(
            f"{document.where}: a chat, but the tokenizer has no chat template. Set "
            "tokenizer.chat_template, as that of the instruct version of the model, or give texts."
        )
    shape = _as_parts if reads_parts else _as_text
    chat = [{**message, "content": shape(message["content"])} for message in document.messages]
    plain = (ValueError, TypeError, KeyError, AttributeError, IndexError)
    try:
        import jinja2

        tools = list(document.tools) or None
        return str(owner.apply_chat_template(chat, tools=tools, tokenize=False))
    except ImportError as error:
        raise CalibrationError(
            f"{document.where}: chat templates need jinja2: pip install jinja2."
        ) from error
    except (jinja2.TemplateError, *plain) as error:
        raise CalibrationError(
            f"{document.where}: the chat template refuses it: {error}. Change its turns, or leave "
            "it out."
        ) from error


def _as_parts(content: Any) -> Any:
    """Return the content of a message as a list of parts, which templates of processors read."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> Any:
    """Return the content of a message as a string where all of its parts are text."""
    parts: list[Any] = content if isinstance(content, list) else [None]
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return content
