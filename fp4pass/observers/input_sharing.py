"""Find the layers that may read one input: they share its observation and its quantization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from torch import nn

from ..graph.match import is_conv1d
from ..input_cache import share_among, share_nothing
from ..linear import QuantizedLinear


def quantizes_input(module: nn.Module) -> bool:
    """Return whether a layer computes of its input what other layers may take."""
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
