"""fp4pass inspect A B: how far the weights of two folders are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer import Exit

from ..checkpoint.layouts import WEIGHTS, PackedLayer
from ..checkpoint.opening import is_packed, open_checkpoint
from ..checkpoint.reader import CheckpointReader
from ..core.fingerprint import dtype_name
from ..core.progress import track
from ..errors import CheckpointError, some
from ..reporting.numbers import size
from ..sources.files import find_shards, opened, read_tensor, tensor_facts
from ..sources.unread import require_float
from . import screen
from .convert import weights_size
from .outputs import relative_error


def compare(a: Path, b: Path, fail_above: float | None, as_json: bool) -> None:
    """Print how far the weights of two folders are apart: |A - B| / |A| of every layer."""
    first, second = open_weights(a), open_weights(b)
    names = _layer_names(first, second)
    both = [name for name in names if first.holds(name) and second.holds(name)]
    layers: list[dict[str, Any]] = [
        {
            "name": name,
            "formats": [first.label(name), second.label(name)],
            "difference": _difference(first.weight(name), second.weight(name), name),
        }
        for name in track(both, "compare", unit="layers")
    ]
    others = _other_tensors(first, second, set(both))
    found: dict[str, Any] = {
        "folders": [str(a), str(b)],
        "bytes": [weights_size(a), weights_size(b)],
        "layers": layers,
        **others,
    }
    failed = []
    if fail_above is not None:
        largest = [layer["name"] for layer in layers if not layer["difference"] <= fail_above]
        failed = [*largest, *found["only_in_first"], *found["only_in_second"]]
        failed += [each["name"] for each in others["other"] if not each["difference"] <= fail_above]
        found["failed"] = failed
    if as_json:
        screen.print_json(found)
    else:
        _print(found)
    if failed:
        screen.note(f"fp4pass: above {fail_above} or in one folder only: {some(failed, 20)}")
        raise Exit(screen.MISMATCH)


@dataclass(frozen=True)
class _Weights:
    """The tensors of a folder, packed or not."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    packed: CheckpointReader | None  # None for a float model

    @property
    def layers(self) -> Mapping[str, PackedLayer]:
        return {} if self.packed is None else self.packed.float_layers

    def dense_name(self, layer: str) -> str:
        """The tensor of a dense layer; stacks of experts are parameters without a module."""
        return layer if layer in self.files else f"{layer}.weight"

    def holds(self, layer: str) -> bool:
        return layer in self.layers or self.dense_name(layer) in self.files

    def label(self, layer: str) -> str:
        if layer in self.layers:
            return self.layers[layer].fmt.key
        name = self.dense_name(layer)
        with opened(self.files[name]) as file:
            return dtype_name(file.get_tensor(name).dtype)

    def weight(self, layer: str) -> Tensor:
        """In float32, in the direction in which the model has it."""
        if self.packed is not None and layer in self.layers:
            return self.layers[layer].dense(self.packed.dense(layer, torch.float32))
        return self.tensor(self.dense_name(layer)).float()

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.files, name)

    def plain(self) -> set[str]:
        return set(self.files if self.packed is None else self.packed.plain())


def open_weights(folder: Path) -> _Weights:
    """Open a folder, packed or not. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    stored = open_checkpoint(folder) if is_packed(str(folder)) else None
    if stored is None:
        require_float(folder)
    files = find_shards(folder, WEIGHTS) if stored is None else stored.files
    shapes = {name: shape for name, (shape, _) in tensor_facts(files).items()}
    return _Weights(files, shapes, stored)


def _layer_names(first: _Weights, second: _Weights) -> list[str]:
    """What is packed in one of them; of two float models all matrices."""
    if names := [*{**first.layers, **second.layers}]:
        return names
    matrices = [n for n, s in first.shapes.items() if len(s) > 1 and n.endswith(".weight")]
    return [name.removesuffix(".weight") for name in matrices]


def _other_tensors(first: _Weights, second: _Weights, compared: set[str]) -> dict[str, Any]:
    """What is not a layer: the tensors that differ, and those that only one has."""
    weights = {f"{layer}.weight" for layer in compared} | compared
    one, two = first.plain() - weights, second.plain() - weights
    # A layer that only one has is one name, whatever it has on disk.
    one |= set(first.layers) - compared
    two |= set(second.layers) - compared
    common = [
        {"name": name, "difference": _difference(first.tensor(name), second.tensor(name), name)}
        for name in sorted(one & two & set(first.files) & set(second.files))
    ]
    return {
        "other_tensors": len(common),
        "other": [each for each in common if each["difference"] != 0],
        "only_in_first": sorted(one - two),
        "only_in_second": sorted(two - one),
    }


def _difference(a: Tensor, b: Tensor, name: str) -> float:
    """`relative_error` of two tensors that are called the same."""
    if a.shape != b.shape:
        raise CheckpointError(
            f"{name} is {tuple(a.shape)} in one folder and {tuple(b.shape)} in the other. Compare "
            "checkpoints of one model."
        )
    return relative_error(a, b)


def _print(found: Mapping[str, Any]) -> None:
    lines = [
        (layer["name"], *layer["formats"], _shown(layer["difference"])) for layer in found["layers"]
    ]
    if lines:
        screen.print_table(("layer ", "A ", "B ", "difference"), lines)
    equal = found["other_tensors"] - len(found["other"])
    print(f"\nother tensors: {equal} equal, {len(found['other'])} not")
    for each in found["other"]:
        print(f"  {each['name']}: {_shown(each['difference'])}")
    for key, letter in (("only_in_first", "A"), ("only_in_second", "B")):
        if found[key]:
            print(f"only in {letter}: {some(found[key])}")
    for letter, folder, count in zip("AB", found["folders"], found["bytes"], strict=True):
        print(f"{letter} = {folder}: {size(count)} of weights")


def _shown(difference: float) -> str:
    return screen.percent(difference) if difference else "equal"
