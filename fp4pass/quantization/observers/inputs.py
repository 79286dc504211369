"""Find layers that share an input, and the tokens that an input is computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import fx, nn

from ...graph.match import is_conv1d
from ...nn.input_cache import share_among, share_nothing
from ...nn.linear import QuantizedLinear
from .visible_tokens import DECODER_ARGUMENTS, DECODER_TOKENS, NO_TOKENS, TOKEN_ARGUMENTS, TOKENS


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
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if module in wanted and module is not model:
            path = parent(name)
            # Lists of modules are not called.
            while path and type(modules[path]).forward is nn.Module.forward:
                path = parent(path)
            groups.setdefault(path, []).append((name, module))
    for path, members in groups.items():
        # Each layer of a Sequential reads what the one before it made.
        if type(modules[path]).forward is nn.Sequential.forward:
            continue
        widths = Counter(_width(module) for _, module in members)
        alike = [(name, module) for name, module in members if widths[_width(module)] > 1]
        if alike:
            share_among(modules[path], alike)


def _width(layer: nn.Module) -> int:
    """Return K, the width of a layer's input."""
    if is_conv1d(layer):
        return int(layer.get_parameter("weight").shape[0])
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else 0


def parts_of_graph(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the kind of tokens that each node of an exported graph is computed from.

    It is "" for all in a graph whose arguments do not say which of them are tokens.
    """
    made_of: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own: set[str] = set()
        if node.op == "placeholder":
            kinds = {TOKENS: TOKEN_ARGUMENTS, DECODER_TOKENS: DECODER_ARGUMENTS}
            own = {kind for kind, names in kinds.items() if node.name in names}
        # Equal sizes are one number, whichever tokens it was counted of.
        is_number = isinstance(node.meta.get("val"), int | torch.SymInt)
        operands = [] if is_number else node.all_input_nodes
        made_of[node] = frozenset(own).union(*(made_of[each] for each in operands))
    if not any(TOKENS in parts for parts in made_of.values()):
        return dict.fromkeys(made_of, "")
    # Sorted, the tokens of a decoder come before others.
    return {node: min(parts, default=NO_TOKENS) for node, parts in made_of.items()}
