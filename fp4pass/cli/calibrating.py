"""Calibration as quantize and report do it: on windows of a text, before convert."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import calibrate, prepare
from ..errors import OptionError
from ..evaluation import fast_dtype
from ..quantization.recipe import Recipe
from . import screen, sources


def require_context(config: Any, tokens: int, option: str) -> None:
    """Refuse windows that a model has no positions for, and models that text alone cannot run."""
    if getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"A model of type {config.model_type} needs more than text. Calibrate it in Python "
            "with fp4pass.prepare and fp4pass.calibrate, or choose a method that needs no --calib."
        )
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        raise OptionError(
            f"{option} is {tokens}, but the context of the model is {limit} tokens. "
            f"Choose at most {limit}."
        )


def calibrated(
    model: Any,
    recipe: Recipe,
    windows: Tensor | None,
    batch_size: int,
    layers_on: str | None = None,
) -> dict[str, Any]:
    """Calibrate a model on windows [windows, tokens], if any; the arguments of `convert`.

    layers_on: the device to which `convert` brings one layer after the other, on which it
    calibrates them; None: the model is calibrated as a whole, where it is.
    """
    arguments = recipe.arguments()
    if windows is not None:
        sequential = layers_on is not None
        prepare(model, sequential=sequential, **arguments)
        # The first batch runs through the whole model, the others to its first layer.
        alone = 1 if sequential else 0
        parts = (windows[:alone].split(1), windows[alone:].split(batch_size))
        batches = [batch for part in parts for batch in part if len(batch)]
        tracked = screen.track(batches, "calibrate", len(batches))
        # One layer after the other is calibrated in the dtype that it is converted in.
        whole = [] if sequential else [model]
        sources.note_dtype("calibrates", *whole)
        with fast_dtype(*whole):
            calibrate(model, tracked, progress=False)
        # Those given to prepare hold, and are not to be recorded twice.
        arguments["rules"] = ()
        if sequential:
            arguments["device"] = layers_on
    return arguments
