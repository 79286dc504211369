"""Private APIs of transformers: the quantizer of a folder, and when it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from . import lacking, needed
from .peft_hooks import after_import

# The method of a model that `from_pretrained` calls once the tensors of files are loaded.
_LOADED = "_adjust_missing_and_unexpected_keys"

# A quantization_config as plain values, to one of transformers' classes, None for its own.
Choose = Callable[[Mapping[str, Any], Any], Any]


def choose_config(methods: tuple[str, ...], asked: tuple[str, ...], choose: Choose) -> None:
    """Have `from_pretrained` ask for the config of folders, once transformers is imported.

    Args:
        methods: those of a `quant_method` to ask for wherever a config is read.
        asked: those to ask for where a model is loaded alone; their configs stay transformers'.
        choose: takes what a folder declares and the `quantization_config` of the call, if there is
            one, and returns the config, None to leave the folder to transformers.
    """
    after_import(
        "transformers.quantizers.auto", functools.partial(_install, methods, asked, choose)
    )


def _install(
    methods: tuple[str, ...], asked: tuple[str, ...], choose: Choose, auto: ModuleType
) -> None:
    known, quantizer = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AutoHfQuantizer
    for method in methods:
        known[method] = _chosen(choose, known.get(method))
    merge = quantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merged(declared: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        plain = declared if isinstance(declared, Mapping) else declared.to_dict()
        asks = given is not None or plain.get("quant_method") in asked
        own = choose(plain, given) if asks else None
        return merge(declared, given, *args, **kwargs) if own is None else own

    quantizer.merge_quantization_configs = staticmethod(merged)


def _chosen(choose: Choose, stock: Any) -> type:
    """Return the class that stands for one of transformers', None where it has none."""

    class Chosen:
        @classmethod
        def from_dict(cls, declared: Mapping[str, Any], **kwargs: Any) -> Any:
            own = choose(declared, None)
            return stock.from_dict(declared, **kwargs) if own is None else own

    return Chosen


def when_loaded(
    model: Any, fill: Callable[[], None], is_known: Callable[[str], bool], filled: Collection[str]
) -> None:
    """Call a function once transformers has loaded a model, before it adds hooks of devices.

    is_known: whether a tensor that it found no place for is nothing to report.
    filled: the parameters that the function fills; they are not reported either.
    """
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
    """Keep transformers from initializing a module."""
    module.__dict__["_is_hf_initialized"] = True
