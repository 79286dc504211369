"""Put observers and packed weights into a model, in place, and take them out again."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from .._compat.accelerate import offload_again, remove_hook
from .._compat.diffusers import declare, is_diffusers
from .._compat.torch import recompile_hooked
from .._compat.transformers import conv1d_class, forget_quantized, is_pretrained, mark_quantized
from ..core.quant_state import TensorRecord
from ..distributed import is_sharded
from ..errors import OptionError, StateError, expected
from ..graph import rewrite
from ..graph.inductor import install_passes
from ..nn import experts
from ..nn.input_cache import share_among, share_nothing
from ..nn.linear import PACKED, PackedBlocks, QuantizedLinear
from ..nn.packed_linear import swap_class
from ..record import state
from ..record.config import LinearConfig
from .functional import dequantize as dequantize_tensor
from .observers import observer as observing
from .observers.kv_cache import drop_cache, unobserve_cache
from .observers.visible_tokens import unwatch_tokens, watch_tokens
from .scan import LinearLayer, parents, peft_of, refuse_merge

# The attributes that tell nn.TransformerEncoder that it may read weights and not call layers.
SLOW_PATHS = ("activation_relu_or_gelu", "use_nested_tensor")


def use_slow_paths(model: nn.Module) -> None:
    """Make nn.TransformerEncoder call its linears."""
    # Its fused path, which these attributes allow, reads their weights instead.
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def attach_observers(
    model: nn.Module, layers: Sequence[LinearLayer], needs: Collection[str]
) -> None:
    """Observe the input of each layer once, also in compiled code."""
    # A hook observes a module that is called, a node the input of a weight that a graph reads.
    use_slow_paths(model)
    needs = tuple(sorted(needs))
    observing.observe_stacks((layer.module for layer in layers), needs)
    columns = {layer.module: layer.columns for layer in layers if not layer.stage}
    holders = list(columns)
    chosen = set(holders)
    for holder in holders:
        holder.__dict__.setdefault(observing.OBSERVERS, [])
    if isinstance(model, fx.GraphModule):
        rewrite.insert_observers(
            model.graph,
            lambda linear: not linear.called and linear.holder in chosen,
            lambda group: observing.shared_observer(
                [linear.holder for linear in group], needs, columns[group[0].holder]
            ),
        )
        model.recompile()
        linears = rewrite.find_linears(model.graph)
        chosen -= {linear.holder for linear in linears if not linear.called}
        chosen |= {linear.holder for linear in linears if linear.called} & set(holders)
    for holder in holders:
        if holder in chosen and not any(
            map(observing.is_observer_hook, holder._forward_pre_hooks.values())
        ):
            observer = observing.Observer(needs, columns[holder])
            holder.__dict__[observing.OBSERVERS].append(observer)
            holder.register_forward_pre_hook(observer.hook, with_kwargs=True)
    share_inputs(model, chosen, parents(model))
    watch_tokens(model)
    install_passes()
    recompile_hooked(model)


def remove_observers(model: nn.Module) -> None:
    """Take all observers out of a model and its graph."""
    unwatch_tokens(model)
    for module in model.modules():
        module.__dict__.pop(observing.OBSERVERS, None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if observing.is_observer_hook(hook) or hook is observing.feed:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    if not isinstance(model, fx.GraphModule):
        return
    for node in list(model.graph.nodes):
        if node.op == "call_module" and isinstance(
            model.get_submodule(node.target), observing.Observer
        ):
            model.graph.erase_node(node)
            model.delete_submodule(node.target)
    model.recompile()


def begin_replacing(model: nn.Module) -> None:
    """Take the observers out and mark the model as interrupted: its first weight is about to go."""
    remove_observers(model)
    state.set_interrupted(model)
    recompile_hooked(model)


def store_packed(
    module: nn.Module,
    tensors: Mapping[str, Tensor | None],
    config: LinearConfig,
    *,
    transposed: bool = False,
) -> None:
    """Replace the weight of a module by packed buffers, in place, and offloaded if it was."""
    # A linear, or the bare module under which an exported graph keeps a weight ([K, N] if
    # `transposed`), becomes a QuantizedLinear, and a stack a QuantizedExpertStack; any other holder
    # of a weight only gets the buffers.
    hook = remove_hook(module)
    is_bare = type(module) is nn.Module and not module._modules
    if isinstance(module, experts.ExpertStack):
        experts.replace_stack(module, tensors, config)
    elif isinstance(module, nn.Linear) or rewrite.is_conv1d(module) or is_bare:
        dtype = module.get_parameter("weight").dtype
        transposed = transposed or rewrite.is_conv1d(module)
        QuantizedLinear.take(module, tensors, config, dtype, transposed=transposed)
    else:
        del module.weight
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
    if hook is not None:
        offload_again(module, hook)


def packed_class(module: nn.Module) -> type[PackedBlocks]:
    """Return the class that a layer in floating point has once it is packed."""
    return (
        experts.QuantizedExpertStack if isinstance(module, experts.ExpertStack) else QuantizedLinear
    )


def rewrite_graph(model: fx.GraphModule, configs: Mapping[nn.Module, LinearConfig]) -> int:
    """Run the passes on a graph module whose holders have been converted."""
    graph = model.graph
    count = rewrite.rewrite_linears(graph, lambda linear: configs.get(linear.holder))
    rewrite.share_quantize(graph)
    graph.lint()
    model.recompile()
    return count


def drop_unused_copies(model: fx.GraphModule, weights: Collection[int]) -> None:
    """Drop the names of weights that a graph lists but does not read."""
    for node in list(model.graph.nodes):
        if node.op != "get_attr" or node.users:
            continue
        path, _, name = str(node.target).rpartition(".")
        holder = model.get_submodule(path)
        if id(holder._parameters.get(name)) in weights:
            model.graph.erase_node(node)
            delattr(holder, name)


def quantizes_input(module: nn.Module) -> bool:
    """Return whether a layer quantizes or rotates its input, which others may share."""
    if not isinstance(module, QuantizedLinear):
        return False
    return module.config.input_format is not None or bool(module.config.input_rotation)


def share_inputs(
    model: nn.Module, layers: Collection[nn.Module], parent: Callable[[str], str]
) -> None:
    """Let layers share inputs that one module calls with inputs of one width."""
    share_nothing(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = set(layers)
    groups: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if module in wanted and module is not model:
            path = parent(name)
            # Lists of modules are not called.
            while path and type(modules[path]).forward is nn.Module.forward:
                path = parent(path)
            groups.setdefault(path, []).append(module)
    for path, members in groups.items():
        # Each layer of a Sequential reads what the one before it made.
        if type(modules[path]).forward is nn.Sequential.forward:
            continue
        widths = Counter(map(_width, members))
        alike = [module for module in members if widths[_width(module)] > 1]
        if alike:
            share_among(modules[path], alike)


def _width(layer: nn.Module) -> int:
    if rewrite.is_conv1d(layer):
        return int(layer.get_parameter("weight").shape[0])
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else 0


_Module = TypeVar("_Module", bound=nn.Module)

# The method of transformers' models that this stands behind.
_METHOD = "dequantize"


@overload
def dequantize(x: TensorRecord) -> Tensor: ...


@overload
def dequantize(x: _Module) -> _Module: ...


def dequantize(x: Any) -> Any:
    """Return a dense tensor of what `quantize` returned, or make a converted model dense, in place.

    Args:
        x: what `quantize` returned; or a model that was converted or loaded, or a part of one,
            whose packed layers become linear layers with their rounded weights. Adapters of PEFT
            stay, and can be merged then. A model of transformers has this as `model.dequantize()`.

    Returns:
        The tensor, in the shape and dtype that it had, computed in float32 and rounded once. Or the
        model, whose weights have the dtype of the parameters beside them.

    Raises:
        OptionError: it is neither.
        StateError: the model has no packed layer, or one that is offloaded, split or in a graph.

    Example:
        >>> model = fp4pass.convert(torch.nn.Sequential(torch.nn.Linear(32, 8)), method="sse")
        >>> fp4pass.dequantize(model)
        Sequential(
          (0): Linear(in_features=32, out_features=8, bias=True)
        )
    """
    if isinstance(x, nn.Module):
        return dequantize_model(x)
    if isinstance(x, TensorRecord):
        return dequantize_tensor(x)
    wanted = "what quantize returned, or a converted model"
    raise OptionError(expected("dequantize", wanted, type(x).__name__))


def dequantize_model(model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
    """Make every packed layer of a model dense, in place; what has its dtype gets another one."""
    root: Any = state.unwrap(model)
    state.get_state(root)
    _require_whole(root)
    # Saving leaves a string in the config of a model.
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    before = {each.dtype for each in root.parameters() if each.dtype.is_floating_point}
    new = dtype or (before.pop() if len(before) == 1 else None)
    if dtype is not None and is_pretrained(root):
        before = {root.dtype}
    with torch.inference_mode(False), torch.no_grad():
        drop_cache(root)
        share_nothing(root)
        alike: dict[int, list[QuantizedLinear]] = {}
        for module in root.modules():
            if isinstance(module, QuantizedLinear):
                alike.setdefault(id(module.weight_packed), []).append(module)
        trains = not state.has_adapters(root)
        for layers in alike.values():
            weight = layers[0].weight_as(new or layers[0].weight_dtype).contiguous()
            dense = nn.Parameter(weight, trains)
            for layer in layers:
                swap_class(layer, conv1d_class() if layer.transposed else nn.Linear, weight=dense)
        for module in list(root.modules()):
            if isinstance(module, experts.QuantizedExperts):
                experts.restore_stacks(module, new)
        for parameter in root.parameters():
            if dtype is not None and parameter.dtype in before:
                parameter.data = parameter.data.to(dtype)
    if peft := peft_of(root):
        peft.let_merge(root, refuse_merge)
    for module in root.modules():
        state.forget_state(module)
        # Where there is no layout for others, `convert` has it refuse.
        for name in ("save_pretrained", _METHOD):
            module.__dict__.pop(name, None)
        forget_quantized(module)
        if is_diffusers(module):
            declare(module, None)
    return model


def enable_dequantize(root: Any) -> None:
    """Have a library's own `dequantize` of a converted model work, and PEFT know the model."""
    if is_pretrained(root) or is_diffusers(root):
        mark_quantized(root)
        # One that was quantized while it was loaded has a quantizer, which does it.
        if getattr(root, "hf_quantizer", None) is None:
            root.__dict__[_METHOD] = functools.partial(dequantize_model, root)


def _require_whole(root: nn.Module) -> None:
    """Raise StateError unless all packed tensors of a model are here, and there are some."""
    packed = {
        name: each for name, each in root.named_modules() if isinstance(each, experts.QUANTIZED)
    }
    if not packed:
        raise StateError(
            "dequantize: the model has no packed layer. Convert it first, or leave the call out."
        )
    graphs = (each for each in root.modules() if isinstance(each, fx.GraphModule))
    if any(isinstance(each, experts.QUANTIZED) for graph in graphs for each in graph.modules()):
        raise StateError(
            "dequantize: expected a live model, got a graph, whose nodes multiply by packed "
            "weights. Dequantize the model that it was traced from."
        )
    for name, module in packed.items():
        is_split = module.is_split or is_sharded(getattr(module, PACKED))
        if is_split or getattr(module, PACKED).is_meta:
            raise StateError(
                f"{name}: expected a whole packed weight in memory, got one that is "
                f"{'split over processes' if is_split else 'offloaded'}. Load the model in one "
                "process, with a device_map that offloads nothing."
            )


@contextmanager
def unprepared(root: nn.Module, *, always: bool) -> Iterator[None]:
    """Have a float model that is prepared meanwhile be as before, unless it was converted."""
    before = [
        (module, name, module.__dict__[name])
        for module in root.modules()
        for name in SLOW_PATHS
        if name in module.__dict__
    ]
    done = False
    try:
        yield
        done = True
    finally:
        if always or not (done or state.is_interrupted(root)):
            remove_observers(root)
            unobserve_cache(root)
            state.forget_state(root)
            share_nothing(root)
            experts.finalize_stacks(root)
            for module, name, value in before:
                setattr(module, name, value)
            recompile_hooked(root)
