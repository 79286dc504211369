"""Write a folder again with what can be mended without the model that it was made of."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.layouts import side_files
from ..checkpoint.writer import ShardWriter, bytes_of
from ..core.atomic import replacing
from ..core.fingerprint import fingerprint
from ..core.paths import path_of
from ..core.progress import shown
from ..errors import CheckpointError, require_flags, some
from ..sources.beside import copy_beside
from ..sources.files import MANIFEST, write_json, write_manifest
from .check import Checked, FolderCheck, look_at
from .plan import Plan, make_plan

# Of the files of weights; as much is held in memory.
_SHARD = "2GB"

# Keys of fp4pass.json that are written anew.
_RENEWED = ("version", "fp4pass", "torch")


@dataclass(frozen=True)
class Repair:
    """The repair of a folder: its state before and after.

    Attributes:
        before: what was wrong with it.
        after: what is wrong with the new folder, None if none was written.
        mended: a line for each thing that was done.
        refused: why no folder was written, "" if it was.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> fp4pass.checking.repair_folder("out", "mended").mended
        ()
    """

    before: FolderCheck
    after: FolderCheck | None
    mended: tuple[str, ...] = ()
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Example:
            >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
            >>> fp4pass.checking.repair_folder("out", "mended").to_dict()["after"] is None
            True
        """
        after = None if self.after is None else self.after.to_dict()
        return {"mended": list(self.mended), "refused": self.refused, "after": after}


def repair_folder(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> Repair:
    """Write a new folder with all that can be mended of one without its model, and check it.

    Lists of dense layers, the index, the quantization_config, names, dtypes and directions of
    scales are set right; layers that engines fuse are quantized to the larger of their global
    scales. All that needs the model, or another copy of the folder, stays as it is.

    Args:
        directory: the folder; it is not changed.
        output: the folder to write.
        overwrite: replace the checkpoint in it.
        progress: as for `convert`.

    Returns:
        The checks before and after, and all that was done. `after` is None where nothing can be
        written or mended.

    Raises:
        CheckpointError: the folder is not there or not packed, or the output is in the way.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> fp4pass.checking.repair_folder("out", "mended").refused
        'nothing is wrong with it'
    """
    require_flags(overwrite=overwrite, progress=progress)
    folder, target = path_of(directory, "directory"), path_of(output, "output")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder.")
    with shown("repair", progress):
        checked = look_at(folder)
        before = checked.result
        if refused := _refusal(checked):
            return Repair(before, None, (), refused)
        plan = make_plan(checked)
        if not plan.mended:
            return Repair(before, None, (), "nothing of it can be mended without the model")
        marks = ("config.json", MANIFEST, *side_files())
        with replacing(target, overwrite, marks) as new:
            _write(checked, plan, new)
        after = look_at(target).result
    left = tuple(each for each in plan.kept if each not in after.findings)
    after = dataclasses.replace(after, findings=(*after.findings, *left))
    return Repair(before, after, tuple(plan.mended))


def _refusal(checked: Checked) -> str:
    """Return why a folder cannot be written again, or ""."""
    if not checked.findings:
        return "nothing is wrong with it"
    found = checked.found
    damaged = [
        each.where
        for each in checked.findings
        if each.kind == "file-damaged"
        or (each.kind == "json-damaged" and not each.where.endswith(".index.json"))
    ]
    if damaged:
        return f"{some(damaged)} cannot be read: copy the folder again"
    lost = [name for name in found.index or () if name not in found.tensors]
    lost += [each.where for each in checked.findings if each.kind == "tensor-missing"]
    if found.index is None:
        lost += [each.where for each in checked.findings if each.kind == "file-missing"]
    if lost:
        return f"tensors are lost ({some(list(dict.fromkeys(lost)))}): copy the folder again"
    return ""


@torch.no_grad()
def _write(checked: Checked, plan: Plan, new: Path) -> None:
    found = checked.found
    sums = dict((found.own or {}).get("tensors") or {})
    written = {
        *(path.name for path in found.folder.glob("*.safetensors")),
        *(path.name for path in found.folder.glob("*.safetensors.index.json")),
        *("config.json", MANIFEST, *side_files()),
    }
    copy_beside(found.folder, new, written)
    if plan.config:
        write_json(new / "config.json", plan.config)
    for name, data in plan.sides.items():
        write_json(new / name, data)
    shards = ShardWriter(new, found.layout.weights, bytes_of(_SHARD))
    names = dict.fromkeys(name for name in (*found.tensors, *plan.tensors))
    for name in names:
        if name in plan.dropped:
            sums.pop(name, None)
            continue
        make = plan.tensors.get(name)
        tensor = found.tensors[name].read() if make is None else make().contiguous()
        if make is not None:
            sums[name] = fingerprint(tensor)
        shards.add(name.removeprefix(plan.prefix), tensor)
    shards.close()
    if found.own is None:
        return
    if plan.prefix or set(sums) != set(found.own.get("tensors") or {}):
        plan.mended.append(f"{MANIFEST} is left out: it was of other tensors")
        return
    facts = {key: each for key, each in found.own.items() if key not in _RENEWED}
    write_manifest(new, {**facts, "tensors": dict(sorted(sums.items())), "config": plan.config})
