"""Swap the linear layers of a model for layers with 4-bit or 8-bit weights."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.formats import Format
from ..core.progress import track
from ..errors import (
    NonFiniteError,
    OptionError,
    RuleError,
    ShapeError,
    StateError,
    expected,
    nearest,
    unknown_name,
)
from ..graph.match import is_conv1d
from ..kernels.statistics.naive import weight_amax
from ..nn.packed_linear import PackedLinear, swap_class
from ..ops import FLOATS
from ..ops.checks import weight_problem
from ..quantization.replace import use_slow_paths
from ..quantization.rules import BuiltInRules
from ..quantization.scan import LinearLayer, SkippedLayer, scan_layers, skip
from .layer import QuantizableLinear
from .linear4bit import QUANT_TYPES, Linear4bit, scheme_of
from .linear8bit import Linear8bitLt

# The kind of Linear8bitLt; every other one is a quant_type of Linear4bit.
INT8 = "int8"

_THRESHOLD = 6.0


def swap(
    model: nn.Module,
    kind: str = "nf4",
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    block_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    threshold: float = _THRESHOLD,
) -> dict[str, str]:
    """Swap the linear layers of a model for Linear4bit or Linear8bitLt, in place.

    Output embeddings, weights that are an embedding's and routers are skipped unless `include` has
    their whole name. On the meta device nothing is quantized: the layers wait for a state dict of
    quantized ones. Everything is checked before the first layer is swapped.

    Args:
        model: the model; its modules stay the same objects.
        kind: a quant_type of Linear4bit, or "int8" for Linear8bitLt.
        include: globs on the names of linear layers.
        exclude: globs on the names of layers to skip; they come before `include`.
        block_size: as in Linear4bit.
        compute_dtype: as in Linear4bit.
        threshold: as in Linear8bitLt.

    Returns:
        For the name of each linear layer its kind, or the reason why it was skipped.

    Raises:
        OptionError: an option is unknown or does not fit the kind.
        RuleError: a glob matches nothing, or only some of the layers that share a weight.
        ShapeError: `include` has the whole name of a layer that cannot be swapped.
        NonFiniteError: a weight holds NaN or infinity.
        StateError: no layer is left to swap.

    Example:
        >>> fp4pass.parity.swap(model, "nf4", exclude="2")
        {'0': 'nf4', '2': "exclude has '2'"}
    """
    if not isinstance(model, nn.Module):
        raise OptionError(expected("model", "a torch.nn.Module", type(model).__name__))
    make, fmt = _maker(kind, block_size, compute_dtype, threshold)
    found = _layers(model)
    names = [layer.name for layer in found]
    included, excluded = _globs("include", include, names), _globs("exclude", exclude, names)
    built_in = BuiltInRules(model)
    decided = []
    for layer in found:
        reason = _skip_reason(layer, included, excluded, fmt, built_in)
        decided.append(skip(layer, reason) if reason else layer)
    _require_alike(decided)
    taken = [layer for layer in decided if not isinstance(layer, SkippedLayer)]
    if not taken:
        skipped = (layer for layer in decided[:5] if isinstance(layer, SkippedLayer))
        reasons = "; ".join(f"{layer.label}: {layer.skip_reason}" for layer in skipped)
        raise StateError(
            f"The model has no linear layer to swap. {reasons or 'It has no linear layer at all.'}"
        )
    for layer in taken:
        weight: Any = layer.module.weight
        if not weight.is_meta and not math.isfinite(weight_amax(weight)):
            raise NonFiniteError(
                f"{layer.label}: its weight holds NaN or infinity. Repair the checkpoint, or skip "
                f"the layer with exclude=[{layer.name!r}]."
            )
    made = [make(layer.module) for layer in taken]
    use_slow_paths(model)
    first: dict[int, QuantizableLinear] = {}
    pairs = list(zip(taken, made, strict=True))
    for layer, new in track(pairs, "swap", unit="layers"):
        if not new.weight.is_meta:
            new.quantize_weight()
        # Layers that share a weight share its codes.
        new._buffers.update(first.setdefault(layer.weight_key, new)._buffers)
        attributes = {name: each for name, each in vars(new).items() if not name.startswith("_")}
        swap_class(
            layer.module,
            type(new),
            weight=new._parameters.get("weight"),
            buffers=new._buffers,
            attributes=attributes,
        )
    return {
        layer.name: layer.skip_reason if isinstance(layer, SkippedLayer) else kind
        for layer in decided
    }


def _maker(
    kind: str, block_size: int | None, compute_dtype: torch.dtype | None, threshold: float
) -> tuple[Callable[[nn.Module], Linear4bit | Linear8bitLt], Format | None]:
    """Return how a linear layer becomes an unquantized one, and the format that rows must fit."""
    if kind == INT8:
        if block_size is not None or compute_dtype is not None:
            raise OptionError(
                "block_size and compute_dtype: expected None for kind 'int8', as they are options "
                "of Linear4bit."
            )
        return partial(Linear8bitLt.unquantized, threshold=threshold), None
    if threshold != _THRESHOLD:
        raise OptionError(
            f"threshold: expected none for kind {kind!r}, as it is an option of Linear8bitLt."
        )
    if kind not in QUANT_TYPES:
        raise unknown_name("kind", kind, [*QUANT_TYPES, INT8])
    scheme = scheme_of(kind, block_size)
    options: dict[str, Any] = {
        "quant_type": kind,
        "block_size": block_size,
        "compute_dtype": compute_dtype,
    }
    fmt = scheme if isinstance(scheme, Format) else None
    return partial(Linear4bit.unquantized, **options), fmt


def _globs(option: str, given: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the globs of an option. Raises RuleError for one that matches no layer."""
    globs = [given] if isinstance(given, str) else given
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise OptionError(expected(option, "a glob or a list of globs", repr(given)))
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            raise RuleError(
                f"{option}={glob!r} matches no linear layer, whose names look like "
                f"{names[0] if names else '(there are none)'!r}.{nearest(glob, names)}"
            )
    return list(globs)


def _layers(model: nn.Module) -> list[LinearLayer]:
    """Return every linear layer of a model; those that cannot be swapped are skipped already."""
    layers = {layer.name: layer for layer in scan_layers(model)}
    for name, layer in layers.items():
        if isinstance(layer, SkippedLayer):
            continue
        if not isinstance(layer.module, nn.Linear) and not is_conv1d(layer.module):
            reason = "a graph reads its weight: fp4pass.convert rewrites graphs"
            layers[name] = skip(layer, reason)
        elif "forward" in vars(layer.module):
            reason = "its forward is not its class's (accelerate's hooks do that)"
            layers[name] = skip(layer, reason)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            shape = (module.out_features, module.in_features)
            own = LinearLayer(name, module, id(module), shape)
            layers[name] = skip(own, f"is {module} already")
    return list(layers.values())


def _skip_reason(
    layer: LinearLayer,
    included: Sequence[str],
    excluded: Sequence[str],
    fmt: Format | None,
    built_in: BuiltInRules,
) -> str:
    """Return why a layer is not swapped, or ""."""
    for glob in excluded:
        if fnmatch.fnmatchcase(layer.name, glob):
            return f"exclude has {glob!r}"
    if not any(fnmatch.fnmatchcase(layer.name, glob) for glob in included):
        return "not in include"
    if isinstance(layer, SkippedLayer):
        impossible = layer.skip_reason
    else:
        impossible = _weight_reason(layer, fmt)
    if layer.name in included:
        if impossible:
            raise ShapeError(
                f"{layer.name} cannot be swapped: {impossible}. Leave it out of include, or "
                "choose another kind."
            )
        return ""
    held, _, _ = ("", "", "") if impossible else built_in.reason(layer).partition(";")
    return f"{held}; its whole name in include swaps it" if held else impossible


def _weight_reason(layer: LinearLayer, fmt: Format | None) -> str:
    """Return why the weight of a layer cannot be swapped, or ""."""
    weight: Tensor = layer.module.weight  # type: ignore[assignment]
    if fmt is not None:
        return weight_problem(weight.t() if layer.transposed else weight, fmt) or ""
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}, not float32, bfloat16, float16 or float64"
    return "" if weight.numel() else f"its weight has shape {tuple(weight.shape)}, which is empty"


def _require_alike(layers: Sequence[LinearLayer]) -> None:
    """Raise RuleError unless layers that share a weight are all swapped, or none of them."""
    first: dict[int, LinearLayer] = {}
    for layer in layers:
        other = first.setdefault(layer.weight_key, layer)
        skipped, taken = (layer, other) if isinstance(layer, SkippedLayer) else (other, layer)
        if isinstance(skipped, SkippedLayer) and not isinstance(taken, SkippedLayer):
            raise RuleError(
                f"{skipped.name} and {taken.name} share one weight, and only {taken.name} would be "
                f"swapped ({skipped.name}: {skipped.skip_reason}). Exclude it, too."
            )
