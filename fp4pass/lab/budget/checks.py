"""Check the arguments of `allocate`, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from ...distributed import ranks
from ...errors import ABOVE_0, OptionError, StateError, expected, require_number, unknown_name
from ...methods import Sse
from ...quantization.checks import require_float
from ...quantization.plan import Plan
from ...quantization.recipe import require_undecided
from ...record.config import LinearConfig, Rule
from ...record.quality import get_quality
from ...record.schemes import scheme_fields
from ...record.schemes import schemes as known_schemes
from .groups import FLOAT

# Names of the scheme of layers that stay as they are.
_FLOATS = (FLOAT, "bf16", "bfloat16")


def budget_of(bits: float | None, kl: float | None) -> dict[str, float]:
    """Return the budget that is given. Raises OptionError unless it is one, and positive."""
    given = {name: value for name, value in (("bits", bits), ("kl", kl)) if value is not None}
    if len(given) != 1:
        got = "both" if given else "neither"
        raise OptionError(
            f"{expected('The budget', 'bits= or kl=', got)} bits=5.0 is for the best model of 5 "
            "bits a weight, kl=0.02 for the smallest one within that KL."
        )
    ((name, value),) = given.items()
    require_number(name, "a positive number", value, float, ABOVE_0)
    return {name: float(value)}


def schemes_of(schemes: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the schemes that quantize, and whether layers may stay as they are."""
    if isinstance(schemes, str) or not isinstance(schemes, Sequence):
        raise OptionError(expected("schemes", "a list of names", repr(schemes)))
    quantizing = tuple(dict.fromkeys(each for each in schemes if each not in _FLOATS))
    for name in quantizing:
        base = str(name).partition(":")[0]
        if base not in known_schemes():
            raise unknown_name("schemes: Scheme", name, [*known_schemes(), *_FLOATS])
        scheme_fields(name)
    keeps_float = any(each in _FLOATS for each in schemes)
    if not quantizing or len(quantizing) + keeps_float < 2:
        got = ", ".join(map(str, schemes)) or "none"
        raise OptionError(
            f"{expected('schemes', 'two or more, at least one that quantizes', got)} Add 'bf16' to "
            "leave layers as they are, or call convert for a single scheme."
        )
    return quantizing, keeps_float


def options_of(method: object, quality: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LinearConfig` beside the scheme."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in ("fmt", "weight_only", "block"):
        if name in found:
            raise OptionError(
                f"{name} and schemes are both given, and schemes decides {name}. Leave {name} out."
            )
    if quality is None:
        return {"method": Sse() if method is None else method, **found}
    get_quality(quality)
    require_undecided(quality, {**({} if method is None else {"method": method}), **found})
    return found


def settled(rules: Sequence[Rule], config: LinearConfig) -> tuple[Rule, ...]:
    """Return rules; those that name a format also say whether inputs are quantized."""

    def with_inputs(options: Any) -> Any:
        if options is None or "fmt" not in options:
            return options
        return {"weight_only": config.weight_only, **options}

    return tuple((pattern, with_inputs(options)) for pattern, options in rules)


def require_possible(root: nn.Module) -> None:
    """Raise StateError or OptionError for models and processes that this is not for."""
    if require_float(root, "allocate") is not None:
        raise StateError(
            "The model is prepared, and allocate prepares copies of it. Start from the float model "
            "again."
        )
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "allocate: expected a live model, got a graph, whose layers cannot be exchanged. "
            "Allocate before the model is traced; the rules fit its graph, too."
        )
    if root.training:
        raise StateError(
            "Expected a model in evaluation mode, got one in training mode, in which dropout is "
            "on. Call model.eval() first."
        )
    if ranks().size > 1:
        raise OptionError(
            f"allocate: expected one process, got {ranks().size}. Run it in one, and convert with "
            "its rules in all of them."
        )


def too_few(bits: float, least: float) -> OptionError:
    """Return the error for a budget that no scheme is small enough for."""
    return OptionError(
        f"bits={bits:g}: the smallest of the schemes takes {least:.4f} bits a weight here. Give at "
        "least that, or a smaller scheme."
    )


def bits_of(root: nn.Module, plan: Plan) -> float:
    """Return the bits of a weight of the layers of a plan, once it is carried out."""
    weights = [members[0] for members in plan.by_weight()]
    count = sum(math.prod(layer.shape) for layer in weights)
    bits = (
        math.prod(each.shape) * each.config.format.bits_per_weight(each.shape) for each in weights
    )
    return sum(bits) / count
