"""Private APIs of transformers: names of tensors on disk, weights made later, quantizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import callers, lacking, needed
from .peft_hooks import after_import


def names_in_model(
    model: Any, names: Iterable[str], merged: bool = False, known: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the name in a model of each tensor of a checkpoint of its architecture."""
    # merged: whether to name what several tensors are made into, such as a stack of experts.
    # known: by the names that the float model has; by default the state dict.
    with needed("transformers"):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

    changes = get_model_conversion_mapping(model)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    mergings = [each for each in changes if isinstance(each, WeightConverter) and merged]
    prefix, state = model.base_model_prefix, dict(model.state_dict() if known is None else known)
    found = {}
    # Some renamings hold from the first name on that shows that a folder needs them.
    for name in sorted(names, key=dot_natural_key):
        renamed = rename_source_key(name, renamings, mergings, prefix, state)[0]
        found[name] = name if renamed not in state and name in state else renamed
    return found


def tensors_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as `save_pretrained` would write them: under other names, split or merged."""
    with needed("transformers"):
        from transformers.core_model_loading import revert_weight_conversion

    as_float: Any = _FloatModel(model, tensors)
    found: Mapping[str, Tensor] = revert_weight_conversion(as_float, dict(tensors))
    return found


def names_on_disk(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the name on disk of each tensor that `save_pretrained` neither merges nor splits."""
    with needed("transformers"):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

    # As revert_weight_conversion does.
    loaded_by = getattr(model, "_weight_conversions", None)
    if loaded_by is None:
        loaded_by = get_model_conversion_mapping(model, add_legacy=False)
    reverted = [each.reverse_transform() for each in reversed(loaded_by)]
    converters = [each for each in reverted if isinstance(each, WeightConverter)]
    found = {name: name for name in names}
    renamed = [
        name
        for name in found
        if all(each.rename_source_key(name)[1] is None for each in converters)
    ]
    numbers = {name: torch.tensor(i) for i, name in enumerate(renamed)}
    for disk, number in tensors_on_disk(model, numbers).items():
        found[renamed[int(number)]] = disk
    return found


class _FloatModel:
    """A model that shows tensors as its parameters, also those that are packed in it."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Any:
        """Return a tensor, whose shape tells some conversions what to do."""
        found = self._tensors.get(name)
        return self._model.get_parameter(name) if found is None else found


class Later(NamedTuple):
    """A weight of a model that is made when it is needed, of tensors that are mapped."""

    make: Callable[[], Tensor]
    sources: Sequence[Tensor]


class Pending:
    """A stand-in for a tensor of a file that is made when it is needed."""

    def __init__(self, later: Later, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.later, self.shape, self.dtype = later, shape, dtype

    def __getitem__(self, index: Any) -> Pending:
        # transformers reads slices by [...].
        return self

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of safetensors does."""
        return list(self.shape)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        """Return the same in another dtype; on the meta device a tensor."""
        dtype = self.dtype if dtype is None else dtype
        if device is not None and torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=dtype, device="meta")
        return Pending(self.later, self.shape, dtype)

    def now(self) -> Tensor:
        """Make the tensor."""
        return self.later.make().to(self.dtype)


@contextmanager
def other_tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Have `from_pretrained` read other tensors than those of the files."""
    # change: returns tensors, or what gives one for `[...]`, for the slices of the files by name.
    with needed("transformers"):
        from transformers import modeling_utils

        module: Any = modeling_utils
        read = module.convert_and_load_state_dict_in_model
    calls = 0

    def changed(*, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return read(state_dict=change(state_dict), **kwargs)

    module.convert_and_load_state_dict_in_model = changed
    try:
        yield
    finally:
        module.convert_and_load_state_dict_in_model = read
    if not calls:
        raise lacking("transformers", "it loads tensors past convert_and_load_state_dict_in_model")


@contextmanager
def made_later() -> Iterator[dict[str, Later]]:
    """Have `from_pretrained` leave what it merges or splits, and `Pending`, on the meta device."""
    # Yields what makes each such weight, by its name in the model.
    with needed("transformers"):
        from transformers.core_model_loading import WeightConverter, WeightRenaming

    convert: Any = WeightConverter.convert
    rename: Any = WeightRenaming.convert
    found: dict[str, Later] = {}

    def renamed(renaming: Any, *args: Any, **kwargs: Any) -> Any:
        made: Any = rename(renaming, *args, **kwargs)
        for key, tensors in made.items():
            one = tensors[0] if isinstance(tensors, list) else tensors
            if isinstance(one, Pending):
                found[key] = Later(one.now, one.later.sources)
                made[key] = one.to("meta")
        return made

    def later(converter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        stored = converter.materialize_tensors()
        converter.collected_tensors = {
            key: [each.to("meta") for each in tensors] for key, tensors in stored.items()
        }
        empty = convert(converter, name, *args, **kwargs)
        own = {key: kwargs.get(key) for key in ("model", "config")}

        def make(target: str) -> Tensor:
            converter.collected_tensors = {
                key: [each.now() if isinstance(each, Pending) else each for each in tensors]
                for key, tensors in stored.items()
            }
            made: Any = convert(converter, name, **own)[target]
            tensor: Tensor = made[0] if isinstance(made, list) else made
            return tensor

        sources: list[Tensor] = []
        for each in (each for tensors in stored.values() for each in tensors):
            sources += each.later.sources if isinstance(each, Pending) else [each]
        found.update({key: Later(functools.partial(make, key), sources) for key in empty})
        return empty

    WeightConverter.convert = later  # type: ignore
    WeightRenaming.convert = renamed  # type: ignore
    try:
        yield found
    finally:
        WeightConverter.convert = convert  # type: ignore
        WeightRenaming.convert = rename  # type: ignore


# The method of a model that `from_pretrained` calls once the tensors of files are loaded.
_LOADED = "_adjust_missing_and_unexpected_keys"

# A quantization_config as plain values, to one of transformers' classes, None for its own.
Choose = Callable[[Mapping[str, Any], Any], Any]


def choose_config(methods: tuple[str, ...], asked: tuple[str, ...], choose: Choose) -> None:
    """Have `from_pretrained` ask for the config of folders, once transformers is imported."""
    # methods: those of a `quant_method` to ask for wherever a config is read. asked: those to ask
    # for where a model is loaded alone. choose: takes what a folder declares and the
    # `quantization_config` of the call, and returns the config, None to leave it to transformers.

    def chosen(stock: Any) -> type:
        """Return the class that stands for one of transformers', None where it has none."""

        class Chosen:
            @classmethod
            def from_dict(cls, declared: Mapping[str, Any], **kwargs: Any) -> Any:
                own = choose(declared, None)
                return stock.from_dict(declared, **kwargs) if own is None else own

        return Chosen

    def install(auto: ModuleType) -> None:
        known, quantizer = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AutoHfQuantizer
        for method in methods:
            known[method] = chosen(known.get(method))
        merge = quantizer.merge_quantization_configs

        @functools.wraps(merge)
        def merged(declared: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            plain = declared if isinstance(declared, Mapping) else declared.to_dict()
            asks = given is not None or plain.get("quant_method") in asked
            own = choose(plain, given) if asks else None
            return merge(declared, given, *args, **kwargs) if own is None else own

        quantizer.merge_quantization_configs = staticmethod(merged)

    after_import("transformers.quantizers.auto", install)


def when_loaded(
    model: Any, fill: Callable[[], None], is_known: Callable[[str], bool], filled: Collection[str]
) -> None:
    """Call a function once transformers has loaded a model, before it adds hooks of devices."""
    # is_known: whether a tensor that it found no place for is nothing to report. filled: the
    # parameters that the function fills; they are not reported either.
    with needed("transformers"):
        adjust = getattr(model, _LOADED)

    def loaded(info: Any, *args: Any) -> Any:
        del model.__dict__[_LOADED]
        fill()
        info.unexpected_keys = {name for name in info.unexpected_keys if not is_known(name)}
        info.missing_keys = {name for name in info.missing_keys if name not in filled}
        info.mismatched_keys = {each for each in info.mismatched_keys if each[0] not in filled}
        return adjust(info, *args)

    model.__dict__[_LOADED] = loaded


def require_filled(model: Any) -> None:
    """Raise VersionError if transformers loaded a model without the call of `when_loaded`."""
    if _LOADED in model.__dict__:
        raise lacking("transformers", f"it does not call {_LOADED}, where packed layers are filled")


def mark_initialized(module: Any) -> None:
    """Keep transformers from initializing a module or a parameter."""
    module.__dict__["_is_hf_initialized"] = True


def loads_model() -> bool:
    """Return whether sentence-transformers is what is loading a model of transformers."""
    # It passes by the hook in which compressed-tensors makes its weights dense.
    names = (str(f.f_globals.get("__name__")) for f in callers("sentence_transformers"))
    return any(name.startswith("sentence_transformers.") for name in names)
