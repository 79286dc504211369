"""Private APIs of Inductor: operators that become C++ on a CPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import part


@dataclass(frozen=True)
class CppCall:
    """A call of a C++ function that is compiled with a graph."""

    source: str  # the function `void NAME(parameters)`, with NAME where its name stands
    # The C++ types of its arguments: pointers to `inputs`, then to the result.
    parameters: tuple[str, ...]
    inputs: tuple[Any, ...]  # tensors of the graph; the function gets their contiguous data
    size: tuple[int, ...]  # of the result
    dtype: torch.dtype  # of the result


@part(
    "torch",
    "C++ for packed weights in compiled graphs",
    "On a CPU compiled code calls operators for them, each some microseconds later.",
)
def _writes_cpp() -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper

    # As the code below calls them; other parameters than these are errors.
    inspect.signature(Wrapper.generate_kernel_call).bind(
        *(None, "name", []), device=None, triton=False, arg_types=[]
    )
    inspect.signature(Wrapper.define_kernel).bind(
        *(None, "name", "source"), gpu=False, cpp_definition=""
    )
    inspect.signature(lowering.make_fallback).bind(None, layout_constraint=None, warn=False)
    inspect.signature(lowering.register_lowering).bind(None, type_promotion_kind=None)
    inspect.signature(ir.FixedLayout).bind(None, torch.float32, [], [])
    inspect.signature(ir.ExternKernelOut).bind(None, [])
    _ = (
        ir.ExternKernel.require_contiguous,
        ir.FlexibleLayout.contiguous_strides,
        ir.TensorBox.create,
    )
    _ = Wrapper.next_kernel_suffix, lowering.tag_to_layout_constraint


def call_by_name(operators: Iterable[Any]) -> None:
    """Have generated code call operators as Inductor calls those that it does not know."""
    # At the first call of an unknown operator, Inductor of torch 2.11 writes its arguments to a
    # string, and what they were computed from, again at each use: after 36 layers that does not
    # end. Operators that Inductor knows stay as they are.
    if not _writes_cpp.works():
        return
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for each in operators:
        if each not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(each))
            lowering.make_fallback(each, layout_constraint=constraint, warn=False)


def lower_to_cpp(operator: Any, lower: Callable[..., Sequence[CppCall] | None]) -> None:
    """Have Inductor make C++ of an operator's calls on a CPU, where `lower` finds some."""
    # `lower` gets the arguments, whose tensors have a `size` and a `dtype` here, and returns a call
    # for each result, or None to leave the operator as it is. So it stays where a size is symbolic.
    # Registering again changes nothing.
    from torch._inductor import lowering

    if not _writes_cpp.works() or operator in lowering.lowerings:
        return
    call_by_name([operator])
    fallback = lowering.lowerings[operator]

    def lowered(*args: Any, **kwargs: Any) -> Any:
        calls = None
        if args[0].get_device().type == "cpu":
            named = {name: _described(each) for name, each in kwargs.items()}
            calls = lower(*map(_described, args), **named)
        if calls is None:
            return fallback(*args, **kwargs)
        results = [_node(call) for call in calls]
        returns_list = str(operator._schema.returns[0].type).startswith("List")
        return results if returns_list else results[0]

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)


@dataclass(frozen=True)
class Described:
    """A tensor of a graph while Inductor lowers it."""

    node: Any
    size: tuple[Any, ...]  # integers, or None where one is symbolic
    dtype: torch.dtype


def _described(argument: Any) -> Any:
    """Return an argument of an operator with its tensors described."""
    from torch._inductor.ir import IRNode

    if isinstance(argument, list | tuple):
        return [_described(each) for each in argument]
    if not isinstance(argument, IRNode):
        return argument
    sizes: Any = argument.get_size()
    size = (int(each) if getattr(each, "is_number", True) else None for each in sizes)
    return Described(argument, tuple(size), argument.get_dtype())


def _node(call: CppCall) -> Any:
    """Return the node of a call."""
    from torch._inductor import ir

    inputs = [ir.ExternKernel.require_contiguous(each.node) for each in call.inputs]
    first: Any = inputs[0]
    size = list(call.size)
    strides = ir.FlexibleLayout.contiguous_strides(size)
    layout = ir.FixedLayout(first.get_device(), call.dtype, size, strides)
    return ir.TensorBox.create(_call_class()(layout, inputs, call))


@functools.cache
def _call_class() -> Any:
    """Make the class of a node that calls C++, late, for its base is Inductor's."""
    from torch._inductor import ir

    class Call(ir.ExternKernelOut):
        def __init__(self, layout: Any, inputs: Sequence[Any], call: CppCall) -> None:
            super().__init__(layout, inputs)
            self.call = call

        def codegen(self, wrapper: Any) -> None:
            """Write the function, once for equal ones, and the call."""
            self.codegen_comment(wrapper)
            name = _define(wrapper, self.call)
            arguments = [_reference(each) for each in self.inputs]
            wrapper.generate_kernel_call(
                name,
                [*arguments, self.get_name()],
                device=self.get_device(),
                triton=False,
                arg_types=list(self.call.parameters),
            )

    return Call


def _reference(node: Any) -> str:
    """Return the code of a tensor where the one that a node is begins, of any dtype and shape."""
    from torch._inductor.ir import ReinterpretView

    # A view would be made at every call.
    whole = isinstance(node, ReinterpretView) and node.layout.offset == 0
    found: str = (node.data if whole else node).codegen_reference()
    return found


def _define(wrapper: Any, call: CppCall) -> str:
    """Have the code of a graph define a function; return its name."""
    from torch._inductor.virtualized import V

    known: dict[str, str] = wrapper.src_to_kernel
    if call.source not in known:
        name = f"cpp_fp4pass_{wrapper.next_kernel_suffix()}"
        known[call.source] = name
        # Outside of C++ each function is a library of its own, and called by this name in it.
        source = call.source.replace("NAME", name if V.graph.cpp_wrapper else "kernel")
        start = source.rindex('extern "C"')
        declaration = source[start : source.index(")", start) + 1] + ";\n"
        if not V.graph.cpp_wrapper:
            source = f"async_compile.cpp_pybinding({list(call.parameters)!r}, r'''\n{source}''')"
        wrapper.define_kernel(name, source, gpu=False, cpp_definition=declaration)
    return known[call.source]
