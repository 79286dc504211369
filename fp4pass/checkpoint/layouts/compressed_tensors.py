"""The layout of compressed-tensors, which llm-compressor writes and serving engines load."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

from ...core.formats import WHOLE
from ...errors import CheckpointError, UnreadError, expected, some
from ...kernels.rotate.naive import ROTATIONS
from ...nn.linear import INPUT_GLOBAL, PACKED
from ...record.config import Inputs, LinearConfig
from ..source_files import Shapes
from .base import CacheLayout, Layout, register_layout
from .layer import PackedLayer, Scheme, distance, fused_names, matches

# The values of arguments that a config does not give.
_UNSAID = {"symmetric": True, "dynamic": False}


class CtScheme(NamedTuple):
    """The words of a group of compressed-tensors for a format; arguments as far as they differ."""

    format: str  # its name for the codes and scales on disk
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]
    static: Mapping[str, Any] | None = None  # those of inputs that have one stored scale


_FP4, _FP8 = {"num_bits": 4, "type": "float"}, {"num_bits": 8, "type": "float"}
_NVFP4 = {
    **_FP4,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}
_GROUPS = {
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
_OF_TOKENS = {**_FP8, "strategy": "token", "dynamic": True}
_OF_TENSOR = {**_FP8, "strategy": "tensor"}

# By the keys of formats.
SCHEMES: dict[str, CtScheme] = {
    "nvfp4": CtScheme("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}),
    "mxfp4": CtScheme(
        "mxfp4-pack-quantized", {**_FP4, **_GROUPS}, {**_FP4, **_GROUPS, "dynamic": True}
    ),
    "fp8": CtScheme(
        "float-quantized", {**_FP8, "strategy": "channel"}, _OF_TOKENS, static=_OF_TENSOR
    ),
    "fp8_block": CtScheme(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8_tensor": CtScheme("float-quantized", _OF_TENSOR, _OF_TOKENS, static=_OF_TENSOR),
    "mxfp8": CtScheme("mxfp8-quantized", {**_FP8, **_GROUPS}, {**_FP8, **_GROUPS, "dynamic": True}),
}


def group_args(
    fmt: str, weight_only: bool, static_inputs: bool = False, of_inputs: str | None = None
) -> dict[str, Any]:
    """Return a group of config_groups, but for its targets."""
    scheme = SCHEMES[fmt]
    inputs = None
    if not weight_only:
        inputs = scheme.static if static_inputs else SCHEMES[of_inputs or fmt].inputs
    return {
        "format": scheme.format,
        "weights": {**_UNSAID, **scheme.weights},
        "input_activations": None if inputs is None else {**_UNSAID, **inputs},
        "output_activations": None,
    }


def read_scheme(group: Mapping[str, Any], whole: str) -> Scheme:
    """Return what a group says, or raise ValueError; whole: the format of the folder."""
    label = str(group.get("format") or whole)
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    labelled = {key: each for key, each in SCHEMES.items() if each.format == label}
    found = [key for key, each in labelled.items() if _says(weights, each.weights)]
    if len(found) != 1:
        known = ", ".join(dict.fromkeys(each.format for each in SCHEMES.values()))
        what = f"format {label!r} and weights {dict(weights)}"
        raise ValueError(
            expected("a group", f"a format of {known} and symmetric floats of its kind", what)
        )
    scheme, block = SCHEMES[found[0]], weights.get("group_size")
    if inputs is None:
        return Scheme(found[0], True, block)
    other_block = "group_size" in scheme.inputs and inputs.get("group_size") not in (None, block)
    if _says(inputs, scheme.inputs) and not (other_block and scheme.inputs["num_bits"] == 4):
        return Scheme(found[0], False, block)
    if scheme.static is not None and _says(inputs, scheme.static):
        return Scheme(found[0], False, block, static_inputs=True)
    for other in CompressedTensors.inputs.get(found[0], ()):
        if _says(inputs, SCHEMES[other].inputs):
            return Scheme(found[0], False, block, inputs=cast(Inputs, other))
    known = "inputs in the format of the weights, in FP8 for mxfp4, or in floating point"
    raise ValueError(expected("a group", known, dict(inputs)))


def _says(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether arguments, as far as given, are those wanted."""
    wanted = {**_UNSAID, **wanted}
    keys: tuple[str, ...] = ("num_bits", "type", "symmetric", "strategy", "block_structure")
    # In 4 bits other blocks are read, and inputs whatever they say of their scales.
    keys += ("dynamic", "group_size") if wanted["num_bits"] == 8 else ()
    return all(_plain(given.get(key)) in (None, _plain(wanted.get(key))) for key in keys)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# The `kv_cache_scheme` of a cache in E4M3, but for its strategy.
_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}

# The layers of the experts of a mixture.
_EXPERTS = r"re:.*\.experts\.\d+\..*"


@register_layout
class CompressedTensors(Layout):
    """`weight_packed`, `weight_scale`, `weight_global_scale`, in config_groups with targets."""

    name = "compressed-tensors"
    native_parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", INPUT_GLOBAL: "input_scale"}
    formats = tuple(SCHEMES)
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = {"mxfp4": ("fp8", "fp8_block")}
    fallback = "fp4pass"
    # No engine reads a cache in blocks from this layout, and vLLM refuses to start.
    cache = CacheLayout(
        {
            "fp8": {**_CACHE, "strategy": "attn_head"},
            "fp8_tensor": {**_CACHE, "strategy": "tensor"},
            "nvfp4": None,
        }
    )

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares this layout, without transforms."""
        declares = declared.get("quant_method") == CompressedTensors.name
        return declares and not transform_groups(declared)

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config, one group for each scheme."""
        schemes: dict[tuple[str, bool, bool, str | None], list[str]] = {}
        for name, layer in layers.items():
            config = layer.config
            scheme = (
                layer.fmt.key,
                config.input_format is None,
                layer.static_inputs,
                config.inputs,
            )
            schemes.setdefault(scheme, []).append(name)
        # Engines take an output embedding for dense unless a target has its name. Whatever is not
        # in a stack of layers is named, which changes nothing for other linear layers.
        outer = [name for name in layers if not any(map(str.isdigit, name.split(".")))]
        targets = _targets(schemes.values()) if len(schemes) > 1 else [[*outer, "Linear"]]
        groups = {
            f"group_{i}": {"targets": names, **group_args(*scheme)}
            for i, (scheme, names) in enumerate(zip(schemes, targets, strict=True))
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": CompressedTensors.name,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
            "global_compression_ratio": None,
            # Engines keep a cache in floating point.
            "kv_cache_scheme": None,
        }

    @staticmethod
    def declared_weights(layer: PackedLayer) -> dict[str, Any]:
        """Return what a group says of the weights of a layer."""
        args = group_args(layer.fmt.key, weight_only=True)
        return {key: args[key] for key in ("format", "weights")}

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        if layer.fmt.rows == WHOLE:
            return (1,), (), layer.scale_shape
        return layer.scale_shape, layer.scale_shape[:1]

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme whose targets match a layer best."""
        group = group_of(name, declared)
        if group is None:
            raise CheckpointError(
                f"{name}: no config_groups of the quantization_config has it among its targets. "
                "The config is not that of these weights."
            )
        try:
            return read_scheme(group, str(declared.get("format")))
        except ValueError as error:
            raise UnreadError(
                f"{name}: {error} Load the folder with the library that wrote it."
            ) from error


def _targets(groups: Collection[list[str]]) -> Iterator[list[str]]:
    """Yield the targets of several groups: names, and a pattern where all experts are in one."""
    # transformers looks for that pattern, and vLLM for names of experts that are its own. Layers
    # that engines fuse are there under the name of all, too.
    experts = [[name for name in names if matches(name, [_EXPERTS])] for names in groups]
    together = sum(map(bool, experts)) == 1
    for names, those in zip(groups, experts, strict=True):
        found = set(those)
        rest = [name for name in names if name not in found]
        fused = [each for _, each in fused_names(rest)]
        yield [*([_EXPERTS, *rest] if those and together else names), *fused]


def group_of(name: str, declared: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the group of config_groups whose targets match a layer best, None without one."""
    groups = list(declared.get("config_groups", {}).values())
    group = min(groups, key=lambda group: distance(name, group.get("targets", ())), default=None)
    return group if group is not None and matches(name, group.get("targets", ())) else None


def transform_groups(declared: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the transforms that a quantization_config declares, by their names."""
    return (declared.get("transform_config") or {}).get("config_groups") or {}


# Transforms of weights lie in the files already.
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
        fmt = config.input_format
        if config.rotation and fmt is not None and fmt.has_global_scale:
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

    def require_applied(self, declared: Mapping[str, Any], shapes: Shapes) -> None:
        """Raise CheckpointError for what is not applied, as other transforms."""
        super().require_applied(declared, shapes)
        matrices = [name for name, (shape, _) in shapes.items() if len(shape) == 2]
        dense = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
        dense = [name for name in dense if not _EMBEDDING.search(name)]
        dense += [name for name in declared.get("ignore") or () if not name.startswith("re:")]
        for name, group, apply in _online(declared):
            kind = "randomized " * bool(group.get("randomize")) + str(group.get("type"))
            found = apply.get("location"), kind, group.get("head_dim")
            rotated = [each for each in dense if _applies(apply, each)]
            if rotated or found[:2] != ("input", "hadamard") or found[2] not in ROTATIONS[1:]:
                raise CheckpointError(
                    f"transform_config: {name!r}: expected inputs of packed layers times hadamard "
                    f"of {ROTATIONS[1:]}, got {found}{some(rotated) and f' of {some(rotated)}'}. "
                    "fp4pass does not apply it; load the folder with the library that wrote it."
                )

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
    return matches(name, apply.get("targets", ())) and not matches(name, apply.get("ignore", ()))
