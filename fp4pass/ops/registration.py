"""Declare an operator once, by its reference and its other implementations."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache, partial, wraps
from importlib import import_module
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_autograd, register_fake

from .._compat.torch import differentiates_forward, only_calls_kernel
from ..core.formats import Format, get_format

_log = logging.getLogger(__name__)

# torch.library.custom_op would do all this too, and adds layers of Python to every call.
_LIBRARY = Library("fp4pass", "DEF")


# Formats cross an operator as their keys; fp4pass.parity adds its codebooks.
READERS: dict[Any, Callable[[str], Any]] = {Format: get_format}

# Held by operators that add to tensors: code that is compiled for several threads takes no lock.
_ADDING = threading.Lock()

# Every operator, by its name, and by what calls it.
OPERATORS: dict[str, Operator] = {}
_DECLARED: dict[Any, Operator] = {}


@dataclass(frozen=True)
class Backward:
    """The derivatives of an operator, as torch.autograd.Function has them."""

    gradients: Callable[..., tuple[Tensor | None, ...]]  # (ctx, *grads), one for each argument
    setup: Callable[..., None]  # (ctx, inputs, output)


def save_product(ctx: Any, inputs: Sequence[Any], tensors: Sequence[Any], bias: int) -> None:
    """Save what the derivatives of a product need: tensors, and the dtype of its bias."""
    ctx.save_for_backward(*tensors)
    ctx.bias_dtype = None if inputs[bias] is None else inputs[bias].dtype
    ctx.arguments = len(inputs)


class Operator:
    """Implementations and checks behind `torch.ops.fp4pass.<name>`."""

    def __init__(
        self,
        reference: Callable[..., Any],
        shapes: Callable[..., Any],
        triton: str | None,
        cpu: bool,
        checks: Sequence[Callable[..., None]],
        mutates: Sequence[str],
    ) -> None:
        self.reference, self.name = reference, reference.__name__.removesuffix("_ref")
        self.triton = triton and f"{triton}:{self.name}_triton"
        self.cpu = f"kernels.cpu.operators:{self.name}_cpu" if cpu else None
        hints = get_type_hints(reference)
        # Keyword-only arguments are between the reference and the kernel.
        parameters = [
            each.replace(annotation=hints[each.name])
            for each in inspect.signature(reference).parameters.values()
            if each.kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        self._names = [each.name for each in parameters]
        self._checks = [self._reading(check) for check in checks]
        self._shapes = self._reading(shapes)
        # Which arguments records of tensors are made of, one after the other, and by what.
        self._records: list[tuple[slice, Callable[..., Any]]] = []
        self._record_at: int | None = None
        self._read: Callable[[str], Any] | None = None
        crossing: list[inspect.Parameter] = []
        for place, each in enumerate(parameters):
            flat, make = _crossing(each)
            if make is not None:
                self._records.append((slice(place, place + len(flat)), make))
            if each.annotation in READERS:
                self._record_at, self._read = place, READERS[each.annotation]
            crossing += flat
        self._defaults = [each.default for each in crossing]

        def prototype() -> None: ...

        returned = None if hints["return"] is type(None) else hints["return"]
        signature = inspect.Signature(crossing, return_annotation=returned)
        prototype.__dict__["__signature__"] = signature
        self.schema = self.name + infer_schema(prototype, mutates_args=mutates)

    def __repr__(self) -> str:
        return f"Operator({self.schema})"

    def _reading(self, function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        """Return a function of all arguments that passes on those that a function names."""
        places = [self._names.index(name) for name in inspect.signature(function).parameters]
        if len(places) == 1:
            # Faster, and half of the checks.
            (place,) = places
            return lambda args: function(args[place])
        return lambda args: function(*[args[i] for i in places])

    def _arguments(self, given: tuple[Any, ...]) -> list[Any]:
        """Return the implementation's arguments; trailing defaults do not cross the dispatcher."""
        args = [*given, *self._defaults[len(given) :]]
        for fields, make in self._records:
            args[fields] = (make(args[fields]),)
        if self._read is not None and self._record_at is not None:
            args[self._record_at] = self._read(args[self._record_at])
        return args

    def run(self, *given: Any) -> Any:
        """Check the arguments and run the implementation for the device of the first one."""
        if differentiates_forward():
            raise NotImplementedError(
                "Packed layers have no forward derivatives (jvp, jacfwd). Use those of backward()."
            )
        args = self._arguments(given)
        for check in self._checks:
            check(args)
        if self.cpu is not None and args[0].is_cpu:
            result = _imported(self.cpu)(*args)
        elif not args[0].is_cuda:
            result = self.reference(*args)
        else:
            device = args[0].device
            record = None if self._record_at is None else args[self._record_at]
            implementation = implementation_on(device, self.reference, self.triton, record)
            if device.index == torch.cuda.current_device():
                result = implementation(*args)
            else:
                with torch.cuda.device(device):
                    result = implementation(*args)
        # Autograd lets nobody change a view that comes out of an operator in place, which the
        # activation after a linear may do; this one is of a tensor that nobody else has.
        if isinstance(result, Tensor) and result._is_view():
            return torch.ops.aten._unsafe_view(result, result.shape)
        return result

    def fake(self, *given: Any) -> Any:
        """Return tensors with the shapes and dtypes of the results."""
        return self._shapes(self._arguments(given))


@lru_cache(maxsize=256)
def implementation_on(
    device: torch.device, reference: Callable[..., Any], triton: str | None, record: object
) -> Callable[..., Any]:
    """Return the kernel of an operator, or its reference where the kernels cannot serve."""
    # A GPU that runs a reference despite a kernel is logged, once per operator, device and format.
    if triton is None:
        return reference
    reason = unserved(device, record if isinstance(record, Format) else None, triton)
    if reason is None:
        return _imported(triton)
    _log.warning("%s runs in plain PyTorch on %s: %s.", reference.__name__, device, reason)
    return reference


@lru_cache(maxsize=64)
def _imported(place: str) -> Callable[..., Any]:
    """Return the function at "module:function"."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"..{module}", __package__), function)
    return found


def unserved(
    device: torch.device, fmt: Format | None, triton: str = "kernels.common.tiles:supports"
) -> str | None:
    """Return why the kernels, or one of them, cannot serve a GPU or a format, or None."""
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"expected compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    # The rule of the kernel's module, which is that of 4-bit codes unless it has another.
    module = import_module(f"..{triton.partition(':')[0]}", __package__)
    common = import_module("..kernels.common.tiles", __package__)
    if fmt is not None and not getattr(module, "supports", common.supports)(fmt):
        return f"the kernels do not know {fmt.key}"
    return None


def operator(
    reference: Callable[..., Any],
    *,
    shapes: Callable[..., Any],
    triton: str | None = None,
    cpu: bool = False,
    checks: Sequence[Callable[..., None]] = (),
    mutates: Sequence[str] = (),
    backward: Backward | None = None,
) -> Callable[..., Any]:
    """Declare an operator.

    Args:
        reference: `<name>_ref` in plain PyTorch. Its signature is the operator's, where a Format
            crosses as its key and another record, as `x_rows`, as its fields, with the prefix
            `x_`; keyword-only arguments do not cross.
        shapes: makes uninitialized results for the fake, from the arguments that it names.
        triton: the module of the kernel `<name>_triton` with the same signature, imported when a
            GPU needs it. Without one, the reference runs on GPUs too, as it does for formats
            that `supports` of the module, or of kernels/common/tiles.py, says no to.
        cpu: whether `<name>_cpu` serves CPUs, with C++ where it can be compiled.
        checks: raise errors for a caller, from the arguments that they name.
        mutates: the arguments that it changes in place.
        backward: its gradients; without it there are none.

    Returns:
        The function that calls the operator, `torch.ops.fp4pass.<name>.default`.
    """
    declared = Operator(reference, shapes, triton, cpu, checks, mutates)
    name = declared.name
    _LIBRARY.define(declared.schema, tags=(torch.Tag.pt2_compliant_tag,))

    def one_at_a_time(*args: Any) -> Any:
        with _ADDING:
            return declared.run(*args)

    run = one_at_a_time if mutates else declared.run
    _LIBRARY.impl(name, opaque(run), "CompositeExplicitAutograd")
    register_fake(f"fp4pass::{name}", declared.fake, lib=_LIBRARY)
    found = getattr(torch.ops.fp4pass, name).default
    if backward is not None:
        register_autograd(found, backward.gradients, setup_context=backward.setup, lib=_LIBRARY)
    OPERATORS[name] = _DECLARED[found] = declared
    return found


def call(operator: Callable[..., Any], *args: Any) -> Any:
    """Call an operator; on a CPU past the dispatcher, which takes as long as a small product."""
    if only_calls_kernel(*args):
        return _DECLARED[operator].run(*args)
    return operator(*args)


def _crossing(
    parameter: inspect.Parameter,
) -> tuple[list[inspect.Parameter], Callable[..., Any] | None]:
    """Return what crosses the dispatcher for a parameter, and what makes a record of that."""
    given = parameter.annotation
    if given in READERS:
        return [parameter.replace(annotation=str)], None
    # Records cross by their fields, and several of them by columns.
    columns = get_origin(given) is Sequence
    record: Any = get_args(given)[0] if columns else given
    if not (hasattr(record, "_fields") or is_dataclass(record)):
        return [parameter], None
    prefix, several = "".join(parameter.name.rpartition("_")[:2]), cast(Any, Sequence)
    flat = [
        parameter.replace(
            name=prefix + name,
            annotation=several[kind] if columns else kind,
            default=getattr(parameter.default, name, parameter.default),
        )
        for name, kind in get_type_hints(record).items()
    ]
    if columns:
        return flat, lambda fields: [record(*each) for each in zip(*fields, strict=True)]
    if not hasattr(record, "_fields"):
        return flat, lambda fields: record(*fields)
    # As record._make, which takes three times as long.
    return flat, partial(tuple.__new__, record)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, where torch.compile will not look into it."""
    # It also follows what runs outside of its graphs. Asking it not to imports it, which takes a
    # second, and costs time at every call.
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run
