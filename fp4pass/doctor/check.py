"""Check a folder alone: its files, layers, numbers, order and declarations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CACHE_SCALES, MANIFEST, config_changes, dense_problem, matches, well_formed
from ..core.files import path_of
from ..core.fingerprint import fingerprint as checksum
from ..core.progress import track
from ..errors import CheckpointError, Fp4PassError, UnreadError, some
from .config import CHECKS, FloatModel, build_model, check_model
from .folder import Finding, Folder, read_folder
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
        sum(each.nbytes for each in found.tensors.values()),
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
                what = f"expected it, as {MANIFEST} says, got no such tensor"
                found.say("tensor-missing", name, what, MANIFEST)
        elif checksum(found.tensors[name].read()) != facts:
            what = "it is not what was saved (its checksum, shape or dtype differs)"
            found.say("checksum", found.tensors[name], what)
    for name in set(found.tensors) - set(listed) if found.own is not None else ():
        what = f"expected none of this name, as {MANIFEST} says, got one"
        found.say("checksum", found.tensors[name], what)


def _check_dense(found: Folder) -> dict[str, Tensor]:
    """Note dense tensors and scales of a cache whose numbers are none; return the vectors."""
    packed, norms = found.packed, dict[str, Tensor]()
    for name, stored in found.tensors.items():
        if name in packed or stored.kind not in ("F64", "F32", "F16", "BF16"):
            continue
        tensor = stored.read()
        if name.endswith(CACHE_SCALES):
            if not ((tensor > 0) & tensor.isfinite()).all():
                got = tensor.flatten()[:4].tolist()
                found.say("cache-scale", stored, f"expected positive finite numbers, got {got}")
        elif problem := dense_problem(tensor, not name.endswith(("weight", "bias"))):
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
        with well_formed(found.path / file):
            ignored = found.layout.ignored(said) or ()
            for name in (name for name in found.records if ignored and matches(name, ignored)):
                pattern = next(each for each in ignored if matches(name, [each]))
                what = f"expected a dense layer, as {pattern!r} says, got a packed one"
                found.say("ignore-packed", name, what, file)
    for name in _missed(found, model):
        what = "expected a packed layer, as the quantization_config says, got a dense one"
        found.say("ignore-misses", name, what, "config.json")
    for key, (was, now) in config_changes(found.config, found.own).items():
        what = f"expected {was:.80}, as saved, got {now:.80}"
        found.say("config-changed", key, what, "config.json")
    with well_formed(found.path / "config.json"):
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
        if not matches(name, ignored):
            yield name


def _unread_error(found: Folder) -> UnreadError:
    """Return the error for a folder of which some layers were not judged and nothing is wrong."""
    listed = [f"{layer} ({', '.join(sorted(names))})" for layer, names in found.unread.items()]
    count = len(listed)
    return UnreadError(
        f"{found.path}: fp4pass does not read {count} of its quantized layers: "
        f"{some(listed)}. They were not judged. Check them with the library that wrote the folder."
    )
