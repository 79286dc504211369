"""Make token ids and model inputs of documents, by a tokenizer or a processor."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.float_models import load_tokenizer, model_class
from ..errors import CalibrationError, OptionError, ShapeError, as_option, expected
from ..record.state import PreparedState, get_state, source_folder, unwrap
from .documents import IMAGE_MARK, Document, content_parts
from .windows import tokenize

_log = logging.getLogger(__name__)

# Tokens of a window.
SEQ_LEN = 512


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
        reads = getattr(model_class(config), "main_input_name", "input_ids")
        return Target(config, reads)

    @property
    def context(self) -> int | None:
        """The number of positions that the model has, None where its config does not say it."""
        if self.config is None:
            return None
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
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

    def require_context(self, windows: Tensor) -> None:
        """Raise ShapeError for token windows [n, length] that the model has no positions for."""
        if not windows.numel():
            raise CalibrationError(f"data: expected token windows, got {list(windows.shape)}.")
        if self.context is not None and windows.shape[1] > self.context:
            raise ShapeError(
                f"data: windows have {windows.shape[1]} tokens, but the context of the model is "
                f"{self.context}. Cut them: data.reshape(-1, {self.context}), or give token ids "
                "[tokens] and seq_len."
            )


class Processor:
    """The tokenizer of documents, or a processor of texts and images, found when it is needed."""

    def __init__(self, given: Any = None, model: nn.Module | None = None) -> None:
        if given is not None and not callable(given):
            wanted = "a tokenizer or a processor of transformers"
            raise OptionError(expected("tokenizer", wanted, repr(given)))
        self._given, self._model = given, model

    @cached_property
    def processor(self) -> Any:
        """The one that was given, or that lies in the folder that the model came from.

        Raises OptionError for neither.
        """
        found = self._beside() if self._given is None else self._given
        if found is None:
            raise OptionError(
                "tokenizer: expected one for data that is text, got none, and none lies in a "
                f"folder that the model came from. Pass {as_option('tokenizer')}, or give batches "
                "of tensors."
            )
        return found

    def _beside(self) -> Any:
        root: Any = None if self._model is None else unwrap(self._model)
        folder = None if root is None else source_folder(root)
        if folder is None or not folder.is_dir():
            return None
        found = load_tokenizer(str(folder))
        # The cache of the hub may have the weights of a model alone.
        name = str(root.name_or_path)
        return load_tokenizer(name) if found is None and name != str(folder) else found

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

    def of_images(self, document: Document) -> Mapping[str, Tensor]:
        """Return the batch of one that the processor makes of a document with images.

        Raises CalibrationError if the processor reads no images, or refuses the document.
        """
        processor = self.processor
        is_image_processor = hasattr(processor, "image_mean") or hasattr(processor, "do_resize")
        if not is_image_processor and not hasattr(processor, "image_processor"):
            raise CalibrationError(
                f"{document.where}: an image, but {type(processor).__name__} reads text alone. "
                "Pass the processor of the model, transformers.AutoProcessor.from_pretrained(...), "
                "as tokenizer=."
            )
        images = [_loaded(image, document.where) for image in document.images]
        given: dict[str, Any] = {"images": images, "return_tensors": "pt"}
        if not is_image_processor:
            text = _image_text(document, processor)
            given["text"] = [text]
            bos = getattr(processor.tokenizer, "bos_token", None)
            if bos and text.startswith(bos):
                given["add_special_tokens"] = False
        try:
            made = processor(**given)
        except (ValueError, TypeError, LookupError, RuntimeError, OSError, StopIteration) as error:
            raise CalibrationError(
                f"{document.where}: {type(processor).__name__} refuses it: {error!s:.300}. Correct "
                "it, or leave it out."
            ) from error
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _has_template(reader: Any) -> bool:
    return bool(getattr(reader, "chat_template", None))


def render_chat(document: Document, processor: Any) -> str:
    """Return the text that a chat template makes of a document, special tokens included.

    The template is that of the processor, or of its tokenizer. Raises CalibrationError.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    reads_parts = _has_template(processor) and tokenizer is not processor
    owner = processor if reads_parts else tokenizer
    if not _has_template(owner):
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


def _image_text(document: Document, processor: Any) -> str:
    """Return the text of a document, with the token that its processor reads an image at."""
    token = getattr(processor, "image_token", None) or IMAGE_MARK
    if document.messages and (_has_template(processor) or document.text is None):
        return render_chat(document, processor)
    text = (document.text or "").replace(IMAGE_MARK, token)
    missing = len(document.images) - text.count(token)
    if _has_template(processor) and missing == len(document.images):
        content = [*({"type": "image"},) * missing, *content_parts(text)]
        asked = {"role": "user", "content": content}
        return render_chat(dataclasses.replace(document, messages=(asked,)), processor)
    return token * max(missing, 0) + text


def _loaded(image: Any, where: str) -> Any:
    """Read an image that is a path, a URL or bytes; return others as they are."""
    from transformers.image_utils import load_image

    if isinstance(image, Mapping):
        # As `datasets` has those that it does not decode.
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    try:
        if isinstance(image, bytes):
            from PIL import Image

            return Image.open(io.BytesIO(image)).convert("RGB")
        return load_image(str(image)) if isinstance(image, str | Path) else image
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{where}: its image cannot be read: {error!s:.200}.") from error
