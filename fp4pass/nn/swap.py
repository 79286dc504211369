"""Turning the linears of a model into layers on 4-bit or 8-bit weights."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..core.formats import Format
from ..errors import (
    NonFiniteError,
    OptionError,
    RuleError,
    ShapeError,
    StateError,
    nearest,
    unknown_name,
)
from ..graph.match import is_conv1d
from ..linear import QuantizedLinear
from ..methods import weight_amax, weight_problem
from ..ops import FLOATS
from ..quantization.replace import use_slow_paths
from ..quantization.scan import BuiltInRules, LinearLayer, SkippedLayer, scan_layers, skip
from .base import StoredLinear
from .layers import (
    QUANT_TYPES,
    Linear4bit,
    Linear8bitLt,
    scheme_of,
    unquantized_4bit,
    unquantized_8bit,
)

# The kind that is no quant_type.
INT8 = "int8"


def swap(
    model: nn.Module,
    kind: str = "nf4",
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    block_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    threshold: float = 6.0,
) -> dict[str, str]:
    """Turn the linears of a model into Linear4bit or Linear8bitLt, in place.

    kind: a quant_type of Linear4bit, or "int8". include, exclude: globs on the names of linears;
    exclude goes first. block_size, compute_dtype: of Linear4bit. threshold: of Linear8bitLt.
    Output embeddings, weights that are an embedding's and routers are left alone unless `include`
    has their whole name. On the meta device the layers wait for a state dict of quantized ones.
    Returns for the name of every linear its kind, or the reason why it was left alone.
    Everything is checked before the first one is replaced. Raises OptionError, RuleError for a
    pattern that matches nothing or takes apart what shares a weight, ShapeError for a whole name
    in `include` that cannot be taken, NonFiniteError, and StateError if there is nothing to take.
    """
    make, scheme = _maker(kind, block_size, compute_dtype, threshold)
    wanted = [include] if isinstance(include, str) else list(include)
    unwanted = [exclude] if isinstance(exclude, str) else list(exclude)
    found = _layers(model)
    _require_matches({"include": wanted, "exclude": unwanted}, [layer.name for layer in found])
    built_in = BuiltInRules(model)
    decided = [_decide(layer, wanted, unwanted, scheme, built_in) for layer in found]
    _require_alike(decided)
    taken = [layer for layer in decided if not isinstance(layer, SkippedLayer)]
    if not taken:
        skipped = (layer for layer in decided[:5] if isinstance(layer, SkippedLayer))
        reasons = "; ".join(f"{layer.label}: {layer.skip_reason}" for layer in skipped)
        raise StateError(
            f"The model has no linear layer to swap. {reasons or 'It has no linear layer at all.'}"
        )
    for layer in taken:
        _require_finite(layer)
    made = [make(layer.module) for layer in taken]
    use_slow_paths(model)
    first: dict[int, StoredLinear] = {}
    # A bar only for models that take long enough to wonder, and where somebody looks.
    bar = tqdm(made, desc="swap", unit="layer", delay=2.0, leave=False, disable=None)
    for layer, new in zip(taken, bar, strict=True):
        if not new.weight.is_meta:
            new.quantize_weight()
        # Layers that share a weight share its codes.
        new._buffers.update(first.setdefault(layer.weight_key, new)._buffers)
        _become(layer.module, new)
    return {
        layer.name: layer.skip_reason if isinstance(layer, SkippedLayer) else kind
        for layer in decided
    }


def _maker(
    kind: str, block_size: int | None, compute_dtype: torch.dtype | None, threshold: float
) -> tuple[Callable[[nn.Module], Linear4bit | Linear8bitLt], Format | None]:
    """What makes a layer of a linear, not quantized yet, and the format that widths must fit."""
    if kind == INT8:
        if block_size is not None or compute_dtype is not None:
            raise OptionError("block_size and compute_dtype are options of 4-bit kinds, not int8.")
        return partial(unquantized_8bit, threshold=threshold), None
    if kind not in QUANT_TYPES:
        raise unknown_name("kind", kind, [*QUANT_TYPES, INT8])
    scheme = scheme_of(kind, block_size)
    make = partial(
        unquantized_4bit, quant_type=kind, block_size=block_size, compute_dtype=compute_dtype
    )
    return make, scheme if isinstance(scheme, Format) else None


def _layers(model: nn.Module) -> list[LinearLayer]:
    """Every linear layer of a model; those that cannot be swapped are skipped already."""
    layers = {layer.name: layer for layer in scan_layers(model)}
    for name, layer in layers.items():
        if isinstance(layer, SkippedLayer):
            continue
        if not isinstance(layer.module, nn.Linear | StoredLinear) and not is_conv1d(layer.module):
            reason = "a graph reads its weight: fp4pass.convert rewrites graphs"
            layers[name] = skip(layer, reason)
        elif "forward" in vars(layer.module):
            reason = "its forward is not its class's (accelerate's hooks do that)"
            layers[name] = skip(layer, reason)
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear | QuantizedLinear):
            shape = (module.out_features, module.in_features)
            own = LinearLayer(name, module, id(module), shape)
            layers[name] = skip(own, f"is {module} already")
    return list(layers.values())


def _decide(
    layer: LinearLayer,
    wanted: Sequence[str],
    unwanted: Sequence[str],
    fmt: Format | None,
    built_in: BuiltInRules,
) -> LinearLayer:
    """A layer to take, or one that is skipped."""
    if isinstance(layer, SkippedLayer):
        impossible = layer.skip_reason
    else:
        impossible = _weight_reason(layer, fmt)
    reason = _pattern_reason(layer.name, wanted, unwanted)
    if layer.name in wanted:
        if not reason and impossible:
            raise ShapeError(
                f"{layer.name} cannot be swapped: {impossible}. Leave it out of include, or "
                "choose another kind."
            )
    else:
        reason = reason or impossible or _reserved(layer, built_in)
    return skip(layer, reason) if reason else layer


def _require_matches(patterns: Mapping[str, Sequence[str]], names: Sequence[str]) -> None:
    for option, globs in patterns.items():
        for glob in globs:
            if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                raise RuleError(
                    f"{option}={glob!r} matches no linear of the model, whose names look like "
                    f"{names[0] if names else '(there are none)'!r}.{nearest(glob, names)}"
                )


def _pattern_reason(name: str, include: Sequence[str], exclude: Sequence[str]) -> str:
    for glob in exclude:
        if fnmatch.fnmatchcase(name, glob):
            return f"exclude has {glob!r}"
    return "" if any(fnmatch.fnmatchcase(name, glob) for glob in include) else "not in include"


def _weight_reason(layer: LinearLayer, fmt: Format | None) -> str:
    """Why the weight of a layer cannot be taken, or ""; fmt: whose blocks its rows must be."""
    weight: Tensor = layer.module.weight  # type: ignore[assignment]
    if fmt is not None:
        return weight_problem(weight.t() if layer.transposed else weight, fmt) or ""
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}, not float32, bfloat16, float16 or float64"
    return "" if weight.numel() else f"its weight has shape {tuple(weight.shape)}, which is empty"


def _reserved(layer: LinearLayer, built_in: BuiltInRules) -> str:
    """Why a layer is skipped unless it is named, or ""."""
    reason, _, _ = built_in.reason(layer).partition(";")
    return f"{reason}; its whole name in include takes it" if reason else ""


def _require_alike(layers: Sequence[LinearLayer]) -> None:
    """Layers that share a weight are taken together, or not at all."""
    first: dict[int, LinearLayer] = {}
    for layer in layers:
        other = first.setdefault(layer.weight_key, layer)
        left, taken = (layer, other) if isinstance(layer, SkippedLayer) else (other, layer)
        if isinstance(left, SkippedLayer) and not isinstance(taken, SkippedLayer):
            raise RuleError(
                f"{left.name} and {taken.name} share one weight, and only {taken.name} would be "
                f"swapped ({left.name}: {left.skip_reason}). Exclude it, too."
            )


def _require_finite(layer: LinearLayer) -> None:
    weight: Tensor = layer.module.weight  # type: ignore[assignment]
    if not weight.is_meta and not math.isfinite(weight_amax(weight)):
        raise NonFiniteError(
            f"{layer.label}: its weight holds NaN or infinity. Repair the checkpoint, or skip the "
            f"layer with exclude=[{layer.name!r}]."
        )


def _become(module: nn.Module, layer: StoredLinear) -> None:
    """Give a linear the class and the tensors of a layer: the same object, with its own hooks."""
    module.__class__ = type(layer)
    taken = {n: value for n, value in vars(layer).items() if not n.startswith("_")}
    module.__dict__.update(taken, _parameters=layer._parameters, _buffers=layer._buffers)
