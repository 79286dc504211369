"""Calibration as quantize does it: on what --data names, before convert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..api import calibrate, prepare
from ..calibration.processor import Processor
from ..calibration.rows import open_source
from ..calibration.to_batches import Example, Target, collate, examples
from ..checkpoint import float_models
from ..engine.one_call import OneCall
from ..errors import OptionError
from ..evaluation import fast_dtype
from ..nn.kv_cache import KV_CACHE
from ..quantization.recipe import Recipe
from ..record.quality import QUALITY
from . import sources


def read_examples(
    spec: str, processor: Any, config: Any, *, samples: int, seq_len: int, seed: int | None = None
) -> list[Example]:
    """Return the calibration data of a model: windows of tokens, or rows with images."""
    target, tokens = Target.of_config(config), Processor(processor)
    source = open_source(spec)
    return examples(source, tokens, target, samples=samples, seq_len=seq_len, seed=seed)


def require_context(config: Any, tokens: int, option: str) -> None:
    """Refuse windows that a model has no positions for, where an option asks for them."""
    limit = Target.of_config(config).context
    if limit is not None and tokens > limit:
        raise OptionError(
            f"{option} is {tokens}, but the context of the model is {limit} tokens. "
            f"Choose at most {limit}."
        )


def require_writer(config: Any) -> None:
    """Refuse models that cannot write text, where none is given."""
    kind = float_models.model_class(config)
    if not getattr(kind, "can_generate", bool)() or getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"A model of type {config.model_type} writes no text to calibrate on. Give --data "
            "FILE, or choose --method sse with --scheme nvfp4a16, which need none."
        )


def one_call(
    model: Any, recipe: Recipe, *, by_layers: bool = False, device: str | None = None
) -> OneCall:
    """Return the plan of one call for a float model; all that is wrong raises before.

    Args:
        model: in floating point.
        recipe: of the call.
        by_layers: calibrate one layer after the other, which a quality may ask for, too.
        device: on which layers are calibrated.
    """
    given = recipe.arguments()
    rules, kv_cache = given.pop("rules"), given.pop(KV_CACHE, None)
    return OneCall.of(model, given.pop(QUALITY, None), given, rules, kv_cache, by_layers, device)


@contextmanager
def calibrated(
    call: OneCall, found: Sequence[Example] | None, batch_size: int, *, tokenizer: Any = None
) -> Iterator[dict[str, Any]]:
    """Smooth and calibrate a model, and yield the arguments of `convert` for the rest.

    After an error within, a smoothed model has the bits of before.

    Args:
        call: of the model.
        found: examples of the data; None for none, or for text that the model writes.
        batch_size: examples that run at once.
        tokenizer: of the text that the model writes where it needs some; None forbids that.
    """
    model: Any = call.root
    writes = found is None and tokenizer is not None and call.tokens > 0
    batches: list[Any] = []
    if found is not None:
        batches = collate(found, batch_size, config=model.config, first_alone=call.sequential)
    # One layer after the other is calibrated in the dtype that it is converted in.
    whole = [model] if (batches or writes) and not call.sequential else []
    sources.note_dtype("calibrates", *whole)
    with fast_dtype(*whole):
        if writes:
            batches = call.own_text(tokenizer)
    if not batches:
        yield call.arguments
        return
    with call.smoothed(batches):
        with fast_dtype(*whole):
            prepare(model, sequential=call.sequential, **call.arguments)
            calibrate(model, batches)
        yield _rest(call, found)


def _rest(call: OneCall, found: Sequence[Example] | None) -> dict[str, Any]:
    """Return the arguments of `convert` for a calibrated model."""
    # Those given to prepare hold, and are not to be recorded twice. With layers one
    # after the other the user decides about layers that no data reaches.
    if call.sequential and call.quality is None:
        return {"rules": []}
    is_text = all(isinstance(each, Tensor) for each in found or ())
    return {"rules": call.rules_beside_text("text" if is_text else "the data")}
