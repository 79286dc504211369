"""Check what the files of a folder declare: ignore lists, algorithms, tied heads, tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._compat.transformers import vocabulary_files
from ..checkpoint.beside import TOKENIZER_FILES
from ..checkpoint.layouts import matches
from ..checkpoint.source_files import config_changes
from ..core.files import parse_json
from ..errors import Fp4PassError
from ..nn.linear import PACKED
from .kinds import Finding
from .model import FloatModel, is_of_prediction, predicted_layers
from .structure import Layers, dense_names, is_declared
from .survey import Survey

# Words in the names of models that answer chats.
_CHAT = re.compile(r"(?:^|[-_./ ])(instruct|chat|it|assistant|thinking|sft|dpo)(?:$|[-_./ ])", re.I)

_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")


def check_declared(found: Survey, layers: Layers, model: FloatModel | None) -> Iterator[Finding]:
    """Yield what the config and the files beside say, and is not so."""
    yield from _ignored(found, layers)
    for name in _missed(found, layers, model):
        what = "expected a packed layer, as the quantization_config says, got a dense one"
        yield Finding("ignore-misses", name, "config.json", what)
    yield from _sides(found, layers)
    for key, (was, now) in config_changes(found.config, found.own).items():
        what = f"expected {was:.80}, as saved, got {now:.80}"
        yield Finding("config-changed", key, "config.json", what)
    yield from _tied(found, layers)
    predicted = predicted_layers(found.config)
    if predicted and not any(is_of_prediction(found.config, name) for name in found.tensors):
        key, count = next(iter(predicted.items()))
        what = f"expected the tensors of {count} layers, as {key} says, got none"
        yield Finding("mtp-absent", key, "config.json", what)
    yield from _beside(found)


def _declarations(found: Survey) -> dict[str, Mapping[str, Any]]:
    """Return what each file of a folder declares of packed layers, by its name."""
    own = found.config.get("quantization_config")
    every = {"config.json": own, **found.sides} if isinstance(own, Mapping) else dict(found.sides)
    return {
        name: said for name, said in every.items() if said is not None and found.layout.detect(said)
    }


def _ignored(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield packed layers that a file lists as dense."""
    for file, said in _declarations(found).items():
        ignored = found.layout.ignored(said) or ()
        if not ignored:
            continue
        for name in layers.records:
            if matches(name, ignored):
                pattern = next(each for each in ignored if matches(name, [each]))
                what = f"expected a dense layer, as {pattern!r} says, got a packed one"
                yield Finding("ignore-packed", name, file, what)


def _missed(found: Survey, layers: Layers, model: FloatModel | None) -> Iterator[str]:
    """Yield the dense linear layers that the config declares packed."""
    if not found.layout.engines or found.layout.stacks:
        return
    # Without its model, those that are packed elsewhere.
    roles = {name.rpartition(".")[2] for name in layers.records}
    for name in dense_names(found, layers):
        if model is None or f"{name}.weight" not in model.names:
            is_linear = name.rpartition(".")[2] in roles
        else:
            is_linear = model.names[f"{name}.weight"].removesuffix(".weight") in model.linears
        if is_linear and is_declared(found, name):
            yield name
    # Those that have the weight of an embedding.
    if model is None:
        return
    for weight in sorted(model.tied):
        name = weight.removesuffix(".weight")
        if name in model.linears and name not in layers.records and is_declared(found, name):
            yield name


def _sides(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield layers of which two files declare two schemes."""
    files = _declarations(found)
    if len(files) < 2:
        return
    for layer in layers.records:
        said = {}
        for file, declared in files.items():
            try:
                scheme = found.layout.scheme(layer, declared)
            except Fp4PassError as error:
                said[file] = str(error)
            else:
                said[file] = f"{scheme.fmt}{'a16' if scheme.weight_only else ''}"
        if len(set(said.values())) > 1:
            both = ", ".join(f"{file} {each}" for file, each in said.items())
            yield Finding("config-disagrees", layer, next(iter(files)), f"expected one, got {both}")


def _tied(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Yield an output embedding that is packed, and by the config the input's."""
    text = found.config.get("text_config")
    tied = found.config.get("tie_word_embeddings")
    if tied is None and isinstance(text, Mapping):
        tied = text.get("tie_word_embeddings")
    for name in _HEADS:
        if tied is True and name in layers.records:
            what = (
                "expected no weight, for tie_word_embeddings is true, got "
                f"{layers.parts[name][PACKED].name}"
            )
            yield Finding("tied-head", name, "config.json", what)


def _beside(found: Survey) -> Iterator[Finding]:
    """Yield that a language model lacks its tokenizer, or a model of chats its template."""
    text = found.config.get("text_config")
    vocabulary = found.config.get("vocab_size") or (text or {}).get("vocab_size")
    names = [str(each) for each in found.config.get("architectures") or ()]
    if not vocabulary or not any(each.endswith(("ForCausalLM", "Generation")) for each in names):
        return
    if not any((found.folder / name).is_file() for name in TOKENIZER_FILES):
        what = f"expected tokenizer.json or another of its files, got none beside {names[0]}"
        yield Finding("tokenizer-missing", "tokenizer.json", "", what)
        return
    kind = _json(found.folder / "tokenizer_config.json").get("tokenizer_class")
    files = vocabulary_files(str(kind))
    if files and not any((found.folder / name).is_file() for name in files):
        what = f"expected {' or '.join(sorted(files))} for its {kind}, got none"
        yield Finding("tokenizer-missing", "tokenizer_config.json", "tokenizer_config.json", what)
        return
    if said := _is_of_chats(found):
        held = found.folder / "tokenizer_config.json"
        wanted = ("chat_template.jinja", "chat_template.json")
        has = any((found.folder / name).is_file() for name in wanted)
        has = has or (found.folder / "additional_chat_templates").is_dir()
        if not has and not _json(held).get("chat_template"):
            what = f"expected one, for {said}, got none there and none in {held.name}"
            yield Finding("chat-template-missing", wanted[0], "", what)


def _is_of_chats(found: Survey) -> str:
    """Return what says that a model answers chats, "" if nothing does."""
    name = str(found.config.get("_name_or_path") or "")
    if _CHAT.search(name.rstrip("/").rpartition("/")[2]):
        return f"config.json names {name}"
    card = found.folder / "README.md"
    if card.is_file():
        head = card.read_text("utf-8", "replace")[:4000].partition("\n---")[0]
        for line in head.splitlines():
            key, _, value = line.partition(":")
            if key.strip(" -") == "base_model" and _CHAT.search(value.strip()):
                return f"README.md names {value.strip()}"
    return ""


def _json(path: Any) -> Mapping[str, Any]:
    try:
        data = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, Mapping) else {}
