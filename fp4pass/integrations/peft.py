"""PEFT: LoRA adapters on converted models."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from .._compat.peft import LoraConfig, LoraLinear, PeftConfig, register_layers, variants
from ..errors import OptionError, StateError, expected
from ..linear import QuantizedLinear
from ..quantization.adapters import refuse_merge

# Ways to start an adapter that leave the base weight as it is.
_LORA_STARTS = (True, False, "gaussian", "orthogonal", "eva")


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
        OptionError: an option needs to read or write the dense weight (DoRA, PiSSA, LoftQ, ...),
            or comes with `adapter`, or the adapter is not LoRA.
        StateError: the model has no converted layer.
    """
    if adapter is not None:
        if options or model is not None:
            given = ", ".join(["model"] * (model is not None) + sorted(options))
            raise OptionError(
                f"lora_config: expected adapter={os.fspath(adapter)!r} alone, whose config has all "
                f"options, got {given} as well. Leave them out."
            )
        config = PeftConfig.from_pretrained(os.fspath(adapter))
        if not isinstance(config, LoraConfig):
            found = type(config).__name__
            raise OptionError(expected(os.fspath(adapter), "the config of a LoRA adapter", found))
    else:
        if model is not None and options.get("target_modules") is None:
            layers = [n for n, each in model.named_modules() if isinstance(each, QuantizedLinear)]
            if not layers:
                raise StateError(
                    "The model has no converted layer that an adapter could be put on. Convert it "
                    "first, or give target_modules."
                )
            options["target_modules"] = layers
        config = LoraConfig(**options)
    _require_plain(config)
    register_layers(config, {QuantizedLinear: LoraQuantizedLinear})
    return config


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
