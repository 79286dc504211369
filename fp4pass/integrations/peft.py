"""PEFT: LoRA adapters on converted models, with PEFT's own configs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._compat import peft
from ..core.files import path_of
from ..errors import OptionError, StateError, expected, some
from ..nn.experts import QUANTIZED, ExpertStack, QuantizedExperts, weight_name
from ..nn.linear import QuantizedLinear
from ..quantization.scan import refuse_merge

# Ways to start an adapter that leave the base weight as it is.
_LORA_STARTS = (True, False, "gaussian", "orthogonal", "eva")


@contextmanager
def fitted(tuner: Any, model: nn.Module, adapter: str) -> Iterator[None]:
    """Let a tuner of PEFT put an adapter, whose config it has by name, on packed layers."""
    # Raises OptionError where the config wants of a packed layer what only a dense one can do.
    config = tuner.peft_config[adapter]
    # That of AdaLoRA is a LoraConfig too.
    is_lora = config.peft_type == peft.PeftType.LORA
    # PEFT looks for classes of dense layers, and adds stacks of experts.
    wanted = peft.all_linear(config, model, lambda each: isinstance(each, QuantizedLinear))
    if wanted is not None:
        config.target_modules = wanted
    # The names under which PEFT finds the packed layers.
    packed = (name for name, each in model.named_modules() if isinstance(each, QuantizedLinear))
    layers = list(dict.fromkeys(peft.below_adapter(model, name) for name in packed))
    stacks = _stacks(model)

    def fit(config: Any) -> None:
        targeted = peft.targets(tuner, config, layers)
        if is_lora:
            _require_plain(config, targeted, [*layers, *stacks], model)
            peft.register_layers(config, {QuantizedLinear: LoraQuantizedLinear})
        elif targeted:
            raise OptionError(
                f"{type(config).__name__}: these adapters cannot be put on packed layers "
                f"({some(targeted)}). Use peft.LoraConfig, or a config of prompts "
                "(PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig)."
            )
        _require_dense_copies(config, model)

    with peft.preparing(tuner, fit):
        yield


def _stacks(model: nn.Module) -> list[str]:
    """Return the names of the stacks of experts of which some are packed."""
    found = []
    for path, owner in model.named_modules():
        if isinstance(owner, QuantizedExperts):
            parts = owner.named_modules(prefix=path)
            found += [n for n, each in parts if isinstance(each, (ExpertStack, *QUANTIZED))]
    return found


def _require_plain(config: Any, targeted: list[str], packed: list[str], model: nn.Module) -> None:
    """Raise OptionError for variants of LoRA that read or write a packed weight."""
    found: dict[str, Any] = {}
    if targeted:
        found = peft.variants(config)
        if config.init_lora_weights not in _LORA_STARTS:
            found["init_lora_weights"] = config.init_lora_weights
    names = [f".{weight_name(name, model.get_submodule(name))}" for name in packed]
    wanted = config.target_parameters or ()
    hit = sorted(each for each in wanted if any(name.endswith(f".{each}") for name in names))
    if hit:
        found["target_parameters"] = hit
    if found:
        problems = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise OptionError(
            f"{problems}: this does not work on converted layers, whose weight is packed and "
            "fixed. Use plain LoRA on linear layers, with init_lora_weights True, 'gaussian', "
            "'orthogonal' or 'eva'."
        )


def _require_dense_copies(config: Any, model: nn.Module) -> None:
    """Raise OptionError for a copy to train of what is packed, which has nothing to train."""
    wanted = getattr(config, "modules_to_save", None) or ()
    for name, module in model.named_modules():
        if any(name.endswith(each) for each in wanted):
            packed = [n for n, each in module.named_modules(prefix=name) if type(each) in QUANTIZED]
            if packed:
                raise OptionError(
                    f"modules_to_save={sorted(wanted)!r}: a packed weight cannot be trained "
                    f"({some(packed)}). Leave it out, or keep the layer dense with a rule "
                    f"({packed[0]!r}, None) when the model is converted."
                )


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Return a converted model with the adapter of a folder that PEFT wrote. Raises OptionError."""
    path = path_of(folder, "adapter")
    if not (path / "adapter_config.json").is_file():
        wanted = "a folder that PEFT wrote, with adapter_config.json"
        raise OptionError(expected("adapter", wanted, str(path)))
    try:
        with warnings.catch_warnings():
            # Keys that are missing would be an adapter of random numbers.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, str(path))
    except (ValueError, RuntimeError, UserWarning) as error:
        raise OptionError(
            f"adapter: {path} does not fit the model: {error}. Give one that was trained on it."
        ) from error


class LoraQuantizedLinear(peft.LoraLinear):
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

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise StateError: a packed layer takes no adapter in without its neighbours."""
        refuse_merge()

    def unmerge(self) -> None:
        """Do nothing: an adapter is merged for good, by `fp4pass.merge` for the whole model."""
