"""Private APIs of transformers, imported when needed: ties, loading, registries."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from . import callers, expect, part, require
from .peft_hooks import QUANTIZED_MARK
from .torch import model_class

# On a model: the names of its tied weights, and what `tie_weights` makes them from.
_TIES, _TIED_BY_CLASS = "all_tied_weights_keys", "_tied_weights_keys"

# On a module that transformers has split over processes.
_SPLIT = "_is_hooked"


@part(
    "transformers",
    "what classes of transformers say of their weights",
    "Tied weights are found by their memory alone, and tensors that a class keeps in float32, "
    "ignores or does not split are treated as any others: compare a saved model with its source.",
)
def _says_of_weights() -> None:
    from transformers import PretrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._tied_weights_keys = {"b.weight": "a.weight"}
            self._no_split_modules = ["Linear"]
            self._keep_in_fp32_modules_strict = {"c"}
            self.a, self.b, self.c = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False), nn.Identity()
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.a

    config: Any = PretrainedConfig()
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model: Any = Model(config)
    expect(model.all_tied_weights_keys == {"b.weight": "a.weight"}, "the names of tied weights")
    expect("Linear" in model._no_split_modules, "the classes that are not split")
    expect(set(model._get_dtype_plan(torch.bfloat16)) == {"c"}, "what stays in float32")
    expect(hasattr(model, "_keys_to_ignore_on_load_unexpected"), "the tensors that are ignored")
    expect(hasattr(model, "_hf_peft_config_loaded"), "whether adapters are in a model")


def _private(model: nn.Module, name: str) -> Any:
    """Return a private attribute of a model of transformers, None for other models."""
    if is_pretrained(model):
        require("transformers")
        _says_of_weights.works()
    return getattr(model, name, None)


def tied_weights(model: nn.Module) -> Mapping[str, str]:
    """Return the names of weights that are tied, each with the name of the weight that it is."""
    return _private(model, _TIES) or {}


def ignored_tensors(model: nn.Module) -> Sequence[str]:
    """Return patterns of tensors in checkpoints that a model does not use."""
    return _private(model, "_keys_to_ignore_on_load_unexpected") or ()


def saving_model() -> Any:
    """Return the model whose `save_pretrained` runs, None without one."""
    code = _saving_code()
    frames = callers("transformers.modeling_utils")
    return next((frame.f_locals["self"] for frame in frames if frame.f_code is code), None)


def _saving_code() -> Any:
    """Return the code of `save_pretrained` of transformers, None where it is not imported."""
    kind = _kind_of_models()
    return None if kind is None else inspect.unwrap(kind.save_pretrained).__code__


def saves_adapters(model: nn.Module) -> bool:
    """Return whether `save_pretrained` of a model writes the adapters that it was given alone."""
    return bool(_private(model, "_hf_peft_config_loaded"))


def saving_owner() -> object:
    """Return what another library's `save_pretrained` is writing, None where none runs."""
    # PEFT asks for the weights of a whole model, and writes those of adapters.
    saving = (frame for frame in callers("torch") if frame.f_code.co_name == "save_pretrained")
    frame = next(saving, None)
    if frame is None or frame.f_code is _saving_code():
        return None
    first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
    owner: object = frame.f_locals.get(*first) if first else None
    return None if type(owner).__module__.startswith("peft.") else owner


def vocabulary_files(name: str) -> set[str]:
    """Return the vocabulary files that a class of tokenizers can read, empty if unknown."""
    transformers = sys.modules.get("transformers")
    try:
        return set(getattr(transformers, name).vocab_files_names.values())
    except (AttributeError, ImportError):
        return set()


def whole_modules(model: nn.Module) -> list[str]:
    """Return the classes of modules that must not be split over devices."""
    return sorted(_private(model, "_no_split_modules") or ())


def model_from_config(cls: Any, config: Any) -> nn.Module:
    """Return a model of a class with new weights."""
    require("transformers")
    return cls._from_config(config)


def meta_model(cls: Any, config: Any) -> Any:
    """Return the float model of a class that a config makes, without memory."""
    own = copy.deepcopy(config)
    own.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        return model_from_config(cls, own)


def stays_float32(model: Any) -> Callable[[str], bool]:
    """Return what says by its name whether `from_pretrained` keeps a tensor in float32."""
    plan = _private(model, "_get_dtype_plan")
    patterns = [] if plan is None else list(plan(model.dtype))
    if not patterns:
        return lambda name: False
    from transformers.core_model_loading import build_glob_alternation

    matches = build_glob_alternation(patterns)[0]
    return lambda name: matches.search(name) is not None


def config_faults() -> tuple[type[Exception], ...]:
    """Return what transformers raises for files that make no config or no model."""
    from huggingface_hub.errors import StrictDataclassError

    plain = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    return (*plain, RuntimeError, ImportError, AssertionError, MemoryError, StrictDataclassError)


def require_for(model: nn.Module) -> None:
    """Raise VersionError for a model of a transformers that is too old."""
    if any(map(is_pretrained, model.modules())):
        require("transformers")


def own_config(model: nn.Module) -> None:
    """Give a model a config of its own: what converting writes there must not reach others."""
    config = model.__dict__.get("config")
    if not hasattr(config, "save_pretrained"):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        # Also the parts of it that a text or a vision model inside has.
        own = copies.get(id(module.__dict__.get("config")))
        if own is not None:
            module.__dict__["config"] = own


def untie(model: nn.Module) -> None:
    """Remove the ties to packed weights, which transformers would tie again when it loads."""
    for module in model.modules():
        ties: dict[str, str] | None = module.__dict__.get(_TIES)
        if not ties:
            continue
        kept = {
            target: source
            for target, source in ties.items()
            if not any(_is_packed(module, name) for name in (target, source))
        }
        config: Any = getattr(module, "config", None)
        if not kept and config is not None:
            config.tie_word_embeddings = False
        module.__dict__[_TIES] = kept
        # Patterns, which as they stand may match more than one tensor.
        patterns = {f"{re.escape(k)}$": f"{re.escape(v)}$" for k, v in kept.items()}
        module.__dict__[_TIED_BY_CLASS] = patterns


def _is_packed(model: nn.Module, weight: str) -> bool:
    owner, _, name = weight.rpartition(".")
    return name not in model.get_submodule(owner)._parameters


def is_split_by_plan(module: nn.Module) -> bool:
    """Return whether transformers has made a module sum or gather what it computes."""
    return _SPLIT in module.__dict__


def held_plan(model: Any) -> dict[str, str] | None:
    """Return the plan by which `from_pretrained` is to split a model, None without one."""
    # It loads the model whole then: weights are packed before they are split.
    config: Any = getattr(model.config, "distributed_config", None)
    facts = {} if config is None else vars(config)
    sizes = [name for name, n in facts.items() if name.endswith("_size") and (n or 1) > 1]
    if not sizes:
        return None
    if sizes != ["tp_size"] or isinstance(config.tp_plan, dict):
        raise OptionError(
            "distributed_config: expected tp_size and the plan of the model, got "
            f"{', '.join(sizes)} and tp_plan={config.tp_plan!r}. Load the model without, and call "
            "fp4pass.parallelize(model, mesh, plan) or fp4pass.parallel.fully_shard."
        )
    plan = dict(model.tp_plan)
    # It wants one, and this is of no module.
    model._tp_plan = {"-": "colwise"} if plan else {}
    return plan


def released_mesh(model: Any, plan: dict[str, str]) -> Any:
    """Return the mesh that `from_pretrained` made to split a model, and give it its plan again."""
    model._tp_plan = plan
    del model.config.distributed_config
    for module in model.modules():
        module.__dict__.pop(_SPLIT, None)
    manager = getattr(model, "_mesh_manager", None)
    if manager is not None:
        return manager.get_mesh("tp")
    mesh = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def fit_caches(model: nn.Module) -> None:
    """Have static caches of `generate` take their sizes from the first keys, as heads are split."""
    if hasattr(model, "_get_static_cache_init_shape"):
        require("transformers")
        # Of no lambda, which pickle cannot store.
        model.__dict__["_get_static_cache_init_shape"] = NoneType


@contextmanager
def tied(model: Any) -> Iterator[None]:
    """Tie the parameters of a skeleton, which transformers does only when they are loaded."""
    untied = {name: model.get_parameter_or_buffer(name) for name in tied_weights(model)}
    model.tie_weights(recompute_mapping=False)
    try:
        yield
    finally:
        for name, tensor in untied.items():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, tensor)


def loading_error(model: Any, packed: Iterable[str]) -> str:
    """Return how `from_pretrained` fails for a model whose packed layers have no weight, or ""."""
    # It initializes what a checkpoint lacks after it has packed the layers.
    require("transformers")
    try:
        plain = meta_model(model_class(model), model.config)
        for module in plain.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        for name in packed:
            plain.get_submodule(name)._parameters.pop("weight")
        plain.initialize_weights()
    except config_faults() as error:
        return str(error)
    return ""


def replaced_classes(method: str) -> set[str]:
    """Return the classes of modules that `from_pretrained` replaces by ones of other parameters."""
    require("transformers")
    from transformers.quantizers import base

    patched: Mapping[str, Any] = base.MODULES_TO_PATCH_FOR_QUANTIZATION
    return {name for name, each in patched.items() if method in each["quantization_methods"]}


def loading_operation(take: Callable[[str, Tensor], bool]) -> Any:
    """Return what `from_pretrained` does with tensors: `take` says whether it took one."""
    from transformers.core_model_loading import ConversionOps

    class TakeTensors(ConversionOps):
        def convert(
            self,
            input_dict: dict[str, Any],
            *args: Any,
            missing_keys: set[str] | None = None,
            **kwargs: Any,
        ) -> dict[str, Any]:
            left = {}
            for name, tensors in input_dict.items():
                if not take(name, tensors[0] if type(tensors) is list else tensors):
                    left[name] = tensors
                elif missing_keys is not None:
                    missing_keys.discard(name)
            return left

    return TakeTensors()


def conv1d_class() -> type[nn.Module]:
    """Return the class of transformers' linear layers that store [K, N]."""
    require("transformers")
    from transformers.pytorch_utils import Conv1D

    found: type[nn.Module] = Conv1D
    return found


def mark_quantized(model: nn.Module) -> None:
    """Have `peft.prepare_model_for_kbit_training` know that a model is quantized."""
    model.__dict__[QUANTIZED_MARK] = True


def forget_quantized(model: Any) -> None:
    """Remove all by which transformers and PEFT know a model that `mark_quantized` marked."""
    own = model.__dict__
    if own.pop(QUANTIZED_MARK, None) is None:
        return
    for name in ("hf_quantizer", "quantization_method"):
        own.pop(name, None)
    if "is_quantized" in own:
        own["is_quantized"] = False
    model.config.__dict__.pop("quantization_config", None)


def register_quantization(method: str, config_class: type, quantizer_class: type) -> None:
    """Register a quantization method of configs, in place of one that has the name."""
    from transformers.quantizers import auto, register_quantization_config, register_quantizer

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(method, None)
    register_quantization_config(method)(config_class)
    register_quantizer(method)(quantizer_class)


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
    """Return every module of the heads of a model, and the class that adds it to its base model."""
    # A module beside the only model of transformers in a wrapper, which reads as wide an input as
    # its hidden states, is a head of the wrapper.
    models = list(_outermost(model))
    found: dict[nn.Module, str] = {}
    for each in models:
        found |= _heads_of(each)
    if len(models) == 1 and models[0] is not model:
        found |= _beside(model, models[0])
    return found


def unread_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `from_pretrained`, which is at work, did not read from files."""
    require("transformers")
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not getattr(parameter, "_is_hf_initialized", False)
    }


def newly_initialized(model: nn.Module) -> set[str]:
    """Return the names of parameters that `from_pretrained` may not have read from its files."""
    # Empty where it did not make the model, and for a copy, which does not tell.
    unread = set() if _kind_of_models() is None else set(unread_parameters(model))
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return unread if unread < every else set()


def is_pretrained(model: object) -> bool:
    """Return whether an object is a model of transformers, by its class."""
    kind = _kind_of_models()
    return kind is not None and isinstance(model, kind)


def _kind_of_models() -> Any:
    """Return the class of the models of transformers, None where it is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.PreTrainedModel


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are in no other one."""
    if is_pretrained(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _heads_of(model: Any) -> dict[nn.Module, str]:
    """Return the modules of the heads of a model of transformers."""
    children = dict(model.named_children())
    base = children.pop(model.base_model_prefix, None)
    others = {
        name: child
        for name, child in children.items()
        if not any(map(is_pretrained, child.modules()))
    }
    if base is None:
        base, others = _by_base_class(model, children, others)
    elif model.can_generate() and (outputs := output_embeddings(model) - set(base.modules())):
        # Beside a language model a class may have towers, whose outputs the model reads.
        others = {n: each for n, each in others.items() if not outputs.isdisjoint(each.modules())}
    name = model_class(model).__name__
    found = {part: name for child in others.values() for part in child.modules()}
    return found | (_heads_of(base) if is_pretrained(base) else {})


def _by_base_class(
    model: Any, children: dict[str, nn.Module], others: dict[str, nn.Module]
) -> tuple[nn.Module | None, dict[str, nn.Module]]:
    """Return the base model and the heads of a class that lists the parts of the base, by name."""
    import transformers

    require("transformers")
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
