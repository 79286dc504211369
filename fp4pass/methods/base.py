"""The contract of a method, and the registry that finds one by its name or its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.quant_state import QuantState
from ..errors import OptionError, expected, unknown_name
from ..ops.checks import require_weight
from .statistics import Stats


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds on the optimum of each block.

    Attributes:
        loss: float64 [N, K / block], r^T H r.
        bound: float64 [N, K / block]; no scale of the format with any codes is below it, to a part
            in 1e9. Eigenvalues of H below 1e-7 of its largest count as that.

    Example:
        >>> loss = torch.tensor([[2.0, 2.0]])
        >>> certificate = fp4pass.methods.Certificate(loss, torch.tensor([[2.0, 1.0]]))
        >>> certificate.proved, certificate.gap
        (0.5, 0.25)
    """

    loss: Tensor
    bound: Tensor

    @property
    def proved(self) -> float:
        """The share of the blocks that are proved optimal."""
        return float((self.bound == self.loss).double().mean())

    @staticmethod
    def joined(parts: Sequence[Certificate | None]) -> Certificate | None:
        """Return the bounds of several matrices as those of one, None if there are none."""
        known = [each for each in parts if each is not None]
        if not known:
            return None
        loss = torch.cat([each.loss for each in known])
        return Certificate(loss, torch.cat([each.bound for each in known]))

    @property
    def gap(self) -> float:
        """The part of the loss that lies above the bounds, the most that could be won."""
        total = float(self.loss.sum())
        return 1.0 - float(self.bound.sum()) / total if total else 0.0


# A quantized weight, and the proof of its method where it has one.
Result = tuple[QuantState, Certificate | None]
MethodFunction = Callable[..., QuantState | Result]
StackFunction = Callable[[Tensor, Format, Sequence[float], Any], list[QuantState]]
TargetFunction = Callable[[Tensor, Stats, Any], Tensor]


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        name: its name.
        options: the frozen dataclass of its options.
        needs: the fields of Stats without which it cannot run.
        function: weight [N, K], stats, format, global scale and options to the quantized weight,
            or that and a Certificate. The weight fits the format and is finite: the caller looked.
        target: returns the matrix to approximate in place of a weight [N, K], for options that have
            needs of their own.
        stack: if not None, finds what `function` does for each matrix of a stack [E, N, K], which
            have a global scale each, at once: for methods without statistics.
        rows_at_once: if not None, rows share nothing but the statistics, and `function` takes as
            `rows` a slice of them to quantize alone; it starts at a multiple of so many.
        objective: if not None, what it chooses float32 scales by: "naive", "sse" or "hessian".
            `function` then takes as `scale` the one scale of a weight, where it is known.

    Example:
        >>> fp4pass.methods.METHODS["gptq"].needs
        ('hessian',)
    """

    name: str
    options: type
    needs: tuple[str, ...]
    function: MethodFunction
    target: TargetFunction | None = None
    stack: StackFunction | None = None
    rows_at_once: int | None = None
    objective: str | None = None

    def quantize(
        self,
        weight: Tensor,
        stats: Stats,
        fmt: Format,
        global_scale: float,
        options: Any,
        **part: Any,
    ) -> QuantState:
        """Quantize a weight that nobody has looked at.

        part: `rows` and `scale`, as far as the method takes them.

        Raises:
            ShapeError: the weight is not [N, K] of whole blocks.
            DtypeError: it is no float tensor.
            NonFiniteError: it holds NaN or infinity.
        """
        require_weight(weight, fmt)
        return result_of(self.function(weight, stats, fmt, global_scale, options, **part))[0]


def result_of(found: QuantState | Result) -> Result:
    """Return what the function of a method found, which may be the weight alone."""
    return (found, None) if isinstance(found, QuantState) else found


METHODS: dict[str, Method] = {}


class MethodOptions(Protocol):
    """The options of a method: an object of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


MethodChoice = Literal["naive", "sse", "hessian", "gptq"] | MethodOptions


def method(
    name: str, options: type, needs: tuple[str, ...] = (), **more: Any
) -> Callable[[MethodFunction], MethodFunction]:
    """Register `function(weight, stats, fmt, global_scale, options)` as a method.

    Args:
        name: its name.
        options: the frozen dataclass of its options.
        needs: the fields of Stats that it takes.
        **more: `target`, `stack`, `rows_at_once` and `objective` of `Method`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Rounded:
        ...     "Round to nearest with a scale of one."
        >>> @fp4pass.methods.method("rounded", Rounded)
        ... def rounded(weight, stats, fmt, global_scale, options):
        ...     return fp4pass.methods.search_scales(weight, fmt, global_scale, "naive")
        >>> model = fp4pass.convert(model, "nvfp4a16", "rounded")
    """

    def register(function: MethodFunction) -> MethodFunction:
        METHODS[name] = Method(name, options, needs, function, **more)
        return function

    return register


def resolve_method(choice: object) -> tuple[Method, Any]:
    """Return the method and its options for a name or an options object. Raises OptionError."""
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
    """Return the options object of {"name": "gptq", "damping": 0.1}, or raise OptionError."""
    name = data.get("name")
    if not isinstance(name, str):
        raise OptionError(expected("method", "a name, as in {name: hessian}", dict(data)))
    kind = resolve_method(name)[0].options
    rest = {key: value for key, value in data.items() if key != "name"}
    known = [field.name for field in dataclasses.fields(kind)]
    for key in rest.keys() - set(known):
        raise unknown_name(f"Method {name!r}: the option", key, known)
    return kind(**rest)
