"""Command-line options made from the fields of LinearConfig."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..errors import OptionError
from ..quantization.recipe import Recipe
from ..record.config import OPTIONS, LinearConfig
from ..record.quality import QUALITIES, get_quality

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
Overwrite = Annotated[bool, Option(help="Replace the checkpoint in the folder.")]
Card = Annotated[
    bool,
    Option("--card/--no-card", help="Replace the model's README.md with a model card."),
]

# Fields whose option has another name: its values are names of schemes.
_FLAGS = {"fmt": "scheme"}

# The negative form of a flag, by its field.
_OFF = {"weight_only": "quantize-inputs"}


def with_config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for each field of LinearConfig, and a dict of those given."""
    names = [each.name for each in OPTIONS]

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in names}
        options = {name: value for name, value in given.items() if value is not None}
        return command(*args, config_options=options, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "config_options"]
    # Behind what has no default, in front of the other options.
    place = sum(each.default is inspect.Parameter.empty for each in own)
    own[place:place] = map(_parameter, OPTIONS)
    # All by keyword, for required parameters may stand behind others.
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return run


def flag(name: str) -> str:
    """Return the option of a field of LinearConfig, as it is typed."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def read_recipe(path: Path | None, quality: str | None, options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file, of --quality, and of the options of a command before both."""
    if quality is not None:
        decided = [name for name in options if name in get_quality(quality).decides]
        if decided:
            flags = " and ".join(map(flag, decided))
            raise OptionError(f"--quality {quality} decides {flags}. Leave out one of them.")
    if path is None:
        recipe = Recipe(quality=quality)
    else:
        recipe = Recipe.read(path, quality, options.get("weight_only"))
    return recipe.override(options)


def _parameter(field: Field[Any]) -> inspect.Parameter:
    """Return the parameter of a command for a field; None if it is not given."""
    text, choices = field.metadata["help"], field.metadata["choices"]
    name, kind, metavar = flag(field.name), _TYPES[field.name], None
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


def _base_type(hint: Any) -> Any:
    """Return the type of a field without None; a string for any type and for names."""
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return str if hint is Any or typing.get_origin(hint) is typing.Literal else hint


_TYPES = {name: _base_type(hint) for name, hint in typing.get_type_hints(LinearConfig).items()}
