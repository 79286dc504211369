"""The layout of compressed-tensors with a transform_config: layers whose inputs are rotated.

vLLM and compressed-tensors' own `apply_transform_config` rotate such inputs, by the same Hadamard
matrices as fp4pass. transformers (5.23) reads the weights and ignores the transform_config without
a word, which gives wrong outputs; so this layout is written only where it is asked for by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...config import LinearConfig
from ...errors import CheckpointError
from ...kernels.rotate.naive import ROTATIONS
from .base import Shapes, register_layout
from .compressed_tensors import CompressedTensors, transform_groups
from .layer import PackedLayer, Scheme
from .patterns import matches

# What is applied to weights lies in the files already.
_OFFLINE = ("weight_input", "weight_output")

# Matrices that are no linear layers, by the usual names.
_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")


@register_layout
class HadamardCompressedTensors(CompressedTensors):
    """`CompressedTensors`, and in config.json which inputs are rotated."""

    name = "compressed-tensors-hadamard"
    fallback = ""

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares transforms."""
        declares = declared.get("quant_method") == CompressedTensors.name
        return declares and bool(transform_groups(declared))

    def config_problem(self, config: LinearConfig) -> str:
        """Return what this layout has no place for in a config, "" if it holds such layers."""
        if config.folded or config.output_rotation:
            return f"{config.fmt} with a rotation that is folded into the layer before"
        if config.rotation and not config.weight_only and config.format.has_global_scale:
            # vLLM takes the matrix for these from the file, where it is not.
            return f"4-bit inputs in {config.fmt} that are rotated"
        return super().config_problem(dataclasses.replace(config, rotation=0))

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config with a transform for each size of a rotation."""
        sizes: dict[int, list[str]] = {}
        for name, layer in layers.items():
            sizes.setdefault(layer.config.rotation, []).append(name)
        groups = {}
        for size, names in sizes.items():
            if size:
                where = {"targets": names if len(sizes) > 1 else ["Linear"], "ignore": list(ignore)}
                apply = [
                    {**where, "location": "input"},
                    {**where, "location": "weight_input", "inverse": True},
                ]
                groups[f"rotation_{size}"] = {"type": "hadamard", "head_dim": size, "apply": apply}
        transforms = {"transform_config": {"config_groups": groups}} if groups else {}
        return {**super().config(layers, ignore), **transforms}

    def read(
        self, declared: Mapping[str, Any], shapes: Shapes, dtype: str
    ) -> dict[str, PackedLayer]:
        """Return the packed layers; raise CheckpointError for transforms not applied here too."""
        matrices = [name for name, (shape, _) in shapes.items() if len(shape) == 2]
        dense = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
        dense = [name for name in dense if not _EMBEDDING.search(name)]
        dense += [name for name in declared.get("ignore") or () if not name.startswith("re:")]
        for name, group, apply in _online(declared):
            _require_applied(f"transform_config: {name!r}", group, apply, dense)
        return super().read(declared, shapes, dtype)

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a layer, and the rotation of its input."""
        sizes: list[int] = [
            group["head_dim"] for _, group, apply in _online(declared) if _applies(apply, name)
        ]
        if len(sizes) > 1:
            raise CheckpointError(f"{name}: expected one transform of its input, got {sizes}.")
        return super().scheme(name, declared)._replace(rotation=sizes[0] if sizes else 0)


def _online(
    declared: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the name, group and place of each transform that is applied while the model runs."""
    for name, group in transform_groups(declared).items():
        for apply in group.get("apply") or ():
            if apply.get("location") not in _OFFLINE:
                yield name, group, apply


def _applies(apply: Mapping[str, Any], name: str) -> bool:
    """Whether a transform is applied to a layer."""
    return matches(name, apply.get("targets", ())) and not matches(name, apply.get("ignore", ()))


def _require_applied(
    where: str, group: Mapping[str, Any], apply: Mapping[str, Any], dense: Sequence[str]
) -> None:
    """Raise CheckpointError for a transform that fp4pass does not apply."""
    kind = f"randomized {group.get('type')}" if group.get("randomize") else group.get("type")
    sizes = ", ".join(map(str, ROTATIONS[1:]))
    for what, known, found in (
        ("location", "input", apply.get("location")),
        ("type", "hadamard", kind),
        ("head_dim", sizes, group.get("head_dim")),
        ("targets", "packed layers", next((each for each in dense if _applies(apply, each)), None)),
    ):
        fits = found is None if what == "targets" else str(found) in known.split(", ")
        if not fits:
            raise CheckpointError(
                f"{where}: {what}: expected {known}, got {found}. fp4pass does not apply this "
                "transform; load the folder with the library that wrote it."
            )
