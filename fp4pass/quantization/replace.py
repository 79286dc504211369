"""Put observers and packed weights into a model, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, fx, nn

from .._compat.accelerate import offload_again, remove_hook
from .._compat.torch import recompile_hooked
from ..graph.inductor import install_passes
from ..graph.match import find_linears, is_conv1d, module_of
from ..graph.rewrite import insert_observers, rewrite_linears, share_quantize
from ..nn.experts import ExpertStack, QuantizedExpertStack, replace_stack
from ..nn.input_cache import share_among, share_nothing
from ..nn.linear import PackedBlocks, QuantizedLinear
from ..record.config import LinearConfig
from ..record.state import set_interrupted
from .adapters import parents
from .observers.observer import (
    OBSERVERS,
    Observer,
    feed,
    is_observer_hook,
    observe_stacks,
    shared_observer,
)
from .observers.visible_tokens import parts_of_graph, unwatch_tokens, watch_tokens
from .scan import LinearLayer

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
) -> int:
    """Observe the input of each layer, also in compiled code; return how many were added."""
    # A hook observes a module that is called, a node the input of a weight that a graph reads.
    use_slow_paths(model)
    needs = tuple(sorted(needs))
    observe_stacks((layer.module for layer in layers), needs)
    columns = {layer.module: layer.columns for layer in layers if not layer.stage}
    holders = list(columns)
    before = sum(len(h.__dict__.get(OBSERVERS, ())) for h in holders)
    chosen = set(holders)
    for holder in holders:
        holder.__dict__.setdefault(OBSERVERS, [])
    if isinstance(model, fx.GraphModule):
        insert_observers(
            model.graph,
            lambda linear: not linear.called and linear.holder in chosen,
            lambda group: shared_observer(
                [linear.holder for linear in group], needs, columns[group[0].holder]
            ),
        )
        model.recompile()
        linears = find_linears(model.graph)
        chosen -= {linear.holder for linear in linears if not linear.called}
        chosen |= {linear.holder for linear in linears if linear.called} & set(holders)
    for holder in holders:
        if holder in chosen and not any(map(is_observer_hook, holder._forward_pre_hooks.values())):
            observer = Observer(needs, columns[holder])
            holder.__dict__[OBSERVERS].append(observer)
            holder.register_forward_pre_hook(observer.hook, with_kwargs=True)
    share_inputs(model, chosen, parents(model))
    if isinstance(model, fx.GraphModule):
        _name_parts(model.graph)
    watch_tokens(model)
    install_passes()
    recompile_hooked(model)
    return sum(len(h.__dict__[OBSERVERS]) for h in holders) - before


def _name_parts(graph: fx.Graph) -> None:
    """Tell the observers of a graph which tokens they are fed with."""
    tokens = parts_of_graph(graph)
    found: dict[Observer, set[str]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and node.all_input_nodes:
            module = module_of(node)
            own = [module] if isinstance(module, Observer) else module.__dict__.get(OBSERVERS, ())
            for observer in own:
                found.setdefault(observer, set()).add(tokens[node.all_input_nodes[0]])
    for observer, parts in found.items():
        observer.part = parts.pop() if len(parts) == 1 else ""


def remove_observers(model: nn.Module) -> None:
    """Take all observers out of a model and its graph."""
    unwatch_tokens(model)
    for module in model.modules():
        module.__dict__.pop(OBSERVERS, None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if is_observer_hook(hook) or hook is feed:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    if not isinstance(model, fx.GraphModule):
        return
    for node in list(model.graph.nodes):
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), Observer):
            model.graph.erase_node(node)
            model.delete_submodule(node.target)
    model.recompile()


def begin_replacing(model: nn.Module) -> None:
    """Take the observers out and mark the model as interrupted: its first weight is about to go."""
    remove_observers(model)
    set_interrupted(model)
    recompile_hooked(model)


def store_packed(
    module: nn.Module,
    tensors: Mapping[str, Tensor | None],
    config: LinearConfig,
    *,
    transposed: bool = False,
) -> None:
    """Replace the weight of a module by packed buffers, in place, and offloaded if it was.

    A linear, or the bare module under which an exported graph keeps a weight ([K, N] if
    `transposed`), becomes a QuantizedLinear, and a stack a QuantizedExpertStack; any other holder
    of a weight only gets the buffers.
    """
    hook = remove_hook(module)
    is_bare = type(module) is nn.Module and not module._modules
    if isinstance(module, ExpertStack):
        replace_stack(module, tensors, config)
    elif isinstance(module, nn.Linear) or is_conv1d(module) or is_bare:
        dtype = module.get_parameter("weight").dtype
        transposed = transposed or is_conv1d(module)
        QuantizedLinear.take(module, tensors, config, dtype, transposed=transposed)
    else:
        del module.weight
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
    if hook is not None:
        offload_again(module, hook)


def packed_class(module: nn.Module) -> type[PackedBlocks]:
    """Return the class that a layer in floating point has once it is packed."""
    return QuantizedExpertStack if isinstance(module, ExpertStack) else QuantizedLinear


def rewrite_graph(model: fx.GraphModule, configs: Mapping[nn.Module, LinearConfig]) -> int:
    """Run the passes on a graph module whose holders have been converted."""
    graph = model.graph
    count = rewrite_linears(graph, lambda linear: configs.get(linear.holder))
    share_quantize(graph)
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
    return not module.config.weight_only or bool(module.config.input_rotation)


def share_inputs(
    model: nn.Module, layers: Collection[nn.Module], parent: Callable[[str], str]
) -> None:
    """Let layers share inputs that one module calls with inputs of one width.

    parent: gives the path of a module's parent.
    """
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
    """Return K, the width of a layer's input."""
    if is_conv1d(layer):
        return int(layer.get_parameter("weight").shape[0])
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else 0
