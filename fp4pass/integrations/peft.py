"""PEFT: LoRA adapters on converted models."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from .._compat.peft import LoraConfig, LoraLinear, PeftConfig, register_layers, variants
from ..core.paths import path_of
from ..errors import (
    CheckpointError,
    OptionError,
    StateError,
    expected,
    require_type,
    unknown_name,
)
from ..linear import QuantizedLinear
from ..quantization.adapters import refuse_merge

# Ways to start an adapter that leave the base weight as it is.
_LORA_STARTS = (True, False, "gaussian", "orthogonal", "eva")

# What options must be beside of their type.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number above 0", lambda r: isinstance(r, Integral) and int(r) > 0),
    "lora_dropout": ("a number from 0 to 1", lambda p: 0 <= p <= 1),
}


def lora_config(
    model: nn.Module | None = None, *, adapter: str | os.PathLike[str] | None = None, **options: Any
) -> LoraConfig:
    """Return a `peft.LoraConfig` that can put adapters on converted layers.

    Args:
        model: a converted model; without `target_modules` all its converted layers get adapters.
        adapter: a folder with a saved adapter, whose config is returned, as in
            `PeftModel.from_pretrained(model, dir, config=lora_config(adapter=dir))`.
        **options: as for `peft.LoraConfig`.

    Raises:
        OptionError: an option does not exist, cannot have this value, needs to read or write the
            dense weight (DoRA, PiSSA, LoftQ, ...) or comes with `adapter`; the adapter is not LoRA.
        CheckpointError: the folder holds no adapter.
        StateError: the model has no converted layer.

    Example:
        >>> model = fp4pass.convert(model, method="sse", weight_only=True)
        >>> config = fp4pass.integrations.lora_config(model, r=4)
        >>> sorted(config.target_modules)
        ['0', '2']
    """
    if adapter is not None:
        folder = path_of(adapter, "adapter")
        if options or model is not None:
            given = ", ".join(["model"] * (model is not None) + sorted(options))
            raise OptionError(
                f"lora_config: expected adapter={str(folder)!r} alone, whose config has all "
                f"options, got {given} as well. Leave them out."
            )
        try:
            config = PeftConfig.from_pretrained(os.fspath(folder))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{folder}: the config of an adapter cannot be read: {error!r:.300}. Give the "
                "folder of a saved adapter."
            ) from error
        if not isinstance(config, LoraConfig):
            found = type(config).__name__
            raise OptionError(expected(str(folder), "the config of a LoRA adapter", found))
    else:
        require_type("model", "a torch.nn.Module", model, nn.Module, type(None))
        if model is not None and options.get("target_modules") is None:
            layers = [n for n, each in model.named_modules() if isinstance(each, QuantizedLinear)]
            if not layers:
                raise StateError(
                    "The model has no converted layer that an adapter could be put on. Convert it "
                    "first, or give target_modules."
                )
            options["target_modules"] = layers
        _require_options(options)
        try:
            config = LoraConfig(**options)
        except ValueError as error:
            raise OptionError(f"lora_config: {error}") from error
    _require_plain(config)
    register_layers(config, {QuantizedLinear: LoraQuantizedLinear})
    return config


def _require_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that PEFT does not have, or whose value cannot be right."""
    hints = typing.get_type_hints(LoraConfig)
    for name, value in options.items():
        if name not in hints:
            raise unknown_name("lora_config: Option", name, hints)
        hint = hints[name]
        plain = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        wanted, fits = _RANGES.get(name, (plain, lambda value: True))
        if not _is_of(value, hint) or not fits(value):
            raise OptionError(expected(f"lora_config: {name}", wanted, repr(value)))


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation says; any number and any collection will do."""
    kind, within = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Union:
        return any(_is_of(value, each) for each in within)
    if kind is typing.Literal:
        return value in within
    if kind in (int, float):
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind in (list, tuple):
        is_many = isinstance(value, Collection) and not isinstance(value, str | Mapping)
        return is_many and all(_is_of(each, within[0]) for each in value)
    return isinstance(value, kind)


def _require_plain(config: LoraConfig) -> None:
    """Raise OptionError for variants of LoRA that read or write the dense weight of their layer."""
    found = variants(config)
    if config.init_lora_weights not in _LORA_STARTS:
        found["init_lora_weights"] = config.init_lora_weights
    if config.target_parameters:
        found["target_parameters"] = config.target_parameters
    if found:
        problems = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise OptionError(
            f"{problems}: this does not work on converted layers, whose weight is packed and "
            "fixed. Use plain LoRA, with init_lora_weights True, 'gaussian', 'orthogonal' or 'eva'."
        )


class LoraQuantizedLinear(LoraLinear):
    """y = base(x) + B A dropout(x) * scaling, where base is a converted layer."""

    def features(self, layer: QuantizedLinear) -> tuple[int, int]:
        """Return in_features and out_features of the converted layer."""
        if layer.is_split:
            raise StateError(
                f"{layer}: expected a whole layer, got one that is split over processes. Put "
                "adapters on a model that fp4pass.parallel.fully_shard shards instead."
            )
        return layer.in_features, layer.out_features

    def placement(self, layer: QuantizedLinear) -> tuple[torch.device, torch.dtype]:
        """Return the device of the converted layer, and the dtype of its dense weight."""
        return layer.weight_packed.device, layer.weight_dtype

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        """Add an adapter, as PEFT does, and check a config that is PEFT's own."""
        _require_plain(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise StateError: a packed weight cannot take an adapter in."""
        refuse_merge()

    def unmerge(self) -> None:
        """Do nothing: an adapter is never merged."""
