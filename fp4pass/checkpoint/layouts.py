"""What other libraries call our formats: the layouts that checkpoints are written in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..config import LinearConfig
from ..core.formats import Format, get_format
from ..errors import CheckpointError, OptionError, unknown_name
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE

# Formats that compressed-tensors names, with what its scheme says of their weights.
_SCHEMES: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "format": "nvfp4-pack-quantized",
        "strategy": "tensor_group",
        "scale_dtype": "torch.float8_e4m3fn",
        "dynamic": "local",
    },
    "mxfp4": {
        "format": "mxfp4-pack-quantized",
        "strategy": "group",
        "scale_dtype": "torch.uint8",
        "dynamic": True,
    },
}

# ModelOpt's names for weights in nvfp4, by whether activations stay as they are.
_ALGORITHMS = {True: "W4A16_NVFP4", False: "NVFP4"}

# What ModelOpt stores beside a weight that would have to be applied to the input.
_UNREAD = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")


@dataclass(frozen=True)
class Layer:
    """How one stored weight is to be used; what fp4pass.json says of it."""

    config: LinearConfig
    weight_dtype: str
    transposed: bool
    shape: tuple[int, ...]

    @property
    def fmt(self) -> Format:
        """The format as files name it: their layout tells which way global scales go."""
        return self.config.format.with_multiplier(False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        return {**vars(self), "config": self.config.to_dict(), "shape": list(self.shape)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Layer:
        """Read what `to_dict` returned."""
        config = LinearConfig.from_dict(data["config"])
        return Layer(**{**data, "config": config, "shape": tuple(data["shape"])})


@dataclass(frozen=True)
class Layout:
    """How packed weights lie in a file.

    parts: the name of each buffer of a QuantizedLinear, beside its module's; formats: those it
    has a place for; multiplies: global scales are stored as what multiplies, in a tensor [], and
    not as what divides, in a tensor [1].
    """

    name: str
    parts: Mapping[str, str]
    formats: tuple[str, ...]
    multiplies: bool = False

    def encode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """A buffer as it is stored. multiplies: Format.multiplies of its layer."""
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor
        tensor = tensor if self.multiplies == multiplies else 1 / tensor
        return tensor.reshape(()) if self.multiplies else tensor

    def decode(self, part: str, tensor: Tensor, multiplies: bool = False) -> Tensor:
        """The inverse of `encode`, to the bit where `multiplies` is what `config_of` gives."""
        if part not in (GLOBAL, INPUT_GLOBAL):
            return tensor
        return (tensor if self.multiplies == multiplies else 1 / tensor).reshape(1)

    def config_of(self, layer: Layer, global_scales: Iterable[Tensor]) -> LinearConfig:
        """Return the config of a layer in memory, by the global scales that are stored for it.

        A multiplier that is no power of two has no exact reciprocal: it stays a multiplier.
        """
        exact = all(bool((torch.frexp(each).mantissa == 0.5).all()) for each in global_scales)
        return dataclasses.replace(layer.config, multiplies=self.multiplies and not exact)


_OURS = {part: part for part in (PACKED, SCALE, GLOBAL, INPUT_GLOBAL)}

COMPRESSED = Layout("compressed-tensors", _OURS, tuple(_SCHEMES))
MODELOPT = Layout(
    "modelopt",
    {
        PACKED: "weight",
        SCALE: "weight_scale",
        GLOBAL: "weight_scale_2",
        INPUT_GLOBAL: "input_scale",
    },
    ("nvfp4",),
    multiplies=True,
)
# Every format and block; only fp4pass reads it.
OWN = Layout("fp4pass", _OURS, ())

LAYOUTS = {layout.name: layout for layout in (COMPRESSED, MODELOPT, OWN)}

# Those that can be asked for.
PUBLIC = (COMPRESSED.name, MODELOPT.name)


def get_layout(name: str) -> Layout:
    """A layout to write, by its name. Raises OptionError."""
    if name not in PUBLIC:
        raise unknown_name("The layout", name, PUBLIC)
    return LAYOUTS[name]


def is_public(layers: Mapping[str, Layer], layout: Layout = COMPRESSED) -> bool:
    """Whether a layout has a name for every layer's format, and its readers need not rotate."""
    return all(
        layer.fmt.key in layout.formats and not layer.transposed and not layer.config.is_rotated
        for layer in layers.values()
    )


def require_public(layers: Mapping[str, Layer], layout: Layout) -> None:
    """Raise CheckpointError for the first layer that a layout has no place for."""
    for name, layer in layers.items():
        if not is_public({name: layer}, layout):
            what = f"{layer.fmt.key}, transposed" if layer.transposed else layer.fmt.key
            if layer.config.is_rotated:
                what = f"{layer.fmt.key} of rotated weights, whose inputs no other library rotates"
            raise CheckpointError(
                f"{name}: {layout.name} has no place for {what}; it holds "
                f"{' and '.join(layout.formats)}. Choose another layout, or convert the model to "
                "what this one holds."
            )


def quantization_config(
    layout: Layout, layers: Mapping[str, Layer], ignore: Sequence[str]
) -> dict[str, Any]:
    """The quantization_config of config.json in a layout; under our own name others refuse it.

    ignore: the names of what was left alone.
    """
    if layout is MODELOPT:
        return _modelopt_config(layers, ignore)
    if layout is OWN:
        return {"quant_method": "fp4pass", "version": __version__}
    schemes: dict[tuple[str, bool], list[str]] = {}
    for name, layer in layers.items():
        schemes.setdefault((layer.fmt.key, layer.config.weight_only), []).append(name)
    groups = {
        f"group_{i}": _scheme(fmt, weight_only, names if len(schemes) > 1 else ["Linear"])
        for i, ((fmt, weight_only), names) in enumerate(schemes.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(fmt: str, weight_only: bool, targets: list[str]) -> dict[str, Any]:
    public = _SCHEMES[fmt]
    args = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": public["strategy"],
        "group_size": get_format(fmt).block,
        "scale_dtype": public["scale_dtype"],
        "zp_dtype": public["scale_dtype"],
    }
    return {
        "targets": targets,
        "format": public["format"],
        "weights": {**args, "dynamic": False},
        "input_activations": None if weight_only else {**args, "dynamic": public["dynamic"]},
        "output_activations": None,
    }


def _modelopt_config(layers: Mapping[str, Layer], ignore: Sequence[str]) -> dict[str, Any]:
    """ModelOpt's quantization_config for config.json; hf_quant_config.json says the same."""
    algorithms = {name: _ALGORITHMS[layer.config.weight_only] for name, layer in layers.items()}
    groups = {}
    for i, algorithm in enumerate(sorted(set(algorithms.values()))):
        names = [name for name, each in algorithms.items() if each == algorithm]
        (block,) = {layers[name].fmt.block for name in names}
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": block}
        group: dict[str, Any] = {"weights": args}
        if algorithm == _ALGORITHMS[False]:
            group["input_activations"] = dict(args)
        whole = len(names) == len(algorithms)
        groups[f"group_{i}"] = group | {"targets": ["Linear"] if whole else names}
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": _one_algorithm(algorithms),
        "config_groups": groups,
        "ignore": list(ignore),
        "producer": {"name": "fp4pass", "version": __version__},
    }
    if config["quant_algo"] == "MIXED_PRECISION":
        config["quantized_layers"] = _quantized_layers(layers, algorithms)
    return config


def hf_quant_config(layers: Mapping[str, Layer], ignore: Sequence[str]) -> dict[str, Any]:
    """ModelOpt's hf_quant_config.json."""
    algorithms = {name: _ALGORITHMS[layer.config.weight_only] for name, layer in layers.items()}
    quantization: dict[str, Any] = {
        "quant_algo": _one_algorithm(algorithms),
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": list(ignore),
    }
    if quantization["quant_algo"] == "MIXED_PRECISION":
        quantization["quantized_layers"] = _quantized_layers(layers, algorithms)
    producer = {"name": "fp4pass", "version": __version__}
    return {"producer": producer, "quantization": quantization}


def _one_algorithm(algorithms: Mapping[str, str]) -> str:
    found = set(algorithms.values())
    return found.pop() if len(found) == 1 else "MIXED_PRECISION"


def _quantized_layers(
    layers: Mapping[str, Layer], algorithms: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    return {
        name: {"quant_algo": algorithms[name], "group_size": layer.fmt.block}
        for name, layer in layers.items()
    }


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a quantization_config declares. Raises CheckpointError."""
    method = str(config.get("quant_method", ""))
    if not method and "quantization" in config:
        method = MODELOPT.name
    if method not in LAYOUTS:
        raise CheckpointError(
            f"quant_method is {method!r}; fp4pass reads {', '.join(PUBLIC)}. Load it with the "
            "library that wrote it, or gpt-oss after `fp4pass convert --to bf16`."
        )
    return LAYOUTS[method]


def read_layers(
    layout: Layout,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    dtype: str,
) -> dict[str, Layer]:
    """The packed layers of a folder that another library may have written.

    config: its quantization_config; shapes: the shape and safetensors dtype of every tensor;
    dtype: that of the dense model. Raises CheckpointError for what cannot be read.
    """
    _require_no_transform(config)
    layers = {}
    parts = layout.parts
    for name, (shape, kind) in shapes.items():
        module, _, last = name.rpartition(".")
        if last in _UNREAD:
            raise CheckpointError(
                f"{name}: a scale of the inputs (AWQ, SVDQuant), which fp4pass does not apply. "
                "Load this checkpoint with the library that wrote it."
            )
        if last != parts[PACKED] or kind != "U8":
            continue
        if f"{module}.{parts[SCALE]}" not in shapes:
            raise CheckpointError(f"{name} has no {parts[SCALE]} beside it. Copy the folder again.")
        blocks = shapes[f"{module}.{parts[SCALE]}"][0][-1]
        columns = 2 * shape[-1]
        has_input = f"{module}.{parts[INPUT_GLOBAL]}" in shapes
        read = _read_modelopt if layout is MODELOPT else _read_scheme
        family, weight_only, block = read(module, config)
        if block is not None and block * blocks != columns:
            raise CheckpointError(
                f"{module}.{parts[SCALE]} has {blocks} columns; {columns} columns of weights in "
                f"blocks of {block}, as the config says, need {columns // block}. The config is "
                "not that of these weights."
            )
        try:
            fmt = get_format(family, columns // max(blocks, 1))
        except OptionError as error:
            raise CheckpointError(f"{module}: {error}") from error
        if not weight_only and fmt.has_global_scale and not has_input:
            raise CheckpointError(
                f"{module}: its inputs are quantized, and {parts[INPUT_GLOBAL]} is missing. The "
                "folder is incomplete; copy it again."
            )
        read_as = LinearConfig(fmt.name, None, weight_only, fmt.block)
        layers[module] = Layer(read_as, dtype, False, (shape[0], columns))
    return layers


def _require_no_transform(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for rotations that are left to whoever runs the model."""
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    for name, group in groups.items():
        for apply in group.get("apply") or ():
            # What is applied to weights lies in the files.
            if apply.get("location") not in ("weight_input", "weight_output"):
                raise CheckpointError(
                    f"transform_config of the quantization_config: {name!r} is applied to the "
                    f"{apply.get('location')} of {apply.get('targets')}, which fp4pass does not "
                    "do. Load this checkpoint with the library that wrote it."
                )


def _read_modelopt(name: str, config: Mapping[str, Any]) -> tuple[str, bool, int | None]:
    """The format family of a layer, whether its inputs stay as they are, and the block size that
    is declared, if any."""
    facts = config.get("quantization", config)
    if facts.get("quant_algo") == "MIXED_PRECISION":
        facts = facts.get("quantized_layers", {}).get(name, {})
    algorithm, block = facts.get("quant_algo"), facts.get("group_size")
    if block is None and (group := _group_of(name, config)) is not None:
        block = (group.get("weights") or {}).get("group_size")
    for weight_only, known in _ALGORITHMS.items():
        if algorithm == known:
            return MODELOPT.formats[0], weight_only, block
    raise CheckpointError(
        f"{name}: quant_algo is {algorithm!r}; fp4pass reads {' and '.join(_ALGORITHMS.values())}. "
        "Load it with the library that wrote it."
    )


def _read_scheme(name: str, config: Mapping[str, Any]) -> tuple[str, bool, int | None]:
    """The same by the scheme whose targets match: the name itself, a pattern, or a class."""
    group = _group_of(name, config)
    if group is None:
        raise CheckpointError(
            f"{name}: no config_groups of the quantization_config has it among its targets. The "
            "config is not that of these weights."
        )
    label = group.get("format") or config.get("format")
    families = {public["format"]: family for family, public in _SCHEMES.items()}
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    block = weights.get("group_size")
    if label not in families or not _is_read(weights, block):
        raise CheckpointError(
            f"{name}: its format is {label!r}, weights {weights}; fp4pass reads "
            f"{' and '.join(families)}, symmetric floats of 4 bits. Load it with the library that "
            "wrote it."
        )
    if inputs is not None and not _is_read(inputs, block):
        raise CheckpointError(
            f"{name}: its inputs are quantized by {inputs}; fp4pass runs inputs in the format of "
            "the weights, or as they are. Load it with the library that wrote it."
        )
    return families[label], inputs is None, block


def _is_read(args: Mapping[str, Any], block: int | None) -> bool:
    """Whether arguments of a scheme, as far as they are given, are symmetric floats of 4 bits in
    blocks of that size."""
    wanted = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": block}
    return all(args.get(key) in (None, value) for key, value in wanted.items())


def _group_of(name: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The group of config_groups that has a module among its targets, the nearest of several."""
    groups = list(config.get("config_groups", {}).values())
    group = min(groups, key=lambda group: _distance(name, group), default=None)
    return group if group is not None and _distance(name, group) < 3 else None


def _distance(name: str, group: Mapping[str, Any]) -> int:
    """0 if a group targets a module by its name, 1 by a pattern, 2 by its class, else 3."""
    targets = group.get("targets", ())
    if name in targets:
        return 0
    patterns = [target[3:] for target in targets if target.startswith("re:")]
    if any(re.match(pattern, name) for pattern in patterns):
        return 1
    return 2 if any(target == "Linear" for target in targets) else 3
