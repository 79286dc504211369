"""Check a folder alone: its files, layers, numbers, order and declarations.

Declarations are checked also against the float model that the folder's config makes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import checkpoint
from .._compat.transformers import config_faults, meta_model, tied_weights, vocabulary_files
from .._compat.transformers_loading import names_in_model
from ..core.files import path_of
from ..core.fingerprint import fingerprint as checksum
from ..core.progress import track
from ..errors import CheckpointError, Fp4PassError, UnreadError, some
from ..nn.linear import PACKED
from ..record import scheme_name
from .folder import EXPERT, Finding, Folder, read_folder
from .numbers import check_numbers, check_order, check_sizes

# Kinds of what lies beside the weights: they say nothing of layers that were not judged.
_BESIDE = ("tokenizer-missing", "chat-template-missing")


@dataclass(frozen=True)
class FolderCheck:
    """The check of a folder: the numbers of what it holds, and all that is wrong with it.

    Attributes:
        folder: where it is.
        layout: the name of the layout of its tensors.
        layers: how many packed layers it has.
        tensors: how many tensors.
        bytes: of all tensors, which were read once.
        sums: whether they were compared with checksums, which fp4pass.json holds.
        findings: what is wrong.
        not_judged: what could not be looked at, and why.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> found = fp4pass.doctor.check_folder("out")
        >>> found.layers, found.findings
        (2, ())
    """

    folder: Path
    layout: str
    layers: int
    tensors: int
    bytes: int
    sums: bool
    findings: tuple[Finding, ...]
    not_judged: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Example:
            >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
            >>> fp4pass.doctor.check_folder("out").to_dict()["findings"]
            []
        """
        findings = [each.to_dict() for each in self.findings]
        facts = {**vars(self), "folder": str(self.folder), "findings": findings}
        return facts | {"not_judged": list(self.not_judged)}


def check_folder(directory: str | os.PathLike[str], *, progress: bool = True) -> FolderCheck:
    """Check a folder with packed weights without the model that it was made of.

    Files, parts of layers, numbers, the order of codes and what the configs declare are judged.
    Every tensor is read once, and one of them is in memory at a time.

    Args:
        directory: the folder, of any layout that fp4pass reads; it may be damaged.
        progress: as for `convert`.

    Returns:
        Its findings, and the parts of it that were not judged.

    Raises:
        CheckpointError: the folder is not there, or is not packed.
        UnreadError: nothing is wrong with it, and fp4pass does not read some of its layers.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> found = fp4pass.doctor.check_folder("out")
        >>> found.layout, found.findings
        ('compressed-tensors', ())
    """
    path = path_of(directory, "directory")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not a folder.")
    found = read_folder(path)
    model, why = build_model(found) if found.config else (None, "")
    not_judged = [f"the model that the config makes: {why}"] if why else []
    if found.unread:
        not_judged.append(f"{len(found.unread)} layers in formats that fp4pass does not read")
    with torch.no_grad():
        _check_sums(found)
        kept, wrong = {}, set[str]()
        for layer in track(list(found.records), "check", unit="layers", show=progress):
            before = len(found.findings)
            kept[layer] = check_numbers(found, layer)
            wrong |= {layer} if len(found.findings) > before else set()
        norms = _check_dense(found)
        check_sizes(found, kept, wrong)
        check_order(found, kept, norms)
    _check_config(found, model)
    if found.unread and all(each.kind in _BESIDE for each in found.findings):
        raise _unread_error(found)
    return FolderCheck(
        path,
        found.layout.name,
        len(found.records),
        len(found.tensors),
        sum(checkpoint.bytes_of(each.shape, each.kind) for each in found.tensors.values()),
        found.own is not None,
        tuple(found.findings),
        tuple(not_judged),
    )


def _check_sums(found: Folder) -> None:
    """Note tensors that are not those which fp4pass.json lists."""
    listed = {} if found.own is None else found.own["tensors"]
    for name, facts in listed.items():
        if name not in found.tensors:
            if not found.lost_files:
                what = f"expected it, as {checkpoint.MANIFEST} says, got no such tensor"
                found.say("tensor-missing", name, what, checkpoint.MANIFEST)
        elif checksum(found.tensors[name].read()) != facts:
            what = "it is not what was saved (its checksum, shape or dtype differs)"
            found.say("checksum", found.tensors[name], what)
    for name in set(found.tensors) - set(listed) if found.own is not None else ():
        what = f"expected none of this name, as {checkpoint.MANIFEST} says, got one"
        found.say("checksum", found.tensors[name], what)


def _check_dense(found: Folder) -> dict[str, Tensor]:
    """Note dense tensors and scales of a cache whose numbers are none; return the vectors."""
    packed, norms = found.packed, dict[str, Tensor]()
    for name, stored in found.tensors.items():
        if name in packed or stored.kind not in ("F64", "F32", "F16", "BF16"):
            continue
        tensor = stored.read()
        if name.endswith(checkpoint.CACHE_SCALES):
            if not ((tensor > 0) & tensor.isfinite()).all():
                got = tensor.flatten()[:4].tolist()
                found.say("cache-scale", stored, f"expected positive finite numbers, got {got}")
        elif problem := checkpoint.dense_problem(tensor, not name.endswith(("weight", "bias"))):
            found.say("dense-bad", stored, problem)
        if tensor.ndim == 1:
            norms[name] = tensor.float()
    # Where zero stands for one, all are zeros.
    vectors = {name: bool(each.any()) for name, each in norms.items() if name.endswith("weight")}
    if 2 * sum(vectors.values()) > len(vectors):
        for name in [name for name, used in vectors.items() if not used]:
            what = "expected weights, as in most other vectors, got zeros alone"
            found.say("dead", found.tensors[name], what)
    return norms


def _check_config(found: Folder, model: FloatModel | None) -> None:
    """Note what the config and the files beside say, and is not so."""
    for file, said in found.declarations.items():
        with checkpoint.well_formed(found.path / file):
            ignored = found.layout.ignored(said) or ()
            for name in (
                name for name in found.records if ignored and checkpoint.matches(name, ignored)
            ):
                pattern = next(each for each in ignored if checkpoint.matches(name, [each]))
                what = f"expected a dense layer, as {pattern!r} says, got a packed one"
                found.say("ignore-packed", name, what, file)
    for name in _missed(found, model):
        what = "expected a packed layer, as the quantization_config says, got a dense one"
        found.say("ignore-misses", name, what, "config.json")
    for key, (was, now) in checkpoint.config_changes(found.config, found.own).items():
        what = f"expected {was:.80}, as saved, got {now:.80}"
        found.say("config-changed", key, what, "config.json")
    with checkpoint.well_formed(found.path / "config.json"):
        for kind, check in CHECKS.items():
            for where, what, file in check(found):
                found.say(kind, where, what, file)
        if model is not None and not any(each.kind == "names" for each in found.findings):
            for where, what, file in list(check_model(found, model)):
                found.say("config-model", where, what, file)


def _missed(found: Folder, model: FloatModel | None) -> Iterator[str]:
    """Yield the dense linear layers that the config declares packed."""
    if found.declared is None or not found.layout.engines or found.layout.stacks:
        return
    # Without its model, those that are packed elsewhere; with it, those tied to an embedding, too.
    roles = {name.rpartition(".")[2] for name in found.records}
    linears = [name for name in found.dense_layers() if name.rpartition(".")[2] in roles]
    if model is not None:
        targets = {name: model.names.get(f"{name}.weight") for name in found.dense_layers()}
        linears = [
            name
            for name, target in targets.items()
            if (name in linears if target is None else target[: -len(".weight")] in model.linears)
        ]
        tied = {name.removesuffix(".weight") for name in model.tied}
        linears += sorted((tied & model.linears) - set(found.records) - set(linears))
    ignored = found.layout.ignored(found.declared) or ()
    for name in linears:
        try:
            found.layout.scheme(name, found.declared)
        except Fp4PassError:
            continue
        if not checkpoint.matches(name, ignored):
            yield name


def _unread_error(found: Folder) -> UnreadError:
    """Return the error for a folder of which some layers were not judged and nothing is wrong."""
    listed = [f"{layer} ({', '.join(sorted(names))})" for layer, names in found.unread.items()]
    count = len(listed)
    return UnreadError(
        f"{found.path}: fp4pass does not read {count} of its quantized layers: "
        f"{some(listed)}. They were not judged. Check them with the library that wrote the folder."
    )


# Words in the names of models that answer chats.
_CHAT = re.compile(r"(?:^|[-_./ ])(instruct|chat|it|assistant|thinking|sft|dpo)(?:$|[-_./ ])", re.I)
_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
# The names in configs of the number of layers that predict further tokens, and in tensors.
_PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_PREDICTING = re.compile(r"(^|\.)(mtp|nextn|multi_token)")

# The results of a check: the place, the text and the file of each.
Faults = Iterator[tuple[str, str, str]]


class FloatModel(NamedTuple):
    """The float model of a config, without memory."""

    shapes: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    tied: frozenset[str]  # names that it has of other tensors
    names: Mapping[str, str]  # those in the model of the tensors of the folder


def build_model(found: Folder) -> tuple[FloatModel | None, str]:
    """Return the float model of a folder's config, or why there is none."""
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
        model = meta_model(checkpoint.model_class(config), config)
        names = names_in_model(model, _float_shapes(found), merged=True)
    except config_faults() as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"transformers {transformers.__version__} makes no model of it: {line:.200}"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    linears = frozenset(n for n, each in model.named_modules() if isinstance(each, nn.Linear))
    return FloatModel(shapes, linears, frozenset(tied_weights(model)), names), ""


def _float_shapes(found: Folder) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that the tensors of a folder have in the float model's."""
    packed = found.packed | found.broken
    plain = {n: each.shape for n, each in found.tensors.items() if n not in packed}
    result = {n: shape for n, shape in plain.items() if not n.endswith(checkpoint.CACHE_SCALES)}
    for layer, record in found.records.items():
        result[layer if record.is_stacked else f"{layer}.weight"] = record.dense_shape
    renamed = (found.own or {}).get("renamed") or {}
    return {renamed.get(name, name): shape for name, shape in result.items()}


def check_model(found: Folder, model: FloatModel) -> Faults:
    """Yield tensors that the folder lacks, or has in other shapes, by the model of its config."""
    held, own, file = _float_shapes(found), found.own or {}, "config.json"
    sources: dict[str, list[str]] = {}
    for name in held:
        sources.setdefault(model.names.get(name, name), []).append(name)
    # Parts that are wrong otherwise are named already.
    structure = {"tensor-missing", "companion-missing", "orphan", "shape", "dtype", "block-size"}
    named = structure & {each.kind for each in found.findings}
    renamed = own.get("renamed") or {}
    # Tensors with other names on disk, and those that lie in pieces.
    absent = {renamed.get(name, name) for name in own.get("joined") or {}} | model.tied
    parents = {name.rpartition(".")[0] for name in own.get("aliases") or {}}
    parents |= {match[1] for each in held if (match := EXPERT.match(each))}
    for name, shape in model.shapes.items() if not found.lost_files else ():
        names, last = sources.get(name, []), name.rpartition(".")[2]
        # Else a tensor is a part of what transformers makes of it.
        if len(names) == 1 and names[0].rpartition(".")[2] == last and held[names[0]] != shape:
            yield names[0], f"expected {list(shape)}, got {list(held[names[0]])}", file
        elif len(names) > 1 and not (named or found.unread):
            # A stack, which transformers makes of its experts; some have none on disk.
            size = sum(math.prod(held[each]) for each in names)
            experts = len({match[2] for each in names if (match := EXPERT.match(each))})
            wanted = math.prod(shape[1:] if experts else shape) * (experts or 1)
            if size != wanted:
                yield names[0], f"expected {wanted} numbers, got {size}", file
        elif not (names or named or found.unread or name in absent):
            if name.rpartition(".")[0] not in parents:
                yield name, "expected this tensor, got none", file
    forms = {re.sub(r"\d+", "*", name) for name in model.shapes}
    for name in held:
        target = model.names.get(name, name)
        if target not in model.shapes and re.sub(r"\d+", "*", target) in forms:
            if not (_predicted(found) and _is_of_prediction(found, name)):
                yield name, "expected no such layer, got it", file


def _predicted(found: Folder) -> dict[str, int]:
    """Return what a config says of layers that predict further tokens, by its keys."""
    said = {key: found.fact(key) for key in _PREDICTED}
    return {key: count for key, count in said.items() if type(count) is int and count > 0}


def _is_of_prediction(found: Folder, name: str) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens."""
    count = found.fact("num_hidden_layers")
    numbers = map(int, re.findall(r"(?:^|\.)layers\.(\d+)\.", name))
    is_beyond = type(count) is int and any(number >= count for number in numbers)
    return is_beyond or _PREDICTING.search(name) is not None


def _prediction_absent(found: Folder) -> Faults:
    for key, count in list(_predicted(found).items())[:1]:
        if not any(_is_of_prediction(found, name) for name in found.tensors):
            what = f"expected the tensors of {count} layers, as {key} says, got none"
            yield key, what, "config.json"


def _disagrees(found: Folder) -> Faults:
    """Yield layers whose files declare different schemes."""
    for layer in found.records if len(found.declarations) > 1 else ():
        said = {}
        for file, declared in found.declarations.items():
            try:
                scheme = found.layout.scheme(layer, declared)
                said[file] = scheme_name(scheme.fmt, scheme.weight_only, scheme.inputs)
            except Fp4PassError as error:
                said[file] = str(error)
        if len(set(said.values())) > 1:
            both = ", ".join(f"{file} {each}" for file, each in said.items())
            yield layer, f"expected one, got {both}", next(iter(said))


def _tied_head(found: Folder) -> Faults:
    is_tied = found.fact("tie_word_embeddings") is True
    for name in filter(found.records.__contains__, _HEADS if is_tied else ()):
        got = found.parts[name][PACKED].name
        what = f"expected no weight, for tie_word_embeddings is true, got {got}"
        yield name, what, "config.json"


def _has_text(found: Folder) -> bool:
    names = [str(each) for each in found.config.get("architectures") or ()]
    is_language = any(each.endswith(("ForCausalLM", "Generation")) for each in names)
    return is_language and bool(found.fact("vocab_size"))


def _tokenizer_config(found: Folder) -> Mapping[str, Any]:
    try:
        return checkpoint.read_json(found.path / "tokenizer_config.json")
    except CheckpointError:
        return {}


def _tokenizer_missing(found: Folder) -> Faults:
    kind = str(_tokenizer_config(found).get("tokenizer_class"))
    # By its class, else any will do.
    for files in (checkpoint.TOKENIZER_FILES, vocabulary_files(kind)) if _has_text(found) else ():
        if files and not any((found.path / name).exists() for name in files):
            yield min(files), f"expected {' or '.join(sorted(files))}, got none", ""
            return


def _template_missing(found: Folder) -> Faults:
    """Yield the template that a model of chats, by its name or its card, lacks."""
    name, card = str(found.config.get("_name_or_path") or ""), found.path / "README.md"
    head = card.read_text("utf-8", "replace")[:4000] if card.is_file() else ""
    base = re.search(r"^[ -]*base_model *:(.+)$", head.partition("\n---")[0], re.M)
    said = next(filter(_CHAT.search, (name.rstrip("/"), base[1].strip() if base else "")), "")
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    there = _tokenizer_config(found).get("chat_template")
    is_there = there or any((found.path / each).exists() for each in files)
    if said and _has_text(found) and not is_there and not any(_tokenizer_missing(found)):
        yield files[0], f"expected one, for the model is of {said}, got none", ""


CHECKS: dict[str, Callable[[Folder], Faults]] = {
    "config-disagrees": _disagrees,
    "tied-head": _tied_head,
    "mtp-absent": _prediction_absent,
    "tokenizer-missing": _tokenizer_missing,
    "chat-template-missing": _template_missing,
}
