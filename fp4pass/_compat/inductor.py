"""Private APIs of Inductor: operators that become C++ on a CPU, and kernels that start early."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import require_version
from .torch import VERSIONS


@dataclass(frozen=True)
class CppCall:
    """A call of a C++ function that is compiled with a graph.

    Attributes:
        source: the function `void NAME(parameters)`, with NAME where its name stands.
        parameters: the C++ types of its arguments: pointers to `inputs`, then to the result.
        inputs: tensors of the graph, of which the function gets contiguous data.
        size: the shape of the result, which has the dtype of the first input.
    """

    source: str
    parameters: tuple[str, ...]
    inputs: tuple[Any, ...]
    size: tuple[int, ...]


def lower_to_cpp(operator: Any, lower: Callable[..., Sequence[CppCall] | None]) -> None:
    """Have Inductor make C++ of an operator's calls on a CPU, where `lower` finds some.

    `lower` gets the arguments, whose tensors have a `size` and a `dtype` here, and returns a call
    for each result, or None to leave the operator as it is. So it stays where a size is symbolic.
    Registering again changes nothing.
    """
    require_version("torch", VERSIONS)
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    if operator in lowering.lowerings:
        return
    # What Inductor does with an operator that it meets and does not know.
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator))
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
    fallback = lowering.lowerings[operator]

    def lowered(*args: Any, **kwargs: Any) -> Any:
        calls = None
        if _is_on_cpu(args[0]):
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


def _is_on_cpu(node: Any) -> bool:
    return node.get_device().type == "cpu"


def _node(call: CppCall) -> Any:
    from torch._inductor import ir

    inputs = [ir.ExternKernel.require_contiguous(each.node) for each in call.inputs]
    first: Any = inputs[0]
    size = list(call.size)
    strides = ir.FlexibleLayout.contiguous_strides(size)
    layout = ir.FixedLayout(first.get_device(), first.get_dtype(), size, strides)
    return ir.TensorBox.create(_call_class()(layout, inputs, call))


def _call_class() -> Any:
    """The class of a node that calls C++; made late, for its base is Inductor's."""
    global _CALL
    if _CALL is None:
        from torch._inductor import ir

        class Call(ir.ExternKernelOut):
            """A node of Inductor's that calls a C++ function."""

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

        _CALL = Call
    return _CALL


_CALL: Any = None


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


def launch_early(wanted: Callable[[fx.Graph], bool]) -> None:
    """Have the Triton kernels that Inductor makes of some graphs start before their turn.

    On GPUs from sm_90 on each is launched while the kernel before it runs, waits for it before all
    else, and has the next one launched. Kernels of graphs that are not wanted stay as they are.
    Calling it again changes nothing.
    """
    require_version("torch", VERSIONS)
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    if hasattr(TritonKernel, "_fp4pass_launches_early"):
        return

    def early() -> bool:
        module: Any = V.graph.module
        if "fp4pass_launches_early" not in module.meta:
            module.meta["fp4pass_launches_early"] = wanted(module.graph)
        is_wanted: bool = module.meta["fp4pass_launches_early"]
        return is_wanted and _can_start_early(V.graph, V.kernel)

    names = ("_enable_pdl_codegen", "_handle_pdl_before_access", "_handle_pdl_after_load")
    enabled, before_access, after_load = (getattr(TritonKernel, name) for name in names)
    remove_repeated = TritonKernel._filter_pdl

    # Under `config.triton.enable_pdl` kernels that read nothing write without a wait, and what
    # comes behind them may start before what was in front of them has ended.
    def write_waits(self: Any, code: Any) -> None:
        if early():
            code._lines[:0] = [self.GDC_WAIT, self.GDC_LAUNCH]
        else:
            remove_repeated(self, code)

    def unless_early(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> None:
            if not early():
                method(*args, **kwargs)

        return run

    kernel: Any = TritonKernel
    kernel._enable_pdl_codegen = staticmethod(lambda: early() or enabled())
    kernel._handle_pdl_before_access = unless_early(before_access)
    kernel._handle_pdl_after_load = unless_early(after_load)
    kernel._filter_pdl = write_waits
    kernel._fp4pass_launches_early = True


def _can_start_early(graph: Any, kernel: Any) -> bool:
    """Return whether the kernel that Inductor writes can be launched before its turn."""
    from torch._inductor.select_algorithm import TritonTemplateKernel

    # A cooperative kernel is launched in another way, and templates write their own code.
    if isinstance(kernel, TritonTemplateKernel) or getattr(kernel, "cooperative_reduction", False):
        return False
    device = graph.get_current_device_or_throw()
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
