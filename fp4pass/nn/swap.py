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
from ..linear import QuantizedLinear
from ..methods import weight_amax, weight_problem
from ..ops import FLOATS
from ..packed_linear import PackedLinear, become
from ..quantization.plan import (
    Site,
    built_in_reason,
    embedding_weights,
    graph_sites,
    module_sites,
    output_embeddings,
    selected,
)
from ..quantization.replace import use_slow_paths
from .base import QuantizableLinear
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
    sites = _sites(model)
    _require_matches({"include": wanted, "exclude": unwanted}, [site.name for site in sites])
    heads, tied = output_embeddings(model), embedding_weights(model)
    for site in sites:
        impossible = site.reason or _weight_reason(site, scheme)
        site.reason = _pattern_reason(site.name, wanted, unwanted)
        if site.name in wanted and not site.reason and impossible:
            raise ShapeError(
                f"{site.name} cannot be swapped: {impossible}. Leave it out of include, or choose "
                "another kind."
            )
        if site.name not in wanted:
            site.reason = site.reason or impossible or _reserved(site, heads, tied)
    _require_equal_fates(sites)
    taken = selected(sites)
    if not taken:
        reasons = "; ".join(f"{site.name or 'the model'}: {site.reason}" for site in sites[:5])
        raise StateError(
            f"The model has no linear to swap. {reasons or 'It has no linear at all.'}"
        )
    for site in taken:
        _require_finite(site)
    layers = [make(site.module) for site in taken]
    use_slow_paths(model)
    first: dict[int, QuantizableLinear] = {}
    # A bar only for models that take long enough to wonder, and where somebody looks.
    bar = tqdm(layers, desc="swap", unit="layer", delay=2.0, leave=False, disable=None)
    for site, layer in zip(taken, bar, strict=True):
        if not layer.weight.is_meta:
            layer.quantize_weight()
        # Linears that share a weight share its codes.
        layer._buffers.update(first.setdefault(site.weight_key, layer)._buffers)
        attributes = {name: each for name, each in vars(layer).items() if not name.startswith("_")}
        become(
            site.module,
            type(layer),
            weight=layer._parameters.get("weight"),
            buffers=layer._buffers,
            attributes=attributes,
        )
    return {site.name: site.reason or kind for site in sites}


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


def _sites(model: nn.Module) -> list[Site]:
    """Every linear of a model, with the reason why it is impossible to swap, or ""."""
    sites = {site.name: site for site in module_sites(model)}
    for site in graph_sites(model):
        site.reason = site.reason or "a graph reads its weight: fp4pass.convert rewrites graphs"
        sites.setdefault(site.name, site)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | QuantizedLinear):
            shape = (module.out_features, module.in_features)
            sites[name] = Site(name, module, id(module), shape, reason=f"is {module} already")
        elif name in sites and "forward" in vars(module) and not sites[name].reason:
            sites[name].reason = "its forward is not its class's (accelerate's hooks do that)"
    return list(sites.values())


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


def _weight_reason(site: Site, fmt: Format | None) -> str:
    """Why the weight of a linear cannot be taken, or ""; fmt: whose blocks its rows must be."""
    weight = site.module.weight
    assert isinstance(weight, Tensor)
    if fmt is not None:
        return weight_problem(weight.t() if site.transposed else weight, fmt) or ""
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}, not float32, bfloat16, float16 or float64"
    return "" if weight.numel() else f"its weight has shape {tuple(weight.shape)}, which is empty"


def _reserved(site: Site, heads: set[nn.Module], tied: set[int]) -> str:
    """Why a linear is left alone unless it is named, or ""."""
    reason, _, _ = built_in_reason(site, heads, tied).partition(";")
    return f"{reason}; its whole name in include takes it" if reason else ""


def _require_equal_fates(sites: Sequence[Site]) -> None:
    """What shares a weight is taken together, or not at all."""
    first: dict[int, Site] = {}
    for site in sites:
        other = first.setdefault(site.weight_key, site)
        if bool(site.reason) != bool(other.reason):
            left, taken = (site, other) if site.reason else (other, site)
            raise RuleError(
                f"{left.name} and {taken.name} share one weight, and only {taken.name} would be "
                f"swapped ({left.name}: {left.reason}). Exclude it, too."
            )


def _require_finite(site: Site) -> None:
    weight = site.module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_meta and not math.isfinite(weight_amax(weight)):
        raise NonFiniteError(
            f"{site.name or 'the model'}: its weight holds NaN or infinity. Repair the checkpoint, "
            f"or leave the layer alone with exclude=[{site.name!r}]."
        )
