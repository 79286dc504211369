"""Options that several commands share, and what they stand for: recipes, models and data."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn
from typer import Option

from ..calibration.processor import Processor, Target
from ..calibration.rows import open_source
from ..calibration.to_batches import collate, examples
from ..checkpoint import is_packed, load
from ..checkpoint.float_models import load_float, reading, text_tokenizer
from ..core.machine import require_device
from ..distributed import Ranks, ranks
from ..errors import OptionError, expected
from ..quantization.observers.batches import IN_FLOAT32, is_slow
from ..quantization.recipe import Recipe
from ..record.config import OPTIONS, LinearConfig
from ..record.schemes import QUALITIES, get_quality
from .screen import note

Device = Annotated[
    str | None, Option(help="cpu, cuda, or auto for all devices.", show_default="cuda, else cpu")
]
TrustCode = Annotated[
    bool, Option("--trust-remote-code", help="Run code from the folder of a model.")
]
QualityName = Annotated[
    str | None,
    Option(
        "--quality",
        help=f"A named recipe, in place of --method: {', '.join(QUALITIES)}.",
        metavar="NAME",
        show_default=False,
    ),
]
Measured = Annotated[
    list[str] | None,
    Option(
        "--data",
        help="Text to measure on, as for quantize; can be repeated.",
        metavar="FILE|DATASET",
    ),
]
MeasuredSamples = Annotated[
    int | None,
    Option("--samples", help="Windows of each text, spread evenly.", show_default="all"),
]
MeasuredLength = Annotated[int, Option("--seq-len", help="Tokens per window.")]
SeqLen = Annotated[
    int | None, Option(help="Tokens per window.", show_default="512, or the context")
]
BatchSize = Annotated[int, Option(help="Windows that run at once.")]
Seed = Annotated[
    int | None, Option(help="Draw windows at random; by default they are spread evenly.")
]
CopyFiles = Annotated[
    list[str] | None,
    Option(
        "--copy-files",
        help="Files of the model's folder to copy besides those that go with it; can be repeated.",
        metavar="GLOB",
        show_default=False,
    ),
]
ShardSize = Annotated[str, Option(help="Largest size of a file of weights.")]
Output = Annotated[Path, Option("--output", "-o", help="The folder to write.")]
Overwrite = Annotated[bool, Option(help="Replace the checkpoint in the folder.")]
Card = Annotated[
    bool,
    Option("--card/--no-card", help="Replace the model's README.md with a model card."),
]

# Fields whose option has another name: its values are names of schemes.
_FLAGS = {"fmt": "scheme"}

# The negative form of a flag, by its field.
_OFF = {"weight_only": "quantize-inputs"}

_HINTS = typing.get_type_hints(LinearConfig)


def with_config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for each field of LinearConfig, and a dict of those given."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {each.name: kwargs.pop(each.name) for each in OPTIONS}
        options = {name: value for name, value in given.items() if value is not None}
        return command(*args, config_options=options, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "config_options"]
    # After what has no default, before the other options.
    place = sum(each.default is inspect.Parameter.empty for each in own)
    own[place:place] = map(_parameter, OPTIONS)
    # All by keyword, for required parameters may stand after others.
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return run


def _parameter(field: Field[Any]) -> inspect.Parameter:
    """Return the parameter of a command for a field; None if it is not given."""
    text, choices = field.metadata["help"], field.metadata["choices"]
    name, kind, metavar = flag(field.name), _HINTS[field.name], None
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    if kind is Any or typing.get_origin(kind) is typing.Literal:
        kind = str
    names = [name]
    if kind is bool:
        names = [f"{name}/--{_OFF.get(field.name, f'no{name[1:]}')}"]
    elif field.name == "fmt" or (choices and isinstance(field.default, str)):
        # The library says what is wrong with a name, and which one may be meant.
        metavar = "NAME"
    if choices:
        text += f" One of {', '.join(map(str, choices))}."
    if field.default is not None and kind is not bool:
        text += f" Default: {field.default}."
    option = Option(*names, help=text, metavar=metavar, show_default=False)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, keyword, default=None, annotation=annotation)


def flag(name: str) -> str:
    """Return the option of a field of LinearConfig, as it is typed."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def read_recipe(path: Path | None, quality: str | None, options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file, of --quality, and of the options of a command before both."""
    decided = [] if quality is None else [n for n in options if n in get_quality(quality).decides]
    if decided:
        flags = " and ".join(map(flag, decided))
        raise OptionError(f"--quality {quality} decides {flags}. Leave out one of them.")
    recipe = Recipe(quality=quality)
    if path is not None:
        recipe = Recipe.read(path, quality, options.get("weight_only"))
    return recipe.override(options)


def choose_device(name: str | None) -> str:
    """Return a device that is there: "auto" spreads a model over all, None is a GPU if any."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "auto":
        require_device(name, "--device ")
    return name


def require_at_least(least: int, **options: int | None) -> None:
    """Raise OptionError for an option below a number."""
    for name, value in options.items():
        if value is not None and value < least:
            raise OptionError(expected(flag(name), f"at least {least}", value))


def require_context(config: Any, tokens: int | None) -> None:
    """Refuse windows of --seq-len that a model has no positions for."""
    limit = Target.of_config(config).context
    if limit is not None and tokens is not None and tokens > limit:
        raise OptionError(
            f"--seq-len is {tokens}, but the context of the model is {limit} tokens. "
            f"Choose at most {limit}."
        )


def read_batches(
    spec: str,
    source: str,
    processor: Any,
    config: Any,
    batch_size: int,
    first_alone: bool = False,
    **numbers: Any,
) -> list[Any]:
    """Return the share of this process of the calibration data that a command names.

    source: the name of the model. numbers: samples, seq_len and seed, as for `batches`.
    """
    group = ranks()
    text_tokenizer(processor, source)
    target, reader = Target.of_config(config), Processor(processor)
    found = examples(open_source(spec), reader, target, **numbers)
    if len(found) < group.size:
        raise OptionError(
            f"{spec} has {len(found)} windows, fewer than the {group.size} processes. Give more "
            "text, or run one process."
        )
    found = found[group.rank :: group.size]
    return collate(found, batch_size, config=config, first_alone=first_alone)


def quiet() -> None:
    """Keep what transformers, the hub and bitsandbytes (by PEFT) print off the screen."""
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def load_any(source: str, device: str, trust: bool = False) -> nn.Module:
    """Load the model of a folder with packed weights, or a float model."""
    if is_packed(source):
        quiet()
        with reading(source, "the model"):
            return load(source, device_map=device)
    return load_float(source, "auto", device, trust)


def note_dtype(what: str, *models: nn.Module | None) -> None:
    """Say so if one of the models computes in another dtype than that of its weights."""
    if any(model is not None and is_slow(model) for model in models):
        note(f"{what} {IN_FLOAT32}")


def join_processes() -> Ranks:
    """Join the processes that torchrun started, each on a GPU of its own, if it did."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not dist.is_initialized():
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    return ranks()
