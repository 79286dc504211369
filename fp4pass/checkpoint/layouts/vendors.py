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
from .layer import PackedLayer, Scheme, as_globs, fused_names

# The rows and columns of a block.
_BLOCK = [128, 128]

_ELSEWHERE = "Load the folder with the library that wrote it."


@register_layout
class FineGrainedFp8(Layout):
    """`weight` in FP8 and `weight_scale_inv`, which multiplies in spite of its name."""

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
        if block not in (None, _BLOCK, tuple(_BLOCK)) or inputs not in ("dynamic", "static"):
            known = f"weight_block_size {_BLOCK} or none, and dynamic or static inputs"
            found = expected("quantization_config", known, f"{block} and {inputs!r}")
            raise UnreadError(f"{name}: {found} {_ELSEWHERE}")
        fmt = self.formats[block is None]
        return Scheme(fmt, weight_only=False, static_inputs=inputs == "static")

    def scale_shapes(self, layer: PackedLayer) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a layer may have on disk, the written one first."""
        return ((), (1,), (1, 1)) if layer.fmt.rows == WHOLE else (layer.scale_shape,)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        return super().problem(layer) or (layer.scheme if layer.config.input_format is None else "")

    def require(self, layers: Mapping[str, PackedLayer]) -> None:
        """Raise CheckpointError for the first layer that this layout has no place for."""
        super().require(layers)
        usual = next(iter(layers.values())).scheme
        for name, layer in layers.items():
            # Readers take what is in no list of layers for dense.
            if layer.scheme != usual or not any(map(str.isdigit, name.split("."))):
                raise CheckpointError(
                    f"{name}: {self.name} has one scheme, {usual}, for the linear layers in lists, "
                    f"got {layer.scheme}. Skip it with {as_rules(name)}, or choose "
                    f"{as_option('layout', 'compressed-tensors')}."
                )


@register_layout
class DeepSeek(Layout):
    """`weight` and `scale` in E8M0: experts in int8 for two codes of mxfp4, the others in E4M3."""

    name = "deepseek-v4"
    is_written = False
    parts: ClassVar[Mapping[str, str]] = {PACKED: "weight", SCALE: "scale"}
    formats = ("mxfp4", "fp8_block")
    dense_keys, has_globs = ("modules_to_not_convert",), True
    dtypes: ClassVar[Mapping[str, str]] = {PACKED: "I8", SCALE: "F8_E8M0"}

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether a quantization_config, with `expert_dtype` of config.json, says so."""
        return declared.get("quant_method") == "fp8" and declared.get("expert_dtype") == "fp4"

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return the scheme of experts, or that of all others."""
        if ".experts." in name:
            return Scheme("mxfp4", weight_only=True, block=32)
        block = declared.get("weight_block_size") or _BLOCK
        if list(block) != _BLOCK:
            what = expected("weight_block_size", str(_BLOCK), str(block))
            raise UnreadError(f"{name}: {what} {_ELSEWHERE}")
        return Scheme("fp8_block", weight_only=False)

    def decode(self, part: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a buffer of a layer of what is stored."""
        if part == SCALE and layer.fmt.has_float_scale:
            return tensor.float()
        return tensor.view(torch.uint8)


# Its names for ways to quantize, and what they stand for.
ALGORITHMS: dict[str, Scheme] = {
    "NVFP4": Scheme("nvfp4", weight_only=False, block=16),
    "W4A16_NVFP4": Scheme("nvfp4", weight_only=True, block=16),
    "FP8": Scheme("fp8_tensor", weight_only=False, static_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", weight_only=False),
    "FP8_PB_WO": Scheme("fp8_block", weight_only=True),
    "MXFP8": Scheme("mxfp8", weight_only=False, block=32),
    "W4A8_MXFP4_FP8": Scheme("mxfp4", False, 32, static_inputs=True, inputs="fp8_tensor"),
}
# Its weights are written for kernels that take no block scales above 448 / 6.
_READ_ALONE = {
    "W4A8_NVFP4_FP8": Scheme("nvfp4", False, 32, static_inputs=True, inputs="fp8_tensor")
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
    formats = tuple(dict.fromkeys(e.fmt for e in ALGORITHMS.values() if e.inputs is None))
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = {"mxfp4": ("fp8_tensor",)}
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
        by_algorithm: dict[str, list[str]] = {}
        for name, layer in layers.items():
            by_algorithm.setdefault(_name_of(layer), []).append(name)
        groups = {}
        for i, (algorithm, names) in enumerate(sorted(by_algorithm.items())):
            found, fmt = ALGORITHMS[algorithm], layers[names[0]].fmt
            args = {"dynamic": False, "num_bits": fmt.element.bits, "type": "float", **_size(found)}
            group: dict[str, Any] = {"weights": args}
            if not found.weight_only:
                is_dynamic = not (found.static_inputs or fmt.has_global_scale)
                of_inputs = args if found.inputs is None else {"num_bits": 8, "type": "float"}
                group["input_activations"] = {**of_inputs, "dynamic": is_dynamic}
            targets = ["Linear"] if len(by_algorithm) == 1 else names
            groups[f"group_{i}"] = group | {"targets": targets}
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

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what the algorithm of a layer, or of a module around it, stands for."""
        found: Mapping[str, Any] = declared.get("quantization", declared)
        if found.get("quant_algo") == _MIXED:
            listed, path = found.get("quantized_layers") or {}, name
            while path and path not in listed:
                # All experts of a layer have one entry.
                path = path.rpartition(".")[0]
            found = listed.get(path, {})
        # It writes some of them in lower case.
        known = ALGORITHMS | _READ_ALONE
        algorithm = known.get(str(found.get("quant_algo")).upper())
        if algorithm is None:
            got = repr(found.get("quant_algo"))
            what = expected("quant_algo", " or ".join(known), got)
            raise UnreadError(f"{name}: {what} {_ELSEWHERE}")
        block = found.get("group_size")
        if block is None and (group := group_of(name, declared)) is not None:
            block = (group.get("weights") or {}).get("group_size")
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
        problem = super().problem(layer) or _unscaled(layer)
        return problem or ("" if _name_of(layer) else layer.scheme)


def _name_of(layer: PackedLayer) -> str:
    """Return its name for how a layer is quantized, "" if it has none."""
    only, static = layer.config.input_format is None, layer.static_inputs
    own = Scheme(layer.fmt.key, only, static_inputs=static, inputs=layer.config.inputs)
    return next((n for n, each in ALGORITHMS.items() if each._replace(block=None) == own), "")


def _unscaled(layer: PackedLayer) -> str:
    """Return what is missing where inputs in FP8 are to have one scale, "" if nothing is."""
    is_missing = layer.config.has_input_scale and not layer.has_input_scale
    return f"{layer.config.scheme} before calibration" if is_missing else ""


def _size(algorithm: Scheme) -> dict[str, int]:
    return {} if algorithm.block is None else {"group_size": algorithm.block}


def _declared(layers: Mapping[str, PackedLayer]) -> dict[str, Any]:
    """Return the algorithm of all layers, or of each one where there are several."""
    names = {name: _name_of(layer) for name, layer in layers.items()}
    if len({*names.values()}) == 1:
        return {"quant_algo": next(iter(names.values()))}
    each = {name: {"quant_algo": own, **_size(ALGORITHMS[own])} for name, own in names.items()}
    each |= {fused: each[first] for first, fused in fused_names([*layers])}
    return {"quant_algo": _MIXED, "quantized_layers": each}


@register_layout
class GptOss(Layout):
    """`*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] beside no module of their own."""

    # A layer is a parameter such as model.layers.0.mlp.experts.gate_up_proj, whose rows are gate
    # and up in turn; transformers computes with it as [E, K, N].

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

# Inputs in FP8 with one stored scale.
_STATIC_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}

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
    parts: ClassVar[Mapping[str, str]] = {
        PACKED: "weight",
        SCALE: "weight_scale",
        INPUT_GLOBAL: "input_scale",
    }
    formats = ("mxfp4",)
    inputs: ClassVar[Mapping[str, tuple[str, ...]]] = {"mxfp4": ("fp8_tensor",)}
    dense_keys, has_globs = ("exclude",), True

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; what differs from the first layer is named."""
        weight = {**_MXFP4, **_REST, "is_dynamic": False}
        rest = {"output_tensors": None, "bias": None}
        schemes: dict[str, dict[str, Any]] = {}
        for name, layer in layers.items():
            inputs = None if layer.config.input_format is None else {**weight, "is_dynamic": True}
            if layer.config.inputs is not None:
                inputs = {**_REST, **_STATIC_FP8}
            schemes[name] = {"weight": weight, "input_tensors": inputs, **rest}
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
        named, by_class = declared.get(_NAMED) or {}, declared.get(_BY_CLASS) or {}
        entries = [each for pattern, each in named.items() if fnmatchcase(name, pattern)]
        entries += [by_class[each] for each in _LINEAR if each in by_class]
        found = next(iter(entries), None) or declared.get(_FOR_ALL) or {}
        weight, inputs = found.get("weight"), found.get("input_tensors")
        is_static = isinstance(inputs, Mapping) and _STATIC_FP8.items() <= inputs.items()
        is_read = inputs is None or (_is_mxfp4(inputs) and inputs.get("is_dynamic", True))
        if _is_mxfp4(weight) and is_static:
            return Scheme("mxfp4", False, 32, static_inputs=True, inputs="fp8_tensor")
        if not _is_mxfp4(weight) or not is_read:
            raise UnreadError(
                f"{name}: expected weights in fp4 in groups of 32 with scales in e8m0, and inputs "
                "alike with scales of each call, in fp8 with one scale, or in float, got weights "
                f"{weight} and inputs {inputs}. {_ELSEWHERE}"
            )
        return Scheme(self.formats[0], inputs is None, 32)

    def problem(self, layer: PackedLayer) -> str:
        """Return what this layout has no place for in a layer, "" if it holds the layer."""
        return super().problem(layer) or _unscaled(layer)


def is_read(declared: Mapping[str, Any]) -> bool:
    """Return whether any layer of a quantization_config is in mxfp4."""
    named = (declared.get(_NAMED) or {}).values()
    by_class = (declared.get(_BY_CLASS) or {}).values()
    every = (declared.get(_FOR_ALL) or {}, *named, *by_class)
    return any(_is_mxfp4((each or {}).get("weight")) for each in every)


def _is_mxfp4(spec: Any) -> bool:
    """Return whether Quark's words for a tensor are those of mxfp4; a list has two scales."""
    return isinstance(spec, Mapping) and _MXFP4.items() <= spec.items()
