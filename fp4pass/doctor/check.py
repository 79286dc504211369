"""Check a folder alone: its files, layers, numbers, order and declarations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checks import dense_problem
from ..checkpoint.layouts import CACHE_SCALES
from ..checkpoint.source_files import MANIFEST
from ..core.files import path_of
from ..core.fingerprint import fingerprint
from ..core.progress import current, shown
from ..errors import CheckpointError
from .declared import check_declared
from .kinds import Finding
from .model import build_model, check_model
from .numbers import LayerNumbers, Statistics
from .order import check_order
from .sizes import check_sizes
from .stored import Stored
from .structure import Layers, check_structure, find_layers, require_some
from .survey import Survey, survey

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

    @property
    def mismatches(self) -> dict[str, str]:
        """The findings as text, by the tensor, the layer or the file."""
        found: dict[str, str] = {}
        for each in self.findings:
            text = str(each).removeprefix(f"{each.where}: ")
            found[each.where] = f"{found[each.where]}; {text}" if each.where in found else text
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Example:
            >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
            >>> fp4pass.doctor.check_folder("out").to_dict()["mismatches"]
            {}
        """
        findings = [each.to_dict() for each in self.findings]
        own = {**vars(self), "folder": str(self.folder), "findings": findings}
        return own | {"not_judged": list(self.not_judged), "mismatches": self.mismatches}


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
    folder = path_of(directory, "directory")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder.")
    with shown("check", progress), torch.no_grad():
        found = survey(folder)
        layers = find_layers(found)
        model, why = build_model(found, layers)
        not_judged = []
        if why and found.config:
            not_judged.append(f"the model that the config makes: {why}")
        if layers.unread:
            not_judged.append(f"{len(layers.unread)} layers in formats that fp4pass does not read")
        size = sum(each.nbytes for each in found.tensors.values())
        current().expect(size, "bytes")
        findings = [*found.findings, *check_structure(found, layers), *_sums(found)]
        findings += _numbers(found, layers)
        findings += check_declared(found, layers, model)
        if not any(each.kind == "names" for each in findings):
            findings += check_model(found, layers, model)
    if all(each.kind in _BESIDE for each in findings):
        require_some(found, layers)
    return FolderCheck(
        folder,
        found.layout.name,
        len(layers.records),
        len(found.tensors),
        size,
        found.own is not None,
        tuple(findings),
        tuple(not_judged),
    )


def _numbers(found: Survey, layers: Layers) -> Iterator[Finding]:
    """Read all tensors once, and yield what is wrong with their numbers, sizes and order."""
    kept: dict[str, Statistics] = {}
    norms: dict[str, Tensor] = {}
    wrong: set[str] = set()
    for layer, record in layers.records.items():
        numbers = LayerNumbers(found, record, layers.parts[layer])
        kept[layer] = numbers.kept
        yield from numbers.findings
        wrong |= {layer} if numbers.findings else set()
        size = sum(each.nbytes for each in layers.parts[layer].values())
        current().step(size)
    yield from _dense(found, layers, norms)
    # Where zero stands for one, all are zeros.
    vectors = {name: bool(each.any()) for name, each in norms.items() if name.endswith("weight")}
    if 2 * sum(vectors.values()) > len(vectors):
        for name in [name for name, used in vectors.items() if not used]:
            what = "expected weights, as in most other vectors, got zeros alone"
            yield Finding("dead", name, found.file(name), what)
    yield from check_sizes(found, layers, kept, wrong)
    yield from check_order(found, layers, kept, norms)


def _sums(found: Survey) -> Iterator[Finding]:
    """Yield tensors that are not those which fp4pass.json lists."""
    if found.own is None:
        return
    listed = found.own.get("tensors") or {}
    for name, facts in listed.items():
        tensor = found.tensors.get(name)
        if tensor is None:
            if not any(each.kind in ("file-missing", "file-damaged") for each in found.findings):
                what = f"expected it, as {MANIFEST} says, got no such tensor"
                yield Finding("tensor-missing", name, MANIFEST, what)
        elif fingerprint(tensor.read()) != facts:
            what = "it is not what was saved (its checksum, shape or dtype differs)"
            yield Finding("checksum", name, tensor.path.name, what)
    for name in found.tensors:
        if name not in listed:
            what = f"expected none of this name, as {MANIFEST} says, got one"
            yield Finding("checksum", name, found.file(name), what)


def _dense(found: Survey, layers: Layers, norms: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield dense tensors and scales of a cache whose numbers are none; keep the vectors."""
    packed = {each.name for held in layers.parts.values() for each in held.values()}
    for name, stored in found.tensors.items():
        if name in packed:
            continue
        is_cache = name.endswith(CACHE_SCALES)
        bad = ""
        for tensor in _parts(stored):
            if is_cache:
                number = tensor.float()
                if not ((number > 0) & number.isfinite()).all():
                    bad = f"expected positive finite numbers, got {number.flatten()[:4].tolist()}"
            else:
                bad = bad or dense_problem(tensor, not name.endswith(("weight", "bias")))
            if len(stored.shape) == 1 and tensor.is_floating_point() and tensor.itemsize > 1:
                norms[name] = tensor.float()
        if bad:
            yield Finding("cache-scale" if is_cache else "dense-bad", name, stored.path.name, bad)
        current().step(stored.nbytes)


def _parts(stored: Stored) -> Iterator[Tensor]:
    if len(stored.shape) < 2:
        yield stored.read()
        return
    for _, part in stored.rows(stored.shape[-1]):
        yield part
