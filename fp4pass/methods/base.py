"""What a method is, and the registry that finds one by its name or its options."""

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
from ..errors import DtypeError, NonFiniteError, OptionError, ShapeError, expected, unknown_name
from ..kernels.rotate.reference import rotate_blocks, rotate_hessian
from ..kernels.statistics.reference import diagonal_blocks


@dataclass(frozen=True, eq=False)
class Stats:
    """What calibration saw of one linear's input.

    block_hessian: float32 [ceil(K / 32), 32, 32], the sum over tokens of x x^T, or None if it was
    not collected; tokens: how many; input_amax: the largest magnitude, 0.0 without tokens;
    hessian: the same sum as a whole, float32 [K, K], or None; cross: float32 [K, K], the sum of
    (a - x) x^T, a the input that the float model has in place of x, or None.
    """

    block_hessian: Tensor | None = None
    tokens: int = 0
    input_amax: float = 0.0
    hessian: Tensor | None = None
    cross: Tensor | None = None

    def to(self, device: torch.device) -> Stats:
        """Return the same statistics on a device."""
        moved = {
            name: value.to(device)
            for name in ("block_hessian", "hessian", "cross")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **moved)

    def rotated(self, rotation: int) -> Stats:
        """Of rotated inputs; the largest magnitude as an upper bound. A rotation by more than 32
        needs the whole Hessian, else blocks count as uncorrelated."""
        amax = self.input_amax * math.sqrt(rotation)
        if self.hessian is not None:
            whole = rotate_hessian(self.hessian, rotation)
            return Stats(diagonal_blocks(whole), self.tokens, amax, whole)
        blocks = self.block_hessian
        if blocks is not None:
            blocks = rotate_blocks(blocks, rotation)
        return Stats(blocks, self.tokens, amax)


MethodFunction = Callable[[Tensor, Stats, Format, float, Any], QuantState]
TargetFunction = Callable[[Tensor, Stats, Any], Tensor]


@dataclass(frozen=True)
class Method:
    """A registered method. needs: the fields of Stats without which it cannot run; target: what
    it is given in place of a weight [N, K], by default the weight itself."""

    name: str
    options: type
    needs: tuple[str, ...]
    function: MethodFunction
    target: TargetFunction = lambda weight, stats, options: weight


METHODS: dict[str, Method] = {}


def method(
    name: str, options: type, needs: tuple[str, ...] = (), **more: TargetFunction
) -> Callable[[MethodFunction], MethodFunction]:
    """Register `function(weight, stats, fmt, global_scale, options)` as a method.

    more: `target`, if it has one.
    """

    def register(function: MethodFunction) -> MethodFunction:
        METHODS[name] = Method(name, options, needs, function, **more)
        return function

    return register


def resolve_method(choice: object) -> tuple[Method, Any]:
    """The method and its options for a name (with default options) or an options object.

    Options may have needs beyond those of their method. Raises OptionError for anything that is
    not registered.
    """
    if isinstance(choice, str):
        if choice not in METHODS:
            raise unknown_name("Method", choice, METHODS)
        return METHODS[choice], METHODS[choice].options()
    for candidate in METHODS.values():
        if type(choice) is candidate.options:
            needs = (*candidate.needs, *getattr(choice, "needs", ()))
            return dataclasses.replace(candidate, needs=needs), choice
    raise OptionError(
        f"Method {choice!r} is neither a name ({', '.join(sorted(METHODS))}) nor the options of "
        "a method, such as Hessian()."
    )


def method_to_dict(options: Any) -> dict[str, Any]:
    """Return the options of a method as JSON has them; `method_from_dict` reads it."""
    return {"name": resolve_method(options)[0].name, **dataclasses.asdict(options)}


def method_from_dict(data: Mapping[str, Any]) -> Any:
    """Return the options object of a name and options, as in {"name": "gptq", "damping": 0.1}.

    Raises:
        OptionError: the name is missing or unknown, or an option does not exist.
    """
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
    """Why a tensor cannot be a weight in this format, or None."""
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
    """The largest magnitude in float32; not finite if any element is not. Makes no copy."""
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
    """Quantize a weight [N, K] by the exact search of `ops.search`.

    Raises ShapeError, DtypeError or NonFiniteError for a weight that cannot be quantized.
    """
    require_weight(weight, fmt)
    packed, scale = ops.search(weight.detach(), hessian, global_scale, fmt.key, objective)
    return QuantState(packed, scale, global_scale, fmt, tuple(weight.shape), weight.dtype)
