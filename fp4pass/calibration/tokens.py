"""Token ids of documents, by the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn

from ..core.source_files import source_folder
from ..errors import OptionError, expected
from ..float_models import load_tokenizer
from ..quantization.state import unwrap
from .chats import has_template, render_chat
from .documents import Document
from .windows import tokenize


def find_tokenizer(model: nn.Module | None) -> Any:
    """Return the processor or tokenizer of the folder that a model came from, None without."""
    root: Any = None if model is None else unwrap(model)
    folder = None if root is None else source_folder(root)
    if folder is None or not folder.is_dir():
        return None
    found = load_tokenizer(str(folder))
    # The cache of the hub may have the weights of a model alone.
    name = str(root.name_or_path)
    return load_tokenizer(name) if found is None and name != str(folder) else found


class Tokens:
    """The tokens of documents: a tokenizer, or the one of a processor, found where it is needed."""

    def __init__(self, tokenizer: Any = None, model: nn.Module | None = None) -> None:
        if tokenizer is not None and not callable(tokenizer):
            wanted = "a tokenizer or a processor of transformers"
            raise OptionError(expected("tokenizer", wanted, repr(tokenizer)))
        self._given, self._model = tokenizer, model

    @cached_property
    def processor(self) -> Any:
        """What was given, or lies in the folder that the model came from.

        Raises OptionError for neither.
        """
        found = find_tokenizer(self._model) if self._given is None else self._given
        if found is None:
            raise OptionError(
                "tokenizer: expected one for data that is text, got none, and none lies in a "
                "folder that the model came from. Pass tokenizer=, or give batches of tensors."
            )
        return found

    @property
    def tokenizer(self) -> Any:
        """What makes tokens of text. Raises OptionError for a processor of images alone."""
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
