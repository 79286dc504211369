"""Calibration as quantize and report do it: on windows of a text, before convert."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import calibrate, prepare
from ..checkpoint import float_models
from ..config import Rule
from ..errors import OptionError
from ..evaluation import fast_dtype
from ..quantization.observer import OBSERVERS
from ..quantization.plan import plan_layers
from ..quantization.recipe import Recipe
from ..quantization.unreached import covering_globs
from . import screen, sources


def require_context(config: Any, tokens: int, option: str) -> None:
    """Refuse windows that a model has no positions for, and models that text alone cannot run."""
    reads = getattr(float_models.model_class(config), "main_input_name", "input_ids")
    starts = getattr(config, "decoder_start_token_id", None) is not None
    if reads != "input_ids" or (getattr(config, "is_encoder_decoder", False) and not starts):
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


def text_batches(config: Any, windows: Tensor, batch_size: int, *, sequential: bool) -> list[Any]:
    """Windows [windows, tokens] as the batches that a model of a config takes."""
    # The first batch runs through the whole model, the others to its first layer.
    alone = 1 if sequential else 0
    parts = (windows[:alone].split(1), windows[alone:].split(batch_size))
    batches: list[Any] = [batch for part in parts for batch in part if len(batch)]
    if getattr(config, "is_encoder_decoder", False):
        # Its decoder reads the labels, each a place later.
        batches = [{"input_ids": batch, "labels": batch} for batch in batches]
    return batches


def calibrated(
    model: Any,
    recipe: Recipe,
    windows: Tensor | None,
    batch_size: int,
    sequential: bool = False,
) -> dict[str, Any]:
    """Calibrate a model on windows [windows, tokens], if any; the arguments of `convert`.

    sequential: `convert` calibrates one layer after the other; else the model is as a whole.
    """
    arguments = recipe.arguments()
    if windows is not None:
        prepare(model, sequential=sequential, **arguments)
        batches = text_batches(model.config, windows, batch_size, sequential=sequential)
        # One layer after the other is calibrated in the dtype that it is converted in.
        whole = [] if sequential else [model]
        sources.note_dtype("calibrates", *whole)
        with fast_dtype(*whole):
            calibrate(model, batches)
        # Those given to prepare hold, and are not to be recorded twice.
        arguments["rules"] = [] if sequential else _beside_text(model, recipe)
    return arguments


def _beside_text(model: Any, recipe: Recipe) -> list[Rule]:
    """Rules that skip what text did not reach outside of the text part of a model, said in a line.

    That is the vision tower or the like of a model whose config has one for text inside.
    """
    if model.config.get_text_config() is model.config:
        return []
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    unreached: list[str] = []
    others: list[str] = []
    for layer in plan_layers(model, recipe.config, recipe.rules).layers:
        config, observers = layer.config, layer.module.__dict__.get(OBSERVERS, ())
        seen = any(each.has_seen for each in observers) or layer.module in inside
        # Some need nothing of calibration, and for others the user says what becomes of them.
        kept = (config.weight_only and not config.needs) or config.unreached != "error"
        (others if seen or kept else unreached).append(layer.name)
    globs = covering_globs(unreached, others)
    if globs:
        screen.note(f"text does not reach {', '.join(globs)}: these layers are skipped")
    skipped = {"unreached": "skip"} if recipe.config.needs else None
    return [(glob, skipped) for glob in globs]
