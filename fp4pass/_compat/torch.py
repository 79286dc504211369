"""Private APIs of PyTorch: its compiler's hook, guards and nodes, and what intercepts operators."""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.utils import fill_defaults
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from ..errors import BuildError, VersionError
from . import require_version

# The versions that the tests have run with.
VERSIONS = ">=2.11,<2.14"


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies in bfloat16, for without its instructions that is slow."""
    require_version("torch", VERSIONS)
    if platform.machine() in ("x86_64", "AMD64"):
        # The second is what torch uses, which ATEN_CPU_CAPABILITY may make less than there is.
        used = torch.backends.cpu.get_cpu_capability()
        return torch.cpu._is_avx512_bf16_supported() and used.startswith("AVX512")
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def intercepts_operators() -> bool:
    """Return whether a mode (fake tensors, make_fx) or a transform (vmap, grad) sees operators."""
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or torch._C._len_torch_dispatch_stack() > 0


# The types that the dispatcher hands to a kernel as they are.
_PLAIN = frozenset((Tensor, nn.Parameter, type(None), str, bool, int, float))


def only_calls_kernel(*args: Any) -> bool:
    """Return whether the dispatcher would call an operator's kernel for a CPU and do nothing else.

    That is so where nothing is differentiated, traced, profiled or transformed. The first argument
    is a tensor.
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, args)):
        return False
    x = args[0]
    return (
        x.is_cpu
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and not torch._C._get_tracing_state()
        and not torch.autograd._profiler_enabled()
        # Its memory holds the numbers with another sign, or none.
        and not (x.is_neg() or x._is_zerotensor())
    )


def build_library(source: Path, library: Path) -> None:
    """Compile C++ to a library, with the compiler and the options that Inductor takes on this CPU.

    Raises BuildError where there is no compiler, or it fails.
    """
    # Importing Inductor takes a second.
    from torch._inductor import cpp_builder, exc

    try:
        require_version("torch", VERSIONS)
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            options = cpp_builder.CppTorchOptions(warning_all=False)
            builder = cpp_builder.CppBuilder("made", str(source), options, folder)
            builder.build()
            # Another process may be making the same.
            os.replace(builder.get_target_file_path(), library)
    except (exc.CppCompileError, exc.InvalidCxxCompiler, VersionError, OSError) as error:
        # The other lines are the compiler's output.
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(f"its kernels could not be compiled ({reason}).") from error


def autograd_kernel(
    operator: Any,
    setup: Callable[..., None],
    gradients: Callable[..., Any],
    tangent: Callable[..., Any],
) -> Callable[..., Any]:
    """Return the kernel that differentiates an operator, under the transforms of torch.func too.

    That of torch.library.register_autograd raises under grad and vjp, and has no tangents: under
    jvp they would be zeros. The functions are those of torch.autograd.Function.
    """

    def below(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keyset = args
        # A function turns both off, which the transforms around this one may need.
        is_inner = torch._C._are_functorch_transforms_active()
        with torch.set_grad_enabled(is_inner), forward_ad._set_fwd_grad_enabled(is_inner):
            result = below(keyset, *inputs)
        setup(ctx, tuple(inputs), result)
        return result

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *grads: (*gradients(ctx, *grads), None)),
        "jvp": staticmethod(lambda ctx, *tangents: tangent(ctx, *tangents[:-1])),
    }
    # A transform runs the kernel once for each of its levels, so it is a function of a single one.
    function: Any = type(operator.name(), (torch.autograd.function._SingleLevelFunction,), members)

    def kernel(keyset: Any, *args: Any) -> Any:
        needs_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not needs_gradient and forward_ad._current_level < 0:
            return below(keyset, *args)
        # The dispatcher leaves out arguments that are the defaults.
        args, _ = fill_defaults(operator._schema, args, {})
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*args, keyset)
        with enable_single_level_autograd_function():
            return function.apply(*args, keyset)

    return kernel


def chain_post_grad_pass(
    run: Callable[[fx.Graph], None], key: Callable[[], Hashable | None]
) -> None:
    """Have Inductor call `run` with each functional graph, after the passes installed there.

    `key` returns what stands for `run` in the key of Inductor's cache. Chaining the same function
    again changes nothing. Importing Inductor takes a second.
    """
    require_version("torch", VERSIONS)
    from torch._inductor import config

    installed = config.post_grad_custom_pre_pass
    before = tuple(installed) if isinstance(installed, list | tuple) else (installed,)
    if not any(getattr(each, "run", None) is run for each in before):
        chained = _chained_pass()(run, key, tuple(filter(None, before)))
        config.post_grad_custom_pre_pass = chained


@functools.cache
def _chained_pass() -> Any:
    """Make the class of a pass behind others, late, for its base is Inductor's."""
    from torch._inductor import custom_graph_pass

    base = custom_graph_pass.CustomGraphPass
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())

    @dataclass(eq=False, repr=False)
    class ChainedPass(aware or base):  # type: ignore[misc]
        run: Callable[[fx.Graph], None]
        key: Callable[[], Hashable | None]
        before: tuple[Any, ...]

        def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
            for each in self.before:
                each(graph, is_inference) if isinstance(each, aware) else each(graph)
            self.run(graph)

        def uuid(self) -> Any:
            # Without a key of every pass, nothing may be cached.
            keys = [each.uuid() if hasattr(each, "uuid") else None for each in self.before]
            return None if None in keys else (self.key(), *keys)

    return ChainedPass


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile compiles a model or a part of it."""
    modules = model.modules()
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules)


@dataclass(frozen=True)
class MutatingCall:
    """A call of an operator that changes tensors, as it stands in a functional graph."""

    operator: torch._ops.OpOverload
    inputs: dict[str, Any]  # the arguments that it only reads
    # Tensors that it changes, in its order: item i + 1 of the node is what becomes of the i-th.
    changed: tuple[fx.Node, ...]

    @classmethod
    def of(cls, node: fx.Node) -> MutatingCall | None:
        """Return the call that a node is; None if it is none, or changes views of tensors."""
        if node.target is not torch.ops.higher_order.auto_functionalized_v2:
            return None
        operator: Any = node.args[0]
        inputs = dict(node.kwargs)
        changed: Any = inputs.pop("_all_bases", ())
        names = _changed_arguments(operator)
        bases = [inputs.pop(f"_{name}_base_index", None) for name in names]
        plain = {argument.name for argument in operator._schema.arguments} - set(names)
        if bases != list(range(len(changed))) or set(inputs) != plain:
            return None
        return cls(operator, inputs, tuple(changed))

    def insert(self, graph: fx.Graph) -> fx.Node:
        """Insert a node for the call, whose results are like the tensors before."""
        names = _changed_arguments(self.operator)
        bases = {f"_{name}_base_index": i for i, name in enumerate(names)}
        node = graph.call_function(
            torch.ops.higher_order.auto_functionalized_v2,
            (self.operator,),
            {**self.inputs, **bases, "_all_bases": list(self.changed)},
        )
        node.meta["val"] = (None, *(each.meta["val"] for each in self.changed))
        return node


def _changed_arguments(operator: Any) -> list[str]:
    """Return the names of the arguments that an operator writes to."""
    return [argument.name for argument in operator._schema.arguments if argument.is_write]


def model_class(model: nn.Module) -> type[Any]:
    """Return the class of a model, for which FSDP2 makes one of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return type(model)
    return next(each for each in type(model).__mro__ if not issubclass(each, fsdp.FSDPModule))


def shardable(tensor: Tensor) -> Tensor:
    """Return a packed tensor as the data of a parameter that FSDP2 can shard: the same bytes."""
    require_version("torch", VERSIONS)
    # It gave each parameter a gradient, for which integers have none.
    takes_integers = TorchVersion(torch.__version__) >= "2.13"
    fits = takes_integers or tensor.is_floating_point()
    return tensor if fits else tensor.view(torch.float8_e4m3fn)


def operator_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the operator that a node calls, or None for anything else."""
    target: Any = node.target
    if target is torch.ops.higher_order.auto_functionalized_v2:
        target = node.args[0]
    return target if isinstance(target, torch._ops.OpOverload) else None


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, as "fp4pass::quantize", or ""."""
    operator = operator_of(node)
    return "" if operator is None else operator._schema.name


def meta_of(node: fx.Node, **changed: Any) -> dict[str, Any]:
    """Return the meta of what replaces a node, without the strides noted of its old arguments."""
    # Inductor noted them. Without them an operator takes any strides, as ours do.
    meta = {**node.meta, **changed}
    meta.pop("eager_input_vals", None)
    return meta


def call_with_copies(module: fx.GraphModule, run: Callable[[nn.Module], None]) -> None:
    """Call a function with each `copy.deepcopy` of a graph's module: copies lose its hooks."""
    hooks: list[Callable[[nn.Module], None]] = module.__dict__.setdefault("_deepcopy_hooks", [])
    hooks.append(run)


def call_no_copies(module: nn.Module, run: Callable[[nn.Module], None]) -> None:
    """Undo `call_with_copies`."""
    hooks = module.__dict__.get("_deepcopy_hooks", [])
    hooks[:] = [hook for hook in hooks if hook is not run]


def is_erased(node: fx.Node) -> bool:
    """Return whether a node was erased from its graph."""
    return node._erased


def process_group(name: str) -> Any:
    """Return the process group of a name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def shared_words(count: int, group: Any) -> tuple[Tensor, list[int]]:
    """Return int64 words of this GPU, and the addresses of those of all processes of a group.

    Every process makes the call. Raises RuntimeError where GPUs do not reach each other.
    """
    from torch.distributed import _symmetric_memory

    require_version("torch", VERSIONS)
    device = torch.device("cuda", torch.cuda.current_device())
    words = _symmetric_memory.empty(count, dtype=torch.int64, device=device)
    handle = _symmetric_memory.rendezvous(words, group)
    # It ends with its handle.
    words._fp4pass_handle = handle  # type: ignore[attr-defined]
    return words, list(handle.buffer_ptrs)


def statically_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal whatever the shapes of the inputs."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)
