"""The layout of NVIDIA's ModelOpt: global scales that multiply, and a config of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..._version import __version__
from ...errors import UnreadError
from ...linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .base import Layout, register_layout
from .compressed_tensors import group_of
from .layer import PackedLayer, Scheme
from .patterns import as_globs, from_globs

# Its names for weights in nvfp4, by whether inputs stay in floating point.
_ALGORITHMS = {True: "W4A16_NVFP4", False: "NVFP4"}

_MIXED = "MIXED_PRECISION"

# The entries of a key-value cache in E4M3 with a scale for each layer, in its two configs.
_CACHE = "fp8_tensor"
_CACHE_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
_CACHE_ALGORITHM = "FP8"
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
    formats = ("nvfp4",)
    multiplies = True
    side_files = (_SIDE_FILE,)
    cache_schemes: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {_CACHE: _CACHE_SCHEME}
    cache_names: ClassVar[Mapping[str, str]] = {
        "k_scale": "k_proj.k_scale",
        "v_scale": "v_proj.v_scale",
    }

    def cache_format(self, declared: Mapping[str, Any]) -> str | None:
        """Return the format of a cache that either of its configs declares."""
        found = declared.get("quantization", declared)
        is_named = found.get("kv_cache_quant_algo") == _CACHE_ALGORITHM
        return _CACHE if is_named else super().cache_format(found)

    def detect(self, declared: Mapping[str, Any]) -> bool:
        """Return whether this is its quantization_config or its own file."""
        return super().detect(declared) or (
            not declared.get("quant_method") and "quantization" in declared
        )

    def config(self, layers: Mapping[str, PackedLayer], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config; hf_quant_config.json says the same."""
        algorithms = {name: _algorithm(layer) for name, layer in layers.items()}
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
        quantization = {
            **_declared(layers),
            "kv_cache_quant_algo": None if cache is None else _CACHE_ALGORITHM,
            "group_size": 16,
            "exclude_modules": as_globs(ignore),
        }
        return {_SIDE_FILE: {"producer": _PRODUCER, "quantization": quantization}}

    def ignored(self, declared: Mapping[str, Any]) -> list[str] | None:
        """Return what stays dense, by either of its configs."""
        found = declared.get("quantization", declared)
        return from_globs(found.get("ignore") or found.get("exclude_modules") or ())

    def group(self, name: str, declared: Mapping[str, Any]) -> str:
        """Return the algorithm of a layer."""
        return str(_facts_of(name, declared).get("quant_algo") or "")

    def scheme(self, name: str, declared: Mapping[str, Any]) -> Scheme:
        """Return what the algorithm of a layer stands for."""
        found = _facts_of(name, declared)
        algorithm, block = found.get("quant_algo"), found.get("group_size")
        if block is None and (group := group_of(name, declared)) is not None:
            block = (group.get("weights") or {}).get("group_size")
        for weight_only, known in _ALGORITHMS.items():
            if algorithm == known:
                return Scheme(self.formats[0], weight_only, block)
        raise UnreadError(
            f"{name}: quant_algo: expected {' or '.join(_ALGORITHMS.values())}, got "
            f"{algorithm!r}. Load the folder with the library that wrote it."
        )


def _facts_of(name: str, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config, in either of its forms, says of a layer."""
    found: Mapping[str, Any] = declared.get("quantization", declared)
    if found.get("quant_algo") == _MIXED:
        found = found.get("quantized_layers", {}).get(name, {})
    return found


def _algorithm(layer: PackedLayer) -> str:
    return _ALGORITHMS[bool(layer.config.weight_only)]


def _declared(layers: Mapping[str, PackedLayer]) -> dict[str, Any]:
    """Return the algorithm of all layers, or of each one where there are several."""
    found = set(map(_algorithm, layers.values()))
    if len(found) == 1:
        return {"quant_algo": found.pop()}
    each = {
        name: {"quant_algo": _algorithm(layer), "group_size": layer.fmt.block}
        for name, layer in layers.items()
    }
    return {"quant_algo": _MIXED, "quantized_layers": each}
