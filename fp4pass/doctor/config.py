"""Check what the files of a folder declare, also against the model that its config makes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._compat.transformers import config_faults, meta_model, tied_weights, vocabulary_files
from .._compat.transformers_loading import names_in_model
from ..checkpoint import (
    CACHE_SCALES,
    TOKENIZER_FILES,
    config_changes,
    matches,
    model_class,
    read_json,
    well_formed,
)
from ..errors import CheckpointError, Fp4PassError
from ..nn import PACKED
from .folder import EXPERT, Folder

# Words in the names of models that answer chats.
_CHAT = re.compile(r"(?:^|[-_./ ])(instruct|chat|it|assistant|thinking|sft|dpo)(?:$|[-_./ ])", re.I)

_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")

# The names in configs of the number of layers that predict further tokens.
_PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class FloatModel:
    """The float model of a config, without memory."""

    shapes: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    tied: frozenset[str]  # names that it has of other tensors
    names: Mapping[str, str]  # those in the model of the tensors of the folder


def build_model(found: Folder) -> tuple[FloatModel | None, str]:
    """Return the float model of a folder's config, or why there is none."""
    if not found.config:
        return None, "there is no config.json"
    if not found.config.get("model_type"):
        return None, "config.json names no model_type"
    try:
        import transformers
    except ImportError:
        return None, "transformers is not installed: pip install 'fp4pass[hf]'"
    try:
        # Else transformers asks on the terminal whether it may run the files of a folder.
        config: Any = transformers.AutoConfig.from_pretrained(found.path, trust_remote_code=False)
        config.__dict__.pop("quantization_config", None)
        model = meta_model(model_class(config), config)
        names = names_in_model(model, _float_shapes(found), merged=True)
    except config_faults() as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"transformers {transformers.__version__} makes no model of it: {line:.200}"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    linears = {n for n, each in model.named_modules() if isinstance(each, nn.Linear)}
    tied = frozenset(tied_weights(model))
    return FloatModel(shapes, frozenset(linears), tied, names), ""


def _float_shapes(found: Folder) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that the tensors of a folder have in the float model's."""
    packed = found.packed | found.broken
    result = {
        name: each.shape
        for name, each in found.tensors.items()
        if name not in packed and not name.endswith(CACHE_SCALES)
    }
    for layer, record in found.records.items():
        result[layer if record.is_stacked else f"{layer}.weight"] = record.dense_shape
    renamed = (found.own or {}).get("renamed") or {}
    return {renamed.get(name, name): shape for name, shape in result.items()}


def check_model(found: Folder, model: FloatModel | None) -> None:
    """Note tensors that the folder lacks, or has in other shapes, by the model of its config."""
    if model is None:
        _check_count(found)
        return
    held, own = _float_shapes(found), found.own or {}
    sources: dict[str, list[str]] = {}
    for name in held:
        sources.setdefault(model.names.get(name, name), []).append(name)
    # Parts that are wrong otherwise are named already.
    structure = ("tensor-missing", "companion-missing", "orphan", "shape", "dtype", "block-size")
    damaged = bool(found.unread or found.lost_files) or any(
        each.kind in structure for each in found.findings
    )
    aliases = {name.rpartition(".")[0] for name in own.get("aliases") or {}}
    mixtures = {match[1] for each in held if (match := EXPERT.match(each))}
    renamed = own.get("renamed") or {}
    stacks = {renamed.get(name, name) for name in own.get("joined") or {}}

    def say(name: str, wanted: str, got: object) -> None:
        found.say("config-model", name, f"{wanted}, as the config says, got {got}", "config.json")

    for name, shape in model.shapes.items():
        names, last = sources.get(name, []), name.rpartition(".")[2]
        # Else a tensor is a part of what transformers makes of it.
        if len(names) == 1 and names[0].rpartition(".")[2] == last:
            if held[names[0]] != shape:
                say(names[0], f"expected {list(shape)}", list(held[names[0]]))
        elif len(names) > 1 and not damaged:
            # A stack, which transformers makes of its experts; some have none on disk.
            size = sum(math.prod(held[each]) for each in names)
            experts = len({match[2] for each in names if (match := EXPERT.match(each))})
            wanted = math.prod(shape[1:] if experts else shape) * (experts or 1)
            if size != wanted:
                say(names[0], f"expected {wanted} numbers", size)
        elif not names and name not in model.tied and not damaged and name not in stacks:
            if name.rpartition(".")[0] not in mixtures | aliases:
                say(name, "expected this tensor", "none")
    forms = {re.sub(r"\d+", "*", name) for name in model.shapes}
    for name in held:
        target = model.names.get(name, name)
        if target not in model.shapes and re.sub(r"\d+", "*", target) in forms:
            if not (_predicted(found) and _is_of_prediction(found, name)):
                say(name, "expected no such layer", name)


def _check_count(found: Folder) -> None:
    """Note that a folder has more or fewer layers than its config says."""
    count = found.fact("num_hidden_layers")
    found_layers = (re.match(r"(?:\w+\.)*?layers\.(\d+)\.", name) for name in found.tensors)
    numbers = {int(match[1]) for match in found_layers if match}
    if type(count) is not int or not numbers or isinstance(found.config.get("vision_config"), dict):
        return
    if not count <= len(numbers) <= count + sum(_predicted(found).values()):
        what = f"expected {count} layers, as num_hidden_layers says, got {len(numbers)}"
        found.say("config-model", "num_hidden_layers", what, "config.json")


def _predicted(found: Folder) -> dict[str, int]:
    """Return what a config says of layers that predict further tokens, by its keys."""
    said = {key: found.fact(key) for key in _PREDICTED}
    return {key: count for key, count in said.items() if type(count) is int and count > 0}


def _is_of_prediction(found: Folder, name: str) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens."""
    if re.search(r"(^|\.)(mtp|nextn|multi_token)", name):
        return True
    count = found.fact("num_hidden_layers")
    numbers = re.findall(r"(?:^|\.)layers\.(\d+)\.", name)
    return type(count) is int and any(int(number) >= count for number in numbers)


def check_config(found: Folder, model: FloatModel | None) -> None:
    """Note what the config and the files beside say, and is not so."""
    check_ignored(found)
    for name in _missed(found, model):
        what = "expected a packed layer, as the quantization_config says, got a dense one"
        found.say("ignore-misses", name, what, "config.json")
    _check_sides(found)
    for key, (was, now) in config_changes(found.config, found.own).items():
        what = f"expected {was:.80}, as saved, got {now:.80}"
        found.say("config-changed", key, what, "config.json")
    if found.fact("tie_word_embeddings") is True:
        for name in filter(found.records.__contains__, _HEADS):
            got = found.parts[name][PACKED].name
            what = f"expected no weight, for tie_word_embeddings is true, got {got}"
            found.say("tied-head", name, what, "config.json")
    predicted = _predicted(found)
    if predicted and not any(_is_of_prediction(found, name) for name in found.tensors):
        key, count = next(iter(predicted.items()))
        what = f"expected the tensors of {count} layers, as {key} says, got none"
        found.say("mtp-absent", key, what, "config.json")
    _check_beside(found)


def _declarations(found: Folder) -> dict[str, Mapping[str, Any]]:
    """Return what each file of a folder declares of packed layers, by its name."""
    every = {"config.json": found.config.get("quantization_config"), **found.sides}
    return {
        name: said
        for name, said in every.items()
        if isinstance(said, Mapping) and found.layout.detect(said)
    }


def check_ignored(found: Folder) -> None:
    """Note packed layers that a file lists as dense."""
    for file, said in _declarations(found).items():
        with well_formed(found.path / file):
            ignored = found.layout.ignored(said) or ()
            for name in (name for name in found.records if ignored and matches(name, ignored)):
                pattern = next(each for each in ignored if matches(name, [each]))
                what = f"expected a dense layer, as {pattern!r} says, got a packed one"
                found.say("ignore-packed", name, what, file)


def _missed(found: Folder, model: FloatModel | None) -> Iterator[str]:
    """Yield the dense linear layers that the config declares packed."""
    if found.declared is None or not found.layout.engines or found.layout.stacks:
        return
    # Without its model, those that are packed elsewhere; with it, those tied to an embedding, too.
    roles = {name.rpartition(".")[2] for name in found.records}
    linears = dict[str, bool]()
    for name in found.dense_layers():
        target = None if model is None else model.names.get(f"{name}.weight")
        linears[name] = name.rpartition(".")[2] in roles
        if model is not None and target is not None:
            linears[name] = target.removesuffix(".weight") in model.linears
    if model is not None:
        names = {name.removesuffix(".weight") for name in model.tied}
        linears |= dict.fromkeys(sorted((names & model.linears) - set(found.records)), True)
    ignored = found.layout.ignored(found.declared) or ()
    for name in (name for name, is_linear in linears.items() if is_linear):
        try:
            found.layout.scheme(name, found.declared)
        except Fp4PassError:
            continue
        if not matches(name, ignored):
            yield name


def _check_sides(found: Folder) -> None:
    """Note layers of which two files declare two schemes."""
    files = _declarations(found)
    for layer in found.records if len(files) > 1 else ():
        said = {}
        for file, declared in files.items():
            try:
                scheme = found.layout.scheme(layer, declared)
                said[file] = f"{scheme.fmt}{'a16' if scheme.weight_only else ''}"
            except Fp4PassError as error:
                said[file] = str(error)
        if len(set(said.values())) > 1:
            both = ", ".join(f"{file} {each}" for file, each in said.items())
            found.say("config-disagrees", layer, f"expected one, got {both}", next(iter(files)))


def _check_beside(found: Folder) -> None:
    """Note that a language model lacks its tokenizer, or a model of chats its template."""

    def has(*names: str) -> bool:
        return any((found.path / name).exists() for name in names)

    names = [str(each) for each in found.config.get("architectures") or ()]
    is_language = any(each.endswith(("ForCausalLM", "Generation")) for each in names)
    if not found.fact("vocab_size") or not is_language:
        return
    if not has(*TOKENIZER_FILES):
        what = f"expected tokenizer.json or another of its files, got none beside {names[0]}"
        found.say("tokenizer-missing", "tokenizer.json", what)
        return
    file = "tokenizer_config.json"
    try:
        tokenizer = read_json(found.path / file) if has(file) else {}
    except CheckpointError:
        tokenizer = {}
    files = vocabulary_files(str(tokenizer.get("tokenizer_class")))
    if files and not has(*files):
        kind = tokenizer["tokenizer_class"]
        what = f"expected {' or '.join(sorted(files))} for its {kind}, got none"
        found.say("tokenizer-missing", file, what, file)
        return
    wanted = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    said = _is_of_chats(found)
    if said and not has(*wanted) and not tokenizer.get("chat_template"):
        what = f"expected one, for {said}, got none there and none in {file}"
        found.say("chat-template-missing", wanted[0], what)


def _is_of_chats(found: Folder) -> str:
    """Return what says that a model answers chats, "" if nothing does."""
    name, card = str(found.config.get("_name_or_path") or ""), found.path / "README.md"
    if _CHAT.search(name.rstrip("/").rpartition("/")[2]):
        return f"config.json names {name}"
    head = card.read_text("utf-8", "replace")[:4000] if card.is_file() else ""
    base = re.search(r"^[ -]*base_model *:(.+)$", head.partition("\n---")[0], re.M)
    return f"README.md names {base[1].strip()}" if base and _CHAT.search(base[1].strip()) else ""
