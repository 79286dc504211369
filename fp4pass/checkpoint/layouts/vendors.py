"""The layouts of vendors: FP8 of DeepSeek and Qwen, ModelOpt of NVIDIA, gpt-oss, Quark of AMD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._version import __version__
from ...core.formats import WHOLE
from ...errors import CheckpointError, UnreadError, as_option, as_rules, expected
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .base import CacheLayout, Layout, register_layout
from .compressed_tensors import group_of
from .layer import PackedLayer, Scheme, as_globs, fused_names, is_tile

# The rows and columns of a block.
_BLOCK = [128, 128]


@register_layout
class FineGrainedFp8(Layout):
    """`weight` and `weight_scale_inv`, which multiplies in spite of its name.

    Everything but the layers that `modules_to_not_convert` lists is in FP8.
    """

    name = "finegrained-fp8"
    parts: ClassVar[Mapping[str, str]] = {
        PACKED: "weight",
        SCALE: "weight_scale_inv",
        INPUT_GLOBAL: "activation_scale",
    }
    formats = ("fp8_block", "fp8_tensor")
    multiplies = True
    dense_keys = ("modules_to_not_convert", "ignored_layers")

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config declares this layout."""
        # The experts of DeepSeek-V4 are in another format.
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") != "fp4"

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        first = next(iter(layers.values()))
        # A pattern of what is below a module is the name of that module here.
        names = [each.removesuffix(".*") for each in as_globs(ignore)]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if first.static_inputs else "dynamic",
            "weight_block_size": None if first.fmt.block == WHOLE else _BLOCK,
            "modules_to_not_convert": list(dict.fromkeys(names)),
        }

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of all layers."""
        block = declared.get("weight_block_size", _BLOCK)
        inputs = declared.get("activation_scheme", "dynamic")
        if (block is not None and not is_tile(block)) or inputs not in ("dynamic", "static"):
            known = "weight_block_size of two sizes or none, and dynamic or static inputs"
            raise UnreadError(
                f"{name}: {expected('quantization_config', known, f'{block} and {inputs!r}')} "
                "Load the folder with the library that wrote it."
            )
        fmt, is_static = self.formats[block is None], inputs == "static"
        tile = tuple(block) if block is not None and list(block) != _BLOCK else ()
        return Scheme(fmt, weight_only=False, static_inputs=is_static, tile=tile)

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        return ((), (1,), (1, 1)) if layer.fmt.rows == WHOLE else (layer.scale_shape,)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        if not found and layer.config.weight_only:
            return f"{layer.fmt.key} of weights only: its readers quantize inputs"
        return found

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for the first layer that this layout has no place for."""
        super().require(layers)
        first, *others = layers
        for name in others:
            if layers[name].scheme != layers[first].scheme:
                raise CheckpointError(
                    f"{name}: {self.name} has one scheme for all layers, and {first} is "
                    f"{layers[first].scheme}, this one {layers[name].scheme}. Choose "
                    f"{as_option('layout', 'compressed-tensors')}, which has a group for each."
                )
        for name in layers:
            if not any(map(str.isdigit, name.split("."))):
                raise CheckpointError(
                    f"{name}: readers of {self.name} take it for dense. Skip it with "
                    f"{as_rules(name)}, or choose {as_option('layout', 'compressed-tensors')}."
                )


@register_layout
class DeepSeek(Layout):
    """`weight` and `scale` beside it: experts in int8 for two codes of mxfp4, the others in E4M3.

    All scales are powers of two in E8M0, those of blocks in FP8 too.
    """

    name = "deepseek-v4"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "scale"}
    formats = ("mxfp4", "fp8_block")
    dense_keys, has_globs = ("modules_to_not_convert",), True
    dtypes: ClassVar[Mapping[str, str]] = {PACKED: "I8", SCALE: "F8_E8M0"}

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": _BLOCK,
            "expert_dtype": "fp4",
            "modules_to_not_convert": as_globs(ignore),
        }

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config, with `expert_dtype` of config.json, says so."""
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") == "fp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of experts, or that of all others."""
        if _is_expert(name):
            return Scheme("mxfp4", weight_only=True, block=32)
        block = declared.get("weight_block_size") or _BLOCK
        if list(block) != _BLOCK:
            wanted = expected("weight_block_size", str(_BLOCK), str(block))
            raise UnreadError(f"{name}: {wanted} Load the folder with the library that wrote it.")
        return Scheme("fp8_block", weight_only=False)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        if not found and layer.config.weight_only == layer.fmt.has_float_scale:
            found = f"{layer.config.scheme}, only for mxfp4a16 and fp8_block"
        return found

    def encode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer as it is stored."""
        if part == PACKED:
            return tensor.view(torch.float8_e4m3fn if layer.fmt.has_float_scale else torch.int8)
        if not layer.fmt.has_float_scale:
            return tensor.view(torch.float8_e8m0fnu)
        stored = tensor.to(torch.float8_e8m0fnu)
        if not torch.equal(stored.float(), tensor):
            raise CheckpointError(
                f"{self.name} has powers of two for scales in FP8, and those of this model are "
                f"none. Choose {as_option('layout', 'compressed-tensors')}."
            )
        return stored

    def decode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer of what is stored: the inverse of `encode`."""
        if part == SCALE and layer.fmt.has_float_scale:
            return tensor.float()
        return tensor.view(torch.uint8)

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for what this layout has no place for, as other experts."""
        super().require(layers)
        for name, layer in layers.items():
            if _is_expert(name) == layer.fmt.has_float_scale:
                raise CheckpointError(
                    f"{name}: {self.name} has no place for it in {layer.scheme}; it holds experts, "
                    "each a linear layer, in mxfp4a16, and others in fp8_block. Skip the others by "
                    f"{as_option('rules')}, or choose another layout."
                )


def _is_expert(name: str) -> bool:
    return ".experts." in name


# Its names for ways to quantize, and what they stand for.
ALGORITHMS: dict[str, Scheme] = {
    "NVFP4": Scheme("nvfp4", weight_only=False, block=16),
    "W4A16_NVFP4": Scheme("nvfp4", weight_only=True, block=16),
    "FP8": Scheme("fp8_tensor", weight_only=False, static_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", weight_only=False),
    "FP8_PB_WO": Scheme("fp8_block", weight_only=True),
    "MXFP8": Scheme("mxfp8", weight_only=False, block=32),
}

_MIXED = "MIXED_PRECISION"

_SIDE_FILE = "hf_quant_config.json"
_PRODUCER = {"name": "fp4pass", "version": __version__}


@register_layout
class ModelOpt(Layout):
    """`weight`, `weight_scale`, `weight_scale_2`, declared by algorithms."""

    name = "modelopt"
    parts: ClassVar[Mapping[str, str]] = {
        PACKED: "weight",
        SCALE: "weight_scale",
        GLOBAL: "weight_scale_2",
        INPUT_GLOBAL: "input_scale",
    }
    formats = tuple(dict.fromkeys(each.fmt for each in ALGORITHMS.values()))
    multiplies = True
    side_files = (_SIDE_FILE,)
    dense_keys, has_globs = ("ignore", "exclude_modules"), True
    cache = CacheLayout(
        {"fp8_tensor": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale"},
        shape=(),
        algorithms={"fp8_tensor": "FP8"},
    )

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether this is its quantization_config or its own file."""
        return super().detect(declared) or (
            not declared.get("quant_method") and "quantization" in declared
        )

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; hf_quant_config.json says the same."""
        algorithms = {name: _name_of(layer) for name, layer in layers.items()}
        groups = {}
        for i, algorithm in enumerate(sorted(set(algorithms.values()))):
            names = [name for name, each in algorithms.items() if each == algorithm]
            found, fmt = ALGORITHMS[algorithm], layers[names[0]].fmt
            args = {"dynamic": False, "num_bits": fmt.element.bits, "type": "float", **_size(found)}
            group: dict[str, Any] = {"weights": args}
            if not found.weight_only:
                is_dynamic = not (found.static_inputs or fmt.has_global_scale)
                group["input_activations"] = {**args, "dynamic": is_dynamic}
            whole = len(names) == len(algorithms)
            groups[f"group_{i}"] = group | {"targets": ["Linear"] if whole else names}
        return {
            "quant_method": self.name,
            **_declared(layers),
            "config_groups": groups,
            "ignore": as_globs(ignore),
            "producer": _PRODUCER,
        }

    def files(
        self, layers: Mapping[str, PackedLayer], ignore: Sequence[str], cache: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return hf_quant_config.json."""
        sizes = [_size(ALGORITHMS[_name_of(layer)]) for layer in layers.values()]
        quantization = {
            **_declared(layers),
            "kv_cache_quant_algo": self.cache.algorithms.get(cache or ""),
            **(sizes[0] if all(each == sizes[0] for each in sizes) else {}),
            "exclude_modules": as_globs(ignore),
        }
        return {_SIDE_FILE: {"producer": _PRODUCER, "quantization": quantization}}

    def group(self, name: str, declared: Mapping[str, Any]) -> str:
        """Return the algorithm of a layer."""
        return str(_facts_of(name, declared).get("quant_algo") or "")

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what the algorithm of a layer stands for."""
        found = _facts_of(name, declared)
        block = found.get("group_size")
        if block is None and (group := group_of(name, declared)) is not None:
            block = (group.get("weights") or {}).get("group_size")
        # It writes some of them in lower case.
        algorithm = ALGORITHMS.get(str(found.get("quant_algo")).upper())
        if algorithm is None:
            raise UnreadError(
                f"{name}: quant_algo: expected {' or '.join(ALGORITHMS)}, got "
                f"{found.get('quant_algo')!r}. Load the folder with the library that wrote it."
            )
        # Of FP8 it says none, and that of a group is of another layer.
        return algorithm._replace(block=algorithm.block and block)

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        rows, columns = layer.scale_shape
        if layer.fmt.rows == WHOLE:
            return (), (1,), (1, 1)
        usual: tuple[tuple[int, ...], ...] = ((rows,), (rows, 1))
        return usual if layer.fmt.block == WHOLE else ((rows, 1, columns, 1), (rows, columns))

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        found = super().problem(layer)
        if found or _name_of(layer):
            return found
        known = [each for each in ALGORITHMS.values() if each.fmt == layer.fmt.key]
        return f"{_words(_scheme_of(layer))}, only for {' or '.join(map(_words, known))}"


def _scheme_of(layer: PackedLayer) -> Scheme:
    only = bool(layer.config.weight_only)
    return Scheme(layer.fmt.key, only, static_inputs=layer.static_inputs)


def _words(scheme: Scheme) -> str:
    """Return a way to quantize in words."""
    if scheme.weight_only:
        return f"{scheme.fmt} of weights only"
    inputs = "one stored scale" if scheme.static_inputs else "dynamic scales"
    return f"{scheme.fmt} with {inputs} of inputs"


def _facts_of(name: str, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config, in either of its forms, says of a layer or of a module around it."""
    found: Mapping[str, Any] = declared.get("quantization", declared)
    if found.get("quant_algo") != _MIXED:
        return found
    layers: Mapping[str, Mapping[str, Any]] = found.get("quantized_layers") or {}
    while name and name not in layers:
        # All experts of a layer have one entry.
        name = name.rpartition(".")[0]
    return layers.get(name, {})


def _name_of(layer: PackedLayer) -> str:
    """Return its name for how a layer is quantized, "" if it has none."""
    own = _scheme_of(layer)
    return next((n for n, each in ALGORITHMS.items() if each._replace(block=None) == own), "")


def _size(algorithm: Scheme) -> dict[str, int]:
    return {} if algorithm.block is None else {"group_size": algorithm.block}


def _declared(layers: Mapping[str, PackedLayer]) -> dict[str, Any]:
    """Return the algorithm of all layers, or of each one where there are several."""
    found = set(map(_name_of, layers.values()))
    if len(found) == 1:
        return {"quant_algo": found.pop()}
    each = {
        name: {"quant_algo": _name_of(layer), **_size(ALGORITHMS[_name_of(layer)])}
        for name, layer in layers.items()
    }
    each |= {fused: each[first] for first, fused in fused_names([*layers])}
    return {"quant_algo": _MIXED, "quantized_layers": each}


@register_layout
class GptOss(Layout):
    """`*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] beside no module of their own.

    A layer is a parameter such as model.layers.0.mlp.experts.gate_up_proj, whose rows are gate and
    up in turn; transformers computes with it as [E, K, N].
    """

    name = "gpt-oss"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "_blocks", SCALE: "_scales"}
    formats = ("mxfp4",)
    stacks = True
    dense_keys = ("modules_to_not_convert",)

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what it reads is known by the names of tensors."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether the experts are packed."""
        return declared.get("quant_method") == "mxfp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the only scheme."""
        return Scheme("mxfp4", weight_only=True)


# `OCP_MXFP4Spec` of amd-quark 0.13, without the entries that only its observers read.
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_REST = {"ch_axis": -1, "symmetric": None, "round_method": "half_even", "scale_type": "float"}

# Where a config has what holds for a layer, the most particular first.
_NAMED, _BY_CLASS, _FOR_ALL = (
    "layer_quant_config",
    "layer_type_quant_config",
    "global_quant_config",
)
_LINEAR = ("Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>")


@register_layout
class Quark(Layout):
    """`weight` and `weight_scale`, bytes of E8M0, declared for all layers or by globs of names."""

    name = "quark"
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "weight_scale"}
    formats = ("mxfp4",)
    dense_keys, has_globs = ("exclude",), True

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what differs from the first layer is named."""
        schemes = {name: _spec_of(layer) for name, layer in layers.items()}
        usual = next(iter(schemes.values()))
        return {
            "quant_method": self.name,
            "version": "0.13",
            "quant_mode": "eager_mode",
            _FOR_ALL: usual,
            _NAMED: {name: each for name, each in schemes.items() if each != usual},
            _BY_CLASS: {},
            "exclude": as_globs(ignore),
            "algo_config": None,
            "softmax_quant_spec": None,
            "kv_cache_quant_config": {},
            "kv_cache_post_rope": False,
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what the most particular entry says of a layer."""
        found = _entry_of(name, declared)
        weight, inputs = found.get("weight"), found.get("input_tensors")
        if not _is_mxfp4(weight) or not (inputs is None or _is_mxfp4(inputs)):
            raise UnreadError(
                f"{name}: expected weights in fp4 in groups of 32 with scales in e8m0, and inputs "
                f"alike or in floating point, got weights {weight} and inputs {inputs}. Load the "
                "folder with the library that wrote it."
            )
        if inputs is not None and not inputs.get("is_dynamic", True):
            raise UnreadError(
                f"{name}: expected inputs whose scales are computed at each call, got static ones. "
                "Load the folder with the library that wrote it."
            )
        return Scheme(self.formats[0], inputs is None, 32)


def is_read(declared: Mapping[str, Any]) -> bool:
    """Return whether any layer of a quantization_config is in mxfp4."""
    named = (declared.get(_NAMED) or {}).values()
    by_class = (declared.get(_BY_CLASS) or {}).values()
    every = (declared.get(_FOR_ALL) or {}, *named, *by_class)
    return any(_is_mxfp4((each or {}).get("weight")) for each in every)


def _entry_of(name: str, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of a config that holds for a linear layer, {} if there is none."""
    for pattern, found in (declared.get(_NAMED) or {}).items():
        if fnmatchcase(name, pattern):
            return found
    by_class = declared.get(_BY_CLASS) or {}
    found = next((by_class[each] for each in _LINEAR if each in by_class), None)
    return found or declared.get(_FOR_ALL) or {}


def _is_mxfp4(spec: Any) -> bool:
    """Return whether Quark's words for a tensor are those of mxfp4; a list has two scales."""
    return isinstance(spec, Mapping) and _MXFP4.items() <= spec.items()


def _spec_of(layer: PackedLayer) -> dict[str, Any]:
    def spec(is_dynamic: bool) -> dict[str, Any]:
        return {**_MXFP4, **_REST, "is_dynamic": is_dynamic}

    inputs = None if layer.config.weight_only else spec(True)
    return {"weight": spec(False), "input_tensors": inputs, "output_tensors": None, "bias": None}
