"""Let other libraries read the state dict of packed layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from .._compat.diffusers import is_diffusers, loading_lora
from .._compat.transformers import is_pretrained, saves_adapters, saving_model, saving_owner
from ..distributed import is_sharded
from ..errors import ShapeError, StateError, as_option
from ..nn.packed_linear import AROUND_STATE, PackedLinear

# Set while `fp4pass.save` reads the state dict of a model, whose `save_pretrained` may call it.
_ASKED: ContextVar[bool] = ContextVar("fp4pass_asked", default=False)


@contextmanager
def asked_for() -> Iterator[None]:
    """Give a state dict of packed layers, whoever calls."""
    before = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(before)


@contextmanager
def _look(layer: PackedLinear, destination: dict[str, Any], prefix: str) -> Iterator[None]:
    """Refuse savers that would not say what is packed; show pipelines with a LoRA a weight."""
    packed, name = layer.packed(), prefix.removesuffix(".")
    saving = None
    if packed:
        _refuse_foreign(layer, name)
        saving = saving_model()
        if saving is not None and saves_adapters(saving):
            saving = None
    if saving is not None and getattr(saving.config, "quantization_config", None) is None:
        raise part_error(name)
    yield
    if saving is not None and (
        layer.is_split or any(is_sharded(destination[prefix + each]) for each in packed)
    ):
        raise StateError(
            f"{name}: save_pretrained cannot write a layer that is split over processes. Call "
            "fp4pass.save(model, directory) in every process."
        )
    if (lora := loading_lora()) is not None:
        base = prefix.replace(".base_layer.", ".").removesuffix(".")
        down = lora.get(f"transformer.{base}.lora_A.weight")
        if down is not None and down.shape[1] > layer.in_features:
            raise ShapeError(
                f"{base}: expected a LoRA for {layer.in_features} input features, got one for "
                f"{down.shape[1]}, which widens the layer. Keep it dense when the model is "
                f"converted, by rules=[({base!r}, None)]."
            )
        # One number, of the shape and device of the dense weight.
        number = next(iter(packed.values())).new_zeros((), dtype=torch.float32)
        destination[f"{prefix}weight"] = number.expand(layer.out_features, layer.in_features)


def _refuse_foreign(layer: nn.Module, name: str) -> None:
    """Raise StateError where another library's `save_pretrained` leaves a layer undeclared."""
    # Models of transformers and diffusers that declare it may be asked for, also by a wrapper.
    owner = None if _ASKED.get() else saving_owner()
    for part in owner.modules() if isinstance(owner, nn.Module) else ():
        is_known = is_pretrained(part) or is_diffusers(part)
        config = getattr(part, "config", None) if is_known else None
        if getattr(config, "quantization_config", None) is not None and layer in part.modules():
            return
    if owner is not None:
        raise StateError(
            f"{name or 'The model'}: save_pretrained of {type(owner).__name__} would write its "
            "packed weight without a word of how it is packed. Save what was converted with "
            "fp4pass.save(model, dir), or keep its state_dict with torch.save."
        )


def part_error(name: str) -> StateError:
    """Return the error for saving a whole model of which only a part is converted."""
    return StateError(
        f"A part of the model is converted ({name}), the model is not, so its config would not say "
        "what is packed. Save that part, or convert the whole float model, with "
        f"{as_option('rules')} for the layers to skip."
    )


AROUND_STATE.append(_look)
