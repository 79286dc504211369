"""Calibration as quantize and report do it: on what --calib names, before convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..api import calibrate, prepare
from ..calibration.collate import Example, collate
from ..calibration.examples import examples
from ..calibration.sources import open_source
from ..calibration.target import Target
from ..calibration.tokens import Tokens
from ..config import Rule
from ..errors import OptionError
from ..evaluation import fast_dtype
from ..quantization.observer import OBSERVERS
from ..quantization.plan import plan_layers
from ..quantization.recipe import Recipe
from ..quantization.unreached import covering_globs
from . import screen, sources


def read_examples(
    spec: str, processor: Any, config: Any, *, samples: int, seq_len: int, seed: int | None = None
) -> list[Example]:
    """What a model of a config is calibrated on: windows of tokens, or rows with images."""
    target, tokens = Target.of_config(config), Tokens(processor)
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


def calibrated(
    model: Any,
    recipe: Recipe,
    found: Sequence[Example] | None,
    batch_size: int,
    sequential: bool = False,
) -> dict[str, Any]:
    """Calibrate a model on examples, if any; the arguments of `convert`.

    sequential: `convert` calibrates one layer after the other; else the model is as a whole.
    """
    arguments = recipe.arguments()
    if found is not None:
        prepare(model, sequential=sequential, **arguments)
        batches = collate(found, batch_size, config=model.config, first_alone=sequential)
        # One layer after the other is calibrated in the dtype that it is converted in.
        whole = [] if sequential else [model]
        sources.note_dtype("calibrates", *whole)
        with fast_dtype(*whole):
            calibrate(model, batches)
        what = "text" if all(isinstance(each, Tensor) for each in found) else "the data"
        # Those given to prepare hold, and are not to be recorded twice.
        arguments["rules"] = [] if sequential else _beside_text(model, recipe, what)
    return arguments


def _beside_text(model: Any, recipe: Recipe, what: str) -> list[Rule]:
    """Rules that skip what text did not reach outside of the text part of a model, said in a line.

    That is the vision tower or the like of a model whose config has one for text inside. `what` is
    the name of the data.
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
        screen.note(f"{what} does not reach {', '.join(globs)}: these layers are skipped")
    skipped = {"unreached": "skip"} if recipe.config.needs else None
    return [(glob, skipped) for glob in globs]
