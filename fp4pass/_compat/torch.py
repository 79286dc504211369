"""Private APIs of PyTorch and Triton: compiler, hooks, FP8 products, operators, Gluon."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import platform
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BuildError
from . import FAULTS, expect, part, require


def _multiplies_in_bfloat16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        # The second is what torch uses, which ATEN_CPU_CAPABILITY may make less than there is.
        used = torch.backends.cpu.get_cpu_capability()
        return torch.cpu._is_avx512_bf16_supported() and used.startswith("AVX512")
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


_bfloat16_of_cpus = part(
    "torch",
    "bfloat16 on CPUs with instructions for it",
    "Models in bfloat16 calibrate and evaluate in float32, which takes more memory.",
)(_multiplies_in_bfloat16)


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies in bfloat16, for without its instructions that is slow."""
    return bool(_bfloat16_of_cpus.attempt(_multiplies_in_bfloat16))


@part(
    "torch",
    "the short way past the dispatcher, and inputs that are quantized once for several layers",
    "A product on a CPU takes some microseconds longer, and each layer quantizes its own input.",
)
def _sees_interception() -> None:
    x = torch.zeros(1)

    def look(seen: Tensor) -> Tensor:
        expect(not _is_plain(seen) and _is_intercepted(), "transforms of torch.func to be seen")
        return seen.sum()

    with TorchDispatchMode():
        expect(not _is_plain(x) and _is_intercepted(), "a TorchDispatchMode to be seen")
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    # Levels are of the process, and cannot be nested.
    if forward_ad._current_level < 0:
        with forward_ad.dual_level():
            expect(not _is_plain(x), "forward-mode differentiation to be seen")
    expect(not _is_plain(x, x.clone().requires_grad_()), "what requires gradients to be seen")
    negated = torch.zeros(1, dtype=torch.complex64).conj().imag
    expect(not _is_plain(negated), "tensors that are negated when they are read to be seen")
    expect(not _is_plain(torch._efficientzerotensor(1)), "tensors without memory to be seen")


def intercepts_operators() -> bool:
    """Return whether a mode (fake tensors, make_fx) or a transform (vmap, grad) sees operators."""
    return not _is_free(lambda: not _is_intercepted())


def _is_free(ask: Callable[..., bool], *args: Any) -> bool:
    """Return whether `ask` says that nothing intercepts operators, and can be believed."""
    if _sees_interception.is_tested:
        return _sees_interception.problem is None and ask(*args)
    # The self-test runs where nothing intercepts it, as far as can be known before.
    return bool(_sees_interception.attempt(ask, *args)) and _sees_interception.works()


def differentiates_forward() -> bool:
    """Return whether operators are asked for forward derivatives."""
    return forward_ad._current_level >= 0


def _is_intercepted() -> bool:
    has_transforms = torch._C._functorch.peek_interpreter_stack() is not None
    return has_transforms or torch._C._len_torch_dispatch_stack() > 0


# The types that the dispatcher hands to a kernel as they are.
_PLAIN = frozenset((Tensor, nn.Parameter, type(None), str, bool, int, float))


def only_calls_kernel(*args: Any) -> bool:
    """Return whether the dispatcher would only call a kernel for a CPU; the first is a tensor."""
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, args)):
        return False
    return _is_free(_is_plain, *args)


def _is_plain(*args: Any) -> bool:
    x = args[0]
    return (
        x.is_cpu
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
        and not _is_intercepted()
        and forward_ad._current_level < 0
        and not torch._C._get_tracing_state()
        and not torch.autograd._profiler_enabled()
        # Its memory holds the numbers with another sign, or none.
        and not (x.is_neg() or x._is_zerotensor())
    )


def build_library(source: Path, library: Path) -> None:
    """Compile C++ as Inductor does on this CPU; raise BuildError where that fails."""
    try:
        # Importing Inductor takes a second.
        from torch._inductor import cpp_builder

        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            options = cpp_builder.CppTorchOptions(warning_all=False)
            builder = cpp_builder.CppBuilder("made", str(source), options, folder)
            builder.build()
            # Another process may be making the same.
            os.replace(builder.get_target_file_path(), library)
    except FAULTS as error:
        # The other lines are the compiler's output.
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(f"its kernels could not be compiled ({reason}).") from error


@part(
    "torch",
    "the passes of fp4pass in torch.compile",
    "Compiled models launch more kernels, and run slower.",
)
def passes_are_run() -> None:
    """Raise unless a pass is run once, on a functional graph, before that is lowered."""
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    _self_test_library()
    # That of the compilation in which it runs: two cannot be mixed.
    mode = torch._guards.detect_fake_mode() or FakeTensorMode()
    with mode:
        empty = torch.empty(4)
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    x.meta["val"] = y.meta["val"] = empty
    call = MutatingCall(torch.ops.fp4pass_self_test.add_to.default, {"x": x}, (y,)).insert(graph)
    changed = graph.call_function(getitem, (call, 1))
    changed.meta["val"] = empty
    graph.output((changed,))
    seen: list[bool] = []

    def look(graph: fx.Graph) -> None:
        calls = [MutatingCall.of(node) for node in graph.nodes]
        has_values = all("val" in node.meta for node in graph.nodes if node.op != "output")
        seen.append(has_values and sum(each is not None for each in calls) == 1)

    run = _chained_pass()(look, lambda: None, ())
    module = fx.GraphModule({}, graph)
    with config.patch(post_grad_custom_pre_pass=run), V.set_fake_mode(mode):
        compile_fx.post_grad_passes(module, is_inference=True)
    lowered = all(MutatingCall.of(node) is None for node in module.graph.nodes)
    expect(seen == [True] and lowered, "Inductor to run a pass on a functional graph, and lower it")


@functools.cache
def _self_test_library() -> torch.library.Library:
    """Define an operator that changes a tensor, for as long as the process runs."""
    library = torch.library.Library("fp4pass_self_test", "DEF")
    library.define("add_to(Tensor(a!) y, Tensor x) -> ()")
    return library


def chain_post_grad_pass(
    run: Callable[[fx.Graph], None], key: Callable[[], Hashable | None]
) -> None:
    """Have Inductor call `run` with each functional graph, after the passes installed there."""
    # `key` returns what stands for `run` in the key of Inductor's cache.
    require("torch")

    def chain() -> None:
        from torch._inductor import config

        installed = config.post_grad_custom_pre_pass
        before = tuple(installed) if isinstance(installed, list | tuple) else (installed,)
        if not any(getattr(each, "run", None) is run for each in before):
            chained = _chained_pass()(run, key, tuple(filter(None, before)))
            config.post_grad_custom_pre_pass = chained

    passes_are_run.attempt(chain)


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
    return any(
        "_orig_mod" in each._modules or getattr(each, "_compiled_call_impl", None) is not None
        for each in model.modules()
    )


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


@part(
    "torch",
    "what fp4pass keeps with copies of an exported graph",
    "A copy.deepcopy of a prepared graph counts hidden tokens: prepare the copy instead.",
)
def _copies_are_seen() -> None:
    module = fx.GraphModule({}, fx.Graph())
    seen: list[nn.Module] = []
    module.__dict__["_deepcopy_hooks"] = [seen.append]
    made = copy.deepcopy(module)
    expect(any(each is made for each in seen), "copy.deepcopy to call the hooks of a graph")


def call_with_copies(module: fx.GraphModule, run: Callable[[nn.Module], None]) -> None:
    """Call a function with each `copy.deepcopy` of a graph's module: copies lose its hooks."""
    _copies_are_seen.works()
    module.__dict__.setdefault("_deepcopy_hooks", []).append(run)


def call_no_copies(module: nn.Module, run: Callable[[nn.Module], None]) -> None:
    """Undo `call_with_copies`."""
    hooks = module.__dict__.get("_deepcopy_hooks", [])
    hooks[:] = [hook for hook in hooks if hook is not run]


def process_group(name: str) -> Any:
    """Return the process group of a name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def shared_words(count: int, group: Any) -> tuple[Tensor, list[int]]:
    """Return int64 words of this GPU, and the addresses of those of all processes of a group."""
    # Every process makes the call. Raises RuntimeError where GPUs do not reach each other.
    from torch.distributed import _symmetric_memory

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


@part(
    "torch",
    "hooks that torch.compile does not look into",
    "A prepared model that is compiled is compiled again for each kind of mask.",
)
def _skips_functions() -> None:
    def nothing() -> None: ...

    _skip(nothing)


def runs_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile not look into a function that is called outside of its graphs."""
    # Inside of one it is traced. So hooks of a model that is compiled run as in eager mode, and
    # those of its parts are in its graph.
    _skips_functions.attempt(_skip, function)


def _skip(function: Callable[..., Any]) -> None:
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(
        inspect.unwrap(function).__code__, dynamo._FrameExecStrategy(skip, skip)
    )


@part(
    "torch",
    "observers in a model that is already compiled",
    "Call torch.compiler.reset() after prepare, or its graphs run without the observers.",
)
def _sees_new_hooks() -> None:
    # Dynamo sees the hooks of modules without parameters anyway.
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.zeros(1))
    seen: list[object] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module))
    _change_dictionaries(model[0])
    compiled(torch.zeros(1))
    expect(len(seen) == 1, "Dynamo to compile a module again whose dictionaries are other ones")


def recompile_hooked(model: nn.Module) -> None:
    """Have code that torch.compile made of a model compiled again where modules have hooks."""
    # Dynamo guards the classes of modules, but not whether they got hooks since. It guards the type
    # of the dictionaries that hold their parameters and children, which may be either of two. Code
    # of other models stays.
    if "torch._dynamo" not in sys.modules:
        return
    hooked = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    # Where nothing was compiled, nothing needs the self-test, which compiles.
    if hooked and sys.modules["torch._dynamo"].utils.counters["frames"]:
        _sees_new_hooks.works()
    for module in hooked:
        _change_dictionaries(module)


def _change_dictionaries(module: nn.Module) -> None:
    for name in ("_parameters", "_modules"):
        old = module.__dict__[name]
        module.__dict__[name] = (dict if type(old) is OrderedDict else OrderedDict)(old)


def add_forward_hooks(
    module: nn.Module,
    name: str,
    before: Callable[..., None],
    after: Callable[..., None],
    with_kwargs: bool = False,
) -> None:
    """Call functions before and after each forward of a module, also after one that fails."""
    # The hooks are known by a name. A number, as torch gives one, is that of another hook once the
    # module is unpickled in another process. with_kwargs: `before` takes keyword arguments, too.
    remove_forward_hooks(module, name)
    known: Any = module
    known._forward_pre_hooks[name] = before
    if with_kwargs:
        known._forward_pre_hooks_with_kwargs[name] = True
    known._forward_hooks[name] = after
    known._forward_hooks_always_called[name] = True


def remove_forward_hooks(module: nn.Module, name: str) -> None:
    """Undo `add_forward_hooks`."""
    known: Any = module
    for hooks in (
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        *("_forward_hooks", "_forward_hooks_always_called"),
    ):
        getattr(known, hooks).pop(name, None)


def hook_before(module: nn.Module, name: str) -> Any:
    """Return the first function of `add_forward_hooks`, None without one of this name."""
    known: Any = module
    return known._forward_pre_hooks.get(name)


def has_fp8(device: torch.device) -> bool:
    """Return whether a device has FP8 tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_mm(
    x: Tensor,
    weight: Tensor,
    x_factors: Tensor,
    factors: Tensor,
    bias: Tensor | None,
    fast: bool = True,
) -> Tensor:
    """Return bfloat16 (x W^T) * x_factors * factors + bias of E4M3 x [M, K] and W [N, K]."""
    # Its sums keep fewer bits than float32 has, as those of FP8 tensor cores do; unless they are
    # fast, they are added to float32 ones every few columns.
    bias = None if bias is None else bias.to(torch.bfloat16)
    scales = (x_factors[:, None], factors[None])
    return torch._scaled_mm(
        x, weight.t(), *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def has_block_scaled_mm(device: torch.device) -> bool:
    """Return whether `block_scaled_mm` serves a device: cuBLAS 12.9 on Hopper has the product."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def block_scaled_mm(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 x W^T of E4M3 x [M, K] and W [N, K] with float32 scales of blocks."""
    # x_scales [M, K / 128], scales [N / 128, K / 128]. M is a multiple of 4, N of 128, K of 512.
    # Sums of 128 columns keep fewer bits than float32 has.
    # cuBLAS reads the scales of x column by column, and those of W in rows of a multiple of four.
    # Versions of torch ask for different strides of other rows.
    by_columns = x_scales.t().contiguous().t()
    return torch._scaled_mm(x, weight.t(), by_columns, scales.t(), out_dtype=torch.bfloat16)


@part(
    "triton",
    "kernels in Gluon",
    "Products of one row, and of many rows on Hopper, run in kernels that take longer.",
)
def gluon() -> None:
    """Raise unless all that the kernels import is there."""
    from triton.experimental.gluon import jit, language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _ = jit, language, TensorDescriptor, barrier_of_threads(), tile_loader()


def barrier_of_threads() -> Any:
    """Return the barrier of all threads of a program."""
    from triton.experimental.gluon import language

    return getattr(language, "barrier", None) or language.thread_barrier


def tile_loader() -> Any:
    """Return what copies a tile by the tensor memory accelerator."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
