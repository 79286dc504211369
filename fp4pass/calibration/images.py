"""Make the arguments of a model of documents with images, through its processor."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CalibrationError
from .documents import Document
from .tokens import has_template, render_chat

# The mark of an image in texts of many data sets.
_PLACEHOLDER = "<image>"

# Where a part of a message has its image.
_SOURCES = ("image", "url", "path", "base64")


def with_own_images(document: Document) -> Document:
    """Return a document with the images that its messages hold, or have a place for, apart.

    Images that come beside messages without a place for them go into the first turn of the user.
    """
    if not document.messages:
        return document
    beside, images, messages = list(document.images), [], []
    for message in document.messages:
        content: Any = message["content"]
        if isinstance(content, list):
            parts, content = content, []
            for part in parts:
                is_image = isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
                content.append({"type": "image"} if is_image else part)
                if is_image:
                    held = _held(part)
                    if held is None:
                        held = beside.pop(0) if beside else _missing(document)
                    images.append(held)
        messages.append({**message, "content": content})
    if beside:
        _place(messages, len(beside))
        # Places that were left in the text come in the order of the turns.
        images = [*images, *beside]
    return dataclasses.replace(document, messages=tuple(messages), images=tuple(images))


def _held(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message holds, None where it is a place for one."""
    if "image_url" in part:
        url = part["image_url"]
        return url.get("url") if isinstance(url, Mapping) else url
    return next((part[key] for key in _SOURCES if part.get(key) is not None), None)


def _place(messages: list[dict[str, Any]], count: int) -> None:
    """Make parts of images in the texts of messages, where they stand or else at the beginning."""
    marked = [m for m in messages if isinstance(m["content"], str) and _PLACEHOLDER in m["content"]]
    if sum(message["content"].count(_PLACEHOLDER) for message in marked) == count:
        for message in marked:
            message["content"] = _parts(message["content"])
        return
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    own = first["content"]
    own = [{"type": "text", "text": own}] if isinstance(own, str) else list(own)
    first["content"] = [*({"type": "image"} for _ in range(count)), *own]


def _parts(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for piece in re.split(f"({_PLACEHOLDER})", text):
        if piece == _PLACEHOLDER:
            found.append({"type": "image"})
        elif piece.strip():
            found.append({"type": "text", "text": piece.strip("\n")})
    return found


def processed(document: Document, processor: Any) -> Mapping[str, Tensor]:
    """Return the batch of one that a processor makes of a document with images.

    Raises:
        CalibrationError: the processor reads no images, or refuses the document.
    """
    is_image_processor = hasattr(processor, "image_mean") or hasattr(processor, "do_resize")
    if not is_image_processor and not hasattr(processor, "image_processor"):
        raise CalibrationError(
            f"{document.where}: an image, but {type(processor).__name__} reads text alone. Pass "
            "the processor of the model, transformers.AutoProcessor.from_pretrained(...), as "
            "tokenizer=."
        )
    images = [_loaded(image, document.where) for image in document.images]
    given: dict[str, Any] = {"images": images, "return_tensors": "pt"}
    if not is_image_processor:
        text = _text(document, processor)
        given["text"] = [text]
        bos = getattr(processor.tokenizer, "bos_token", None)
        if bos and text.startswith(bos):
            given["add_special_tokens"] = False
    try:
        made = processor(**given)
    except (ValueError, TypeError, LookupError, RuntimeError, OSError, StopIteration) as error:
        raise CalibrationError(
            f"{document.where}: {type(processor).__name__} refuses it: {error!s:.300}. Correct it, "
            "or leave it out."
        ) from error
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _text(document: Document, processor: Any) -> str:
    """Return the text of a document, with the token that its processor reads an image at."""
    token = getattr(processor, "image_token", None) or _PLACEHOLDER
    if document.messages and (has_template(processor) or document.text is None):
        return render_chat(document, processor)
    text = (document.text or "").replace(_PLACEHOLDER, token)
    missing = len(document.images) - text.count(token)
    if has_template(processor) and missing == len(document.images):
        asked = {"role": "user", "content": [*({"type": "image"},) * missing, *_parts(text)]}
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


def _missing(document: Document) -> Any:
    raise CalibrationError(
        f"{document.where}: a message with a place for an image, but no image is left for it. Give "
        'it as {"type": "image", "image": ...}, or in a column image or images.'
    )
