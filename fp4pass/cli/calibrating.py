"""Calibration as quantize and report do it: on windows of a text, before convert."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import calibrate, prepare
from ..checkpoint import float_models
from ..errors import OptionError
from ..evaluation import fast_dtype
from ..kv_cache import KV_CACHE
from ..one_call import OneCall
from ..quality import QUALITY
from ..quantization.recipe import Recipe
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


def require_writer(config: Any) -> None:
    """Refuse models that cannot write the text that there is none of."""
    kind = float_models.model_class(config)
    if not getattr(kind, "can_generate", bool)() or getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"A model of type {config.model_type} writes no text to calibrate on. Give --calib "
            "FILE, or choose --method sse and --weight-only, which need none."
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


def one_call(
    model: Any, recipe: Recipe, *, by_layers: bool = False, device: str | None = None
) -> OneCall:
    """What is to be done with a model in floating point, once all that is wrong has raised.

    Args:
        model: in floating point.
        recipe: what is to be done.
        by_layers: calibrate one layer after the other, which a quality may ask for, too.
        device: where that is done.
    """
    given = recipe.arguments()
    rules, kv_cache = given.pop("rules"), given.pop(KV_CACHE, None)
    return OneCall.of(model, given.pop(QUALITY, None), given, rules, kv_cache, by_layers, device)


def calibrated(
    call: OneCall, windows: Tensor | None, batch_size: int, *, tokenizer: Any = None
) -> dict[str, Any]:
    """Calibrate a model, and return the arguments of `convert` for the rest.

    Args:
        call: of the model.
        windows: of a text [windows, tokens]; None for none, or for text that the model writes.
        batch_size: windows that run at once.
        tokenizer: of the text that the model writes where it needs some; None forbids that.
    """
    model: Any = call.root
    writes = windows is None and tokenizer is not None and call.tokens > 0
    batches: list[Any] = []
    if windows is not None:
        batches = text_batches(model.config, windows, batch_size, sequential=call.sequential)
    # One layer after the other is calibrated in the dtype that it is converted in.
    whole = [model] if (batches or writes) and not call.sequential else []
    sources.note_dtype("calibrates", *whole)
    with fast_dtype(*whole):
        call.announce(None if writes else batches)
        if writes:
            batches = call.own_text(tokenizer, screen.is_terminal())
        if not batches:
            return call.arguments
        prepare(model, sequential=call.sequential, **call.arguments)
        tracked = screen.track(batches, "calibrate", len(batches))
        calibrate(model, tracked, progress=False)
    # Those given to prepare hold, and are not to be recorded twice. Who asks for layers one after
    # the other says what becomes of those that text does not reach.
    is_asked = call.sequential and call.quality is None
    return {"rules": [] if is_asked else call.rules_beside_text()}
