"""The contract of a method, and the registry that finds one by its name or its options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import (
    DtypeError,
    NonFiniteError,
    OptionError,
    ShapeError,
    expected,
    require_type,
    unknown_name,
)
from .statistics import Stats


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds on the optimum of each block.

    Attributes:
        loss: float64 [N, K / block], r^T H r.
        bound: float64 [N, K / block]; no scale of the format with any codes is below it, to a part
            in 1e9. Eigenvalues of H below 1e-7 of its largest count as that.
    """

    loss: Tensor
    bound: Tensor

    @property
    def proved(self) -> float:
        """The share of the blocks that are proved optimal."""
        return float((self.bound == self.loss).double().mean())

    @property
    def gap(self) -> float:
        """The part of the loss that lies above the bounds: what could be won at most."""
        total = float(self.loss.sum())
        return 1.0 - float(self.bound.sum()) / total if total else 0.0


@dataclass(frozen=True, eq=False)
class MethodResult:
    """A quantized weight with what the method proved of it, None if it proves nothing."""

    state: QuantState
    certificate: Certificate | None = None


# A method may return the quantized weight alone.
MethodFunction = Callable[[Tensor, Stats, Format, float, Any], QuantState | MethodResult]
TargetFunction = Callable[[Tensor, Stats, Any], Tensor]


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        name: its name.
        options: the frozen dataclass of its options.
        needs: the fields of Stats without which it cannot run.
        function: weight [N, K], stats, format, global scale and options to the quantized weight.
        target: what it approximates in place of a weight [N, K]; by default the weight itself.
    """

    name: str
    options: type
    needs: tuple[str, ...]
    function: MethodFunction
    target: TargetFunction = lambda weight, stats, options: weight

    def quantize(
        self, weight: Tensor, stats: Stats, fmt: Format, global_scale: float, options: Any
    ) -> MethodResult:
        """Return what the function finds, as a MethodResult."""
        found = self.function(weight, stats, fmt, global_scale, options)
        return found if isinstance(found, MethodResult) else MethodResult(found)


METHODS: dict[str, Method] = {}


def method(
    name: str, options: type, needs: tuple[str, ...] = (), **more: TargetFunction
) -> Callable[[MethodFunction], MethodFunction]:
    """Register `function(weight, stats, fmt, global_scale, options)` as a method.

    Args:
        name: its name.
        options: the frozen dataclass of its options.
        needs: the fields of Stats that it takes.
        **more: `target`, if it approximates something else than the weight.
    """

    def register(function: MethodFunction) -> MethodFunction:
        METHODS[name] = Method(name, options, needs, function, **more)
        return function

    return register


def resolve_method(choice: object) -> tuple[Method, Any]:
    """Return the method and its options for a name, or for an options object.

    Options may have needs beyond those of their method.

    Raises:
        OptionError: no method is registered for it.
    """
    if isinstance(choice, str):
        if choice not in METHODS:
            raise unknown_name("Method", choice, METHODS)
        return METHODS[choice], METHODS[choice].options()
    for candidate in METHODS.values():
        if type(choice) is candidate.options:
            needs = (*candidate.needs, *getattr(choice, "needs", ()))
            return dataclasses.replace(candidate, needs=needs), choice
    names = f"a name ({', '.join(sorted(METHODS))}) or the options of a method, such as Hessian()"
    raise OptionError(expected("method", names, choice))


def method_to_dict(options: Any) -> dict[str, Any]:
    """Return the options of a method as JSON has them; `method_from_dict` reads it."""
    return {"name": resolve_method(options)[0].name, **dataclasses.asdict(options)}


def method_from_dict(data: Mapping[str, Any]) -> Any:
    """Return the options object of a name and options, as in {"name": "gptq", "damping": 0.1}.

    Raises:
        OptionError: the name is missing or unknown, or an option does not exist.
    """
    require_type("method", "a mapping with a name", data, Mapping)
    rest = dict(data)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise OptionError(expected("method", "a name, as in {name: hessian}", dict(data)))
    if name not in METHODS:
        raise unknown_name("Method", name, METHODS)
    kind = METHODS[name].options
    known = [field.name for field in dataclasses.fields(kind)]
    for key in rest:
        if key not in known:
            raise unknown_name(f"Method {name!r}: the option", key, known)
    return kind(**rest)


def weight_problem(weight: Tensor, fmt: Format) -> str | None:
    """Return why a tensor cannot be a weight in this format, or None."""
    require_type("weight", "a torch.Tensor", weight, Tensor)
    require_type("fmt", "a Format", fmt, Format)
    if weight.dtype not in ops.FLOATS:
        return f"its weight is {weight.dtype}, not float32, bfloat16, float16 or float64"
    if weight.ndim != 2:
        return f"its weight has shape {tuple(weight.shape)}, not [N, K]"
    if not weight.numel():
        return f"its weight has shape {tuple(weight.shape)}, which is empty"
    if weight.shape[1] % fmt.block:
        return (
            f"in_features={weight.shape[1]} is not a multiple of {fmt.block} "
            f"(the block of {fmt.key})"
        )
    return None


def weight_amax(weight: Tensor) -> float:
    """Return the largest magnitude in float32, not finite if any element is not."""
    require_type("weight", "a torch.Tensor", weight, Tensor)
    if not weight.numel():
        raise ShapeError(expected("weight", "elements", tuple(weight.shape)))
    low, high = torch.aminmax(weight.detach())
    return max(abs(float(low.float())), abs(float(high.float())))


def require_weight(weight: Tensor, fmt: Format) -> None:
    """Raise ShapeError, DtypeError or NonFiniteError for a weight that cannot be quantized."""
    problem = weight_problem(weight, fmt)
    if problem is not None:
        kind = ShapeError if weight.dtype in ops.FLOATS else DtypeError
        raise kind(f"The weight cannot be quantized: {problem}.")
    if not math.isfinite(weight_amax(weight)):
        raise NonFiniteError("The weight holds NaN or infinity. Repair it before it is quantized.")


def search_scales(
    weight: Tensor, fmt: Format, global_scale: float, objective: str, hessian: Tensor | None = None
) -> QuantState:
    """Quantize a weight by the exact search of `ops.search`.

    Args:
        weight: [N, K].
        fmt: the format.
        global_scale: the multiplier of all block scales.
        objective: "naive", "sse" or "hessian".
        hessian: [ceil(K / 32), 32, 32] float32 for "hessian".

    Raises:
        ShapeError: the weight has no whole blocks.
        DtypeError: it is no float tensor.
        NonFiniteError: it holds NaN or infinity.
    """
    require_weight(weight, fmt)
    require_type("global_scale", "a positive number", global_scale, float, int)
    if not 0.0 < global_scale < math.inf:
        raise OptionError(expected("global_scale", "a positive number", global_scale))
    packed, scale = ops.search(weight.detach(), hessian, global_scale, fmt.key, objective)
    return QuantState(packed, scale, global_scale, fmt, tuple(weight.shape), weight.dtype)
