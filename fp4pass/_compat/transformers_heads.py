"""Heads that a class of transformers adds to its base model for a task."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from .torch import model_class
from .transformers import config_faults, meta_model, require_transformers

# In the `meta` of a graph that `fp4pass.trace` made.
HEADS = "fp4pass_heads"


def head_names(model: nn.Module) -> dict[str, str]:
    """Return the names of the linear layers of all heads, with the class that adds them, or ""."""
    outputs, heads = output_embeddings(model), task_heads(model)
    return {
        name: "" if module in outputs else heads[module]
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) and (module in outputs or module in heads)
    }


def output_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return the language model heads that a model or a part of it names, with what they hold."""
    getters = (getattr(m, "get_output_embeddings", None) for m in model.modules())
    heads = (get() for get in getters if callable(get))
    return {part for head in heads if isinstance(head, nn.Module) for part in head.modules()}


def task_heads(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module of the heads of a model, with the class that adds it to its base model.

    A module beside the only model of transformers in a wrapper, which reads as wide an input as its
    hidden states, is a head of the wrapper.
    """
    kind = _kind_of_models()
    if kind is None:
        return {}
    models = list(_outermost(model, kind))
    found: dict[nn.Module, str] = {}
    for each in models:
        found |= _heads_of(each, kind)
    if len(models) == 1 and models[0] is not model:
        found |= _beside(model, models[0])
    return found


def unread_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `from_pretrained`, which is at work, did not read from files."""
    require_transformers()
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not getattr(parameter, "_is_hf_initialized", False)
    }


def newly_initialized(model: nn.Module) -> set[str]:
    """Return the names of parameters that `from_pretrained` may not have read from its files.

    Empty where it did not make the model, and for a copy, which does not tell.
    """
    if _kind_of_models() is None:
        return set()
    unread = unread_parameters(model)
    every = dict(model.named_parameters(remove_duplicate=False))
    return set(unread) if len(unread) < len(every) else set()


def is_pretrained(model: object) -> bool:
    """Return whether an object is a model of transformers, by its class."""
    kind = _kind_of_models()
    return kind is not None and isinstance(model, kind)


def _kind_of_models() -> Any:
    """Return the class of the models of transformers, None where it is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.PreTrainedModel


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    """Yield the models of transformers in a module that are in no other one."""
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)


def _heads_of(model: Any, kind: type[nn.Module]) -> dict[nn.Module, str]:
    """Return the modules of the heads of a model of transformers."""
    children = dict(model.named_children())
    base = children.pop(model.base_model_prefix, None)
    others = {
        name: child
        for name, child in children.items()
        if not any(isinstance(part, kind) for part in child.modules())
    }
    if base is None:
        base, others = _by_base_class(model, children, others)
    elif model.can_generate() and (outputs := output_embeddings(model) - set(base.modules())):
        # Beside a language model a class may have towers, whose outputs the model reads.
        others = {n: each for n, each in others.items() if not outputs.isdisjoint(each.modules())}
    name = model_class(model).__name__
    found = {part: name for child in others.values() for part in child.modules()}
    return found | (_heads_of(base, kind) if isinstance(base, kind) else {})


def _by_base_class(
    model: Any, children: dict[str, nn.Module], others: dict[str, nn.Module]
) -> tuple[nn.Module | None, dict[str, nn.Module]]:
    """Return the base model and the heads of a class that lists the parts of the base model.

    They are told by the names that the base class has for its parts.
    """
    import transformers

    require_transformers()
    mapping: Any = transformers.MODEL_MAPPING
    if model.can_generate() or type(model.config) not in mapping:
        return None, {}
    known = mapping[type(model.config)]
    classes = known if isinstance(known, tuple) else (known,)
    if model_class(model) in classes:
        return None, {}
    try:
        base = meta_model(classes[0], model.config)
    except config_faults():
        return None, {}
    parts = dict(base.named_children())
    added = {name: each for name, each in others.items() if name not in parts}
    # A part of the base model is no task, nor is what has nothing of it.
    is_part = any(type(each) is model_class(model) for each in base.modules())
    has_base = any(isinstance(each, classes) for each in children.values())
    if is_part or (parts.keys().isdisjoint(children) and not has_base):
        return None, {}
    nested = [each for name, each in children.items() if name not in others]
    return nested[0] if len(nested) == 1 else None, added


def _beside(root: nn.Module, model: Any) -> dict[nn.Module, str]:
    """Return the modules of heads that a wrapper has beside a model of transformers."""
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    width = getattr(text, "hidden_size", None)
    inside = set(model.modules())
    found: dict[nn.Module, str] = {}
    for holder in root.modules():
        if holder in inside or inside.isdisjoint(holder.modules()):
            continue
        for child in holder.children():
            if not inside.isdisjoint(child.modules()):
                continue
            first = next((m for m in child.modules() if isinstance(m, nn.Linear)), None)
            if first is not None and first.in_features == width:
                found.update(dict.fromkeys(child.modules(), type(holder).__name__))
    return found
