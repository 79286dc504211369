"""The layout of NVIDIA's ModelOpt: global scales that multiply, and a config of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..._version import __version__
from ...core.formats import WHOLE
from ...errors import UnreadError
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .base import CacheLayout, Layout, register_layout
from .compressed_tensors import group_of
from .layer import PackedLayer, Scheme, fused_names
from .names import as_globs, from_globs

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
