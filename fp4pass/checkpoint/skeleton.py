"""The float model that a checkpoint is loaded into: built from its config, and checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import model_class
from .._compat.transformers import (
    config_faults,
    ignored_tensors,
    meta_model,
    model_from_config,
    stays_float32,
    tied_weights,
)
from .._compat.transformers_loading import names_in_model
from ..core.names import without_numbers
from ..errors import CheckpointError, some
from ..nn.experts import weight_name
from ..quantization.observers.attention import calling_projections
from ..record.config import Rule
from ..record.state import has_adapters
from .layouts import BUFFERS, CACHE_SCALES, PackedLayer, join
from .model_layers import all_names, is_transformers
from .reader import CheckpointReader, dense_problem, with_layers
from .source_files import require_config


def build_skeleton(reader: CheckpointReader) -> nn.Module:
    """Return the float model of a config, its parameters on meta. Raises CheckpointError."""
    folder, path = reader.folder, reader.folder / "config.json"
    advice = "Pass the float model to load into: fp4pass.load(dir, model=model)."
    if not reader.config:
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a transformers model. {advice}"
        )
    require_config(folder, reader.config, reader.own)
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        raise CheckpointError(
            "Building a transformers model needs transformers and accelerate: pip install "
            f"'fp4pass[hf]'. {advice}"
        ) from error
    with _made_of(path, advice):
        # Without it transformers asks on the terminal whether it may run the files of a folder.
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # ModelOpt may have left it to its own file.
        config.__dict__.pop("quantization_config", None)
        config.dtype = getattr(torch, reader.dtype)
        (architecture,) = config.architectures
        cls = getattr(transformers, architecture)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            raise TypeError(f"{architecture} is no class of models")
        with init_empty_weights(include_buffers=False):
            model: Any = model_from_config(cls, config)
    path = folder / "generation_config.json"
    if path.is_file():
        with _made_of(path, "Copy it again, or delete it."):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    built: nn.Module = model
    return built


@contextmanager
def _made_of(path: Path, advice: str) -> Iterator[None]:
    """Make what transformers raises for a config a CheckpointError that names the file."""
    import transformers

    try:
        yield
    except config_faults() as error:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot make anything of it: "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error


def model_names(skeleton: nn.Module, reader: CheckpointReader) -> dict[str, str]:
    """Return the names that transformers gives to what has another name on disk."""
    if reader.own is not None:
        found: Mapping[str, str] = reader.own.get("renamed", {})
    else:
        names = [*(join(layer, "weight") for layer in reader.layers), *reader.plain()]
        if set(skeleton.state_dict()).issuperset(names):
            return {}
        found = names_in_model(skeleton, names) if hasattr(skeleton, "base_model_prefix") else {}
    return with_layers(found)


def fit_tensors(
    skeleton: nn.Module,
    reader: CheckpointReader,
    tensors: dict[str, Tensor],
    aliases: dict[str, str],
) -> None:
    """Bring what another library wrote to the tensors and dtypes of the model, in place.

    Raises CheckpointError for a dense tensor that cannot be, or is not finite.
    """
    # Ties become aliases; what the model ignores goes, and scales of a cache with a warning.
    for target, source in tied_weights(skeleton).items():
        # A weight may be tied in a float model, and packed in this one.
        packed = target.removesuffix(".weight") in reader.layers
        if not packed and target not in tensors and source in tensors:
            aliases[target] = source
        elif source not in tensors and target in tensors:
            # The name that a model lists first is the written one.
            aliases.setdefault(source, target)
    patterns, known = ignored_tensors(skeleton), skeleton.state_dict()
    is_kept = stays_float32(skeleton)
    buffers = {join(layer, part) for layer in reader.layers for part in BUFFERS}
    dropped, rounded = [], []
    for name in [name for name in tensors if name not in buffers]:
        if name in known:
            # As from_pretrained does.
            dtype = torch.float32 if is_kept(name) else known[name].dtype
            before, tensors[name] = tensors[name], tensors[name].to(dtype)
            if before.dtype != dtype and not torch.equal(before, tensors[name].to(before.dtype)):
                rounded.append(name)
        elif any(re.search(pattern, name) for pattern in patterns):
            del tensors[name]
        elif name.endswith(CACHE_SCALES):
            dropped.append(name)
            del tensors[name]
    if rounded:
        warnings.warn(
            f"{len(rounded)} dense tensors are rounded to the dtype that config.json says "
            f"({some(rounded)}), as in transformers. To keep them, load into a model in their "
            "dtype: fp4pass.load(dir, model=model).",
            stacklevel=3,
        )
    if dropped:
        warnings.warn(
            f"{len(dropped)} scales of a quantized key-value cache ({dropped[0]}, ...) are not "
            "used: the cache stays in the dtype of the model.",
            stacklevel=3,
        )
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if problem := dense_problem(tensor, is_buffer=name not in parameters):
            raise CheckpointError(f"{reader.folder}: {name}: {problem}")


def module_for(
    modules: Mapping[str, nn.Module], reader: CheckpointReader, name: str, advice: str
) -> nn.Module:
    """Return the module that a packed layer has its place in. Raises CheckpointError."""
    module, layer = modules.get(name), reader.layers[name]
    weight = None if module is None else module._parameters.get("weight")
    if module is None or weight is None or tuple(weight.shape) != layer.dense_shape:
        found = "a model without one" if weight is None else str(tuple(weight.shape))
        raise CheckpointError(
            f"{name}: expected a linear layer with a weight of {layer.dense_shape}, as "
            f"{reader.folder} has, got {found}. {advice}"
        )
    return module


def check_skeleton(
    skeleton: nn.Module,
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Raise CheckpointError unless a model has just the layers and tensors of a folder."""
    advice = "Load into a model of the same architecture."
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    names = all_names(skeleton, {module_for(modules, reader, n, advice) for n in reader.layers})
    packed = {join(name, part) for name in names for part in BUFFERS}
    own = skeleton.state_dict()
    wanted = set(own) - {weight_name(name, modules[name]) for name in names}
    plain = {name for name in (*tensors, *aliases) if name not in packed}
    if plain != wanted:
        missing = sorted(wanted - plain) or "nothing"
        extra = sorted(plain - wanted) or "nothing"
        raise CheckpointError(
            f"{reader.folder} is of another architecture than the model: it lacks {missing} and "
            f"has {extra} beyond it."
        )
    for name in plain:
        saved = tensors[aliases.get(name, name)]
        if saved.shape != own[name].shape:
            raise CheckpointError(
                f"{name}: expected {tuple(own[name].shape)}, as the model has, got "
                f"{tuple(saved.shape)} in {reader.folder}."
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
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    modules = dict(root.named_modules(remove_duplicate=False))
    packed = {modules[name]: layer for name, layer in layers.items()}
    names = all_names(root, packed)
    buffers = {join(name, part) for name in names for part in BUFFERS}
    own = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name not in buffers and isinstance(tensor, Tensor)
    }
    own |= {weight_name(n, modules[n]): packed[modules[n]].dense_shape for n in names}
    problems = [
        f"{name} {shape} is not in the model"
        if name not in own
        else f"{name} is {own[name]}, not {shape}"
        for name, shape in wanted.items()
        if own.get(name) != shape
    ]
    # A layer like those of its list, which is longer than the config says.
    alike = {without_numbers(name) for name in wanted}
    beyond = (name for name in own if name not in wanted and without_numbers(name) in alike)
    problems += [f"{name} is beyond it" for name in beyond]
    problems += [
        f"{target} is not {source}, to which it is tied"
        for target, source in tied_weights(made).items()
        if _differ(tensors.get(target), tensors.get(source))
    ]
    if problems:
        raise CheckpointError(
            f"{type(root).__name__}: expected a model that its config makes, got another, which no "
            f"library would load: {some(problems)}. Set the fields of model.config that say so. If "
            "it has none for it, save with layout='fp4pass', and load into a model that is edited "
            "alike: fp4pass.load(dir, model=model)."
        )


def _made(root: nn.Module, layers: Mapping[str, PackedLayer]) -> nn.Module | None:
    """Return the float model that a config makes, without memory; None if that is not known."""
    if not is_transformers(root) or not hasattr(model_class(root), "_from_config"):
        return None
    try:
        made: nn.Module = meta_model(model_class(root), root.config)
    except config_faults():
        # A class that cannot be made so; loading it is tried with memory for its buffers.
        return None
    called: list[Rule] = [(name, {}) for name in layers if name.rpartition(".")[2] == "q_proj"]
    with calling_projections(made, called):
        return made


def _differ(*tensors: object) -> bool:
    """Return whether two dense tensors are known not to be equal; a packed one is not there."""
    # Only all processes together can compare tensors that are split over them.
    a, b = (each if type(each) in (Tensor, nn.Parameter) else None for each in tensors)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.is_meta or b.is_meta:
        return False
    return a.data_ptr() != b.data_ptr() and not torch.equal(a, b.to(a.device))
