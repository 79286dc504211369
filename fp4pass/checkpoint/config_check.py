"""Whether the config of a model makes it: one that was edited cannot be loaded from a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import model_class
from .._compat.transformers import config_faults, model_from_config, tied_weights
from ..config import Rule
from ..errors import CheckpointError, some
from ..experts import weight_name
from ..observers.attention import calling_projections
from ..state import has_adapters
from .layouts import BUFFERS, PackedLayer, join
from .model_layers import is_transformers

_ADVICE = (
    "Set the fields of model.config that say so. If it has none for it, save with "
    "layout='fp4pass', and load into a model that is edited alike: fp4pass.load(dir, model=model)."
)


def require_made_by_config(
    root: nn.Module, layers: Mapping[str, PackedLayer], tensors: Mapping[str, Any]
) -> None:
    """Raise CheckpointError for a model of transformers that its config does not make.

    Modules that a user has added are no such edit, but for further layers in a list of layers.

    Args:
        root: the converted model.
        layers: what is packed in it.
        tensors: its state dict, whole.
    """
    made = None if has_adapters(root) else _made(root, layers)
    if made is None:
        return
    expected = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    own = _dense_shapes(root, layers, tensors)
    problems = [
        f"{name} {shape} is not in the model"
        if name not in own
        else f"{name} is {own[name]}, not {shape}"
        for name, shape in expected.items()
        if own.get(name) != shape
    ]
    problems += [f"{name} is beyond it" for name in _further_layers(own, expected, made)]
    problems += [
        f"{target} is not {source}, to which it is tied"
        for target, source in tied_weights(made).items()
        if _differ(tensors.get(target), tensors.get(source))
    ]
    if problems:
        raise CheckpointError(
            f"{type(root).__name__}: expected a model that its config makes, got another, which no "
            f"library would load: {some(problems)}. {_ADVICE}"
        )


def _made(root: nn.Module, layers: Mapping[str, PackedLayer]) -> nn.Module | None:
    """Return the float model that a config makes, without memory; None if that is not known."""
    if not is_transformers(root) or not hasattr(model_class(root), "_from_config"):
        return None
    config: Any = copy.deepcopy(root.config)
    config.__dict__.pop("quantization_config", None)
    try:
        with torch.device("meta"):
            made = model_from_config(model_class(root), config)
    except config_faults():
        # A class that cannot be made so; loading it is tried with memory for its buffers.
        return None
    called: list[Rule] = [(name, {}) for name in layers if name.rpartition(".")[2] == "q_proj"]
    with calling_projections(made, called):
        return made


def _dense_shapes(
    root: nn.Module, layers: Mapping[str, PackedLayer], tensors: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that the float model of a converted one has."""
    modules = dict(root.named_modules(remove_duplicate=False))
    packed = {modules[name]: layer for name, layer in layers.items()}
    shapes = {
        weight_name(name, module): packed[module].dense_shape
        for name, module in modules.items()
        if module in packed
    }
    buffers = {join(n, part) for n, each in modules.items() if each in packed for part in BUFFERS}
    dense = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name not in buffers and isinstance(tensor, torch.Tensor)
    }
    return {**dense, **shapes}


def _differ(*tensors: object) -> bool:
    """Return whether two dense tensors are known not to be equal; a packed one is not there."""
    # What is split over processes only all of them can compare.
    a, b = (each if type(each) in (Tensor, nn.Parameter) else None for each in tensors)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_meta or b.is_meta:
        return False
    return a.data_ptr() != b.data_ptr() and not torch.equal(a, b.to(a.device))


def _further_layers(
    own: Mapping[str, object], expected: Mapping[str, object], made: nn.Module
) -> Iterator[str]:
    """Yield the tensors in layers of a list that has fewer of them by the config."""
    lists = {n for n, each in made.named_modules() if isinstance(each, nn.ModuleList)}
    known = {name for name, _ in made.named_modules()}
    for name in (name for name in own if name not in expected):
        parts = name.split(".")
        paths = [".".join(parts[:i]) for i in range(1, len(parts))]
        path = next((each for each in paths if each not in known), "")
        if path.rpartition(".")[0] in lists:
            yield name
