"""Check a folder alone: its files, layers, numbers, order and declarations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CACHE_SCALES, MANIFEST, dense_problem, well_formed
from ..core import checksum, path_of, track
from ..errors import CheckpointError, UnreadError, some
from .config import build_model, check_config, check_ignored, check_model
from .folder import Folder, read_folder
from .kinds import Finding
from .numbers import Statistics, check_fused, check_missing_inputs, check_numbers, check_sizes
from .order import check_order

# Kinds of what lies beside the weights: they say nothing of layers that were not judged.
_BESIDE = ("tokenizer-missing", "chat-template-missing")

# Kinds that no folder may have, whatever its float model is like.
_NEVER = (
    *("checksum", "scale-nan", "codes-nan", "global-bad", "input-bad", "input-missing"),
    *("dense-bad", "fused-scales", "fused-schemes", "ignore-packed"),
)


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
        return mismatches(self.findings)

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
    with torch.no_grad():
        found = read_folder(folder)
        model, why = build_model(found)
        not_judged = [f"the model that the config makes: {why}"] if why and found.config else []
        if found.unread:
            count = len(found.unread)
            not_judged.append(f"{count} layers in formats that fp4pass does not read")
        _check_sums(found)
        kept, wrong = _check_layers(found, progress=progress)
        norms = _check_dense(found)
        check_sizes(found, kept, wrong)
        check_order(found, kept, norms)
        with well_formed(folder / "config.json"):
            check_config(found, model)
        if not any(each.kind == "names" for each in found.findings):
            check_model(found, model)
    if found.unread and all(each.kind in _BESIDE for each in found.findings):
        raise _unread_error(found)
    return FolderCheck(
        folder,
        found.layout.name,
        len(found.records),
        len(found.tensors),
        sum(each.nbytes for each in found.tensors.values()),
        found.own is not None,
        tuple(found.findings),
        tuple(not_judged),
    )


def check_basics(directory: Path, *, whole: bool) -> dict[str, str]:
    """Return what no folder may have, whatever its float model is like, as `mismatches` has it.

    whole: compare checksums, too; else codes are not read.
    """
    with torch.no_grad():
        found = read_folder(directory)
        if whole:
            _check_sums(found)
        kept, wrong = _check_layers(found, only_scales=True)
        _check_dense(found)
        check_fused(found, kept, wrong | check_missing_inputs(found))
        check_ignored(found)
    return mismatches(each for each in found.findings if each.kind in _NEVER)


def mismatches(findings: Any) -> dict[str, str]:
    """Return findings as text, by the tensor, the layer or the file."""
    found: dict[str, str] = {}
    for each in findings:
        text = str(each).removeprefix(f"{each.where}: ")
        found[each.where] = f"{found[each.where]}; {text}" if each.where in found else text
    return found


def _check_layers(
    found: Folder, only_scales: bool = False, progress: bool = True
) -> tuple[dict[str, Statistics], set[str]]:
    """Note what is wrong with the numbers of layers; return their statistics and the wrong ones."""
    kept, wrong = dict[str, Statistics](), set[str]()
    for layer in track(list(found.records), "check", unit="layers", show=progress):
        before = len(found.findings)
        kept[layer] = check_numbers(found, layer, only_scales)
        wrong |= {layer} if len(found.findings) > before else set()
    return kept, wrong


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


def _unread_error(found: Folder) -> UnreadError:
    """Return the error for a folder of which some layers were not judged and nothing is wrong."""
    listed = [f"{layer} ({', '.join(sorted(names))})" for layer, names in found.unread.items()]
    count = len(listed)
    return UnreadError(
        f"{found.path}: fp4pass does not read {count} of its quantized layers: "
        f"{some(listed)}. They were not judged. Check them with the library that wrote the folder."
    )
