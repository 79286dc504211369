"""The schemes of compressed-tensors as data: the arguments of weights and inputs in a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import expected
from .layer import Scheme, is_tile

# The values of arguments that a config does not give.
_UNSAID = {"symmetric": True, "dynamic": False}


class CtScheme(NamedTuple):
    """The words of a group of compressed-tensors for a format; arguments as far as they differ.

    Attributes:
        format: its name for the codes and scales on disk.
        weights: the arguments of weights.
        inputs: those of inputs.
        static: those of inputs that have one stored scale, None where they cannot.
    """

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]
    static: Mapping[str, Any] | None = None


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

# Other names of the formats, for the same tensors.
_ALIASES = {"naive-quantized": "float-quantized"}


def group_args(fmt: str, weight_only: bool, static_inputs: bool = False) -> dict[str, Any]:
    """Return a group of config_groups, but for its targets."""
    scheme = SCHEMES[fmt]
    inputs = None
    if not weight_only:
        inputs = scheme.static if static_inputs else scheme.inputs
    return {
        "format": scheme.format,
        "weights": {**_UNSAID, **scheme.weights},
        "input_activations": None if inputs is None else {**_UNSAID, **inputs},
        "output_activations": None,
    }


def read_scheme(group: Mapping[str, Any], whole: str) -> Scheme:
    """Return the scheme that a group says; whole: the format of the folder.

    Raises ValueError for one that fp4pass does not read.
    """
    named = group.get("format")
    label = str(named or whole)
    label = _ALIASES.get(label, label)
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if label == SCHEMES["fp8_block"].format and (tile := _other_tile(weights)):
        return Scheme("fp8_block", inputs is None, tile=tile)
    labelled = {key: each for key, each in SCHEMES.items() if each.format == label}
    if not named and not labelled:
        # Old folders of several groups do not name that of each.
        labelled = SCHEMES
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
    known = "inputs in the format of the weights or in floating point"
    raise ValueError(expected("a group", known, dict(inputs)))


def _other_tile(weights: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the rows and columns of the blocks of FP8 weights, () for the usual ones or none."""
    usual, tile = SCHEMES["fp8_block"].weights, weights.get("block_structure")
    if weights.get("strategy") == "group":
        tile = 1, weights.get("group_size")
    elif weights.get("strategy") != usual["strategy"] or _plain(tile) == usual["block_structure"]:
        return ()
    own = {"strategy", "block_structure", "group_size"}
    rest = {key: value for key, value in weights.items() if key not in own}
    return tuple(tile or ()) if is_tile(tile) and _says(rest, usual) else ()


def _says(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether arguments, as far as given, are those wanted."""
    wanted = {**_UNSAID, **wanted}
    keys: tuple[str, ...] = ("num_bits", "type", "symmetric", "strategy", "block_structure")
    # In 4 bits other blocks are read, and inputs whatever they say of their scales.
    keys += ("dynamic", "group_size") if wanted["num_bits"] == 8 else ()
    return all(_plain(given.get(key)) in (None, _plain(wanted.get(key))) for key in keys)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
