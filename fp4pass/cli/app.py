"""The commands, their options as data, and what their errors look like."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .._version import __version__
from ..checkpoint.layouts import LAYOUTS
from ..checkpoint.saving import transcode_targets
from ..core.progress import shown
from ..errors import Fp4PassError, named_as, unknown_name
from ..lab import SCHEMES
from ..methods import METHODS
from ..nn.kv_cache import CACHE_FORMATS
from ..record.config import OPTIONS, LinearConfig
from ..record.schemes import QUALITIES
from .doctor import doctor
from .folders import evaluate, report, serve, transcode, verify
from .folders import inspect as inspect_folder
from .options import flag
from .quantize import merge, quantize
from .screen import BAD_INPUT, CLOSED, INTERRUPTED, OK, complain, news, note

COMMANDS: dict[str, Callable[..., int | None]] = {
    "quantize": quantize,
    "eval": evaluate,
    "inspect": inspect_folder,
    "verify": verify,
    "report": report,
    "transcode": transcode,
    "merge": merge,
    "serve": serve,
    "doctor": doctor,
}

_WHAT = "Quantize PyTorch models to 4-bit floating point; measure, inspect, check and export them."
_CODES = (
    "Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted, "
    "141 output closed by its reader."
)

# The word for a value and the help of each parameter of the commands, by its heading; those of one
# command have its name before them. Defaults are those of the functions.
_HELP: dict[str, dict[str, tuple[str, str]]] = {
    "Arguments": {
        "folder": ("DIR", "A folder with packed weights."),
        "eval.folder": ("DIR", "A folder, packed or float, or a hub id."),
        "model": ("MODEL", "A folder or a hub id."),
        "base": ("BASE", "A folder with packed weights."),
        "adapter": ("ADAPTER", "A folder that PEFT wrote."),
    },
    "Quality": {
        "merge.method": (
            "NAME",
            f"Method for the merged weights: {', '.join(METHODS)}; gptq by default.",
        ),
        "rules": ("FILE", "A recipe or a list of rules, YAML or JSON; options override it."),
        "quality": ("NAME", f"A named recipe, in place of --method: {', '.join(QUALITIES)}."),
        "budget": (
            "NUMBERbits|NUMBERkl",
            "Choose the scheme of each layer by measuring: 5.0bits for the best model with that "
            "many bits per weight, 0.02kl for the smallest model within that KL. --method is then "
            "sse by default.",
        ),
        "schemes": (
            "NAMES",
            "Schemes for --budget, separated by commas; bf16 leaves layers unchanged. Default: "
            f"{','.join(SCHEMES)}.",
        ),
        "kv_cache": (
            "NAME",
            f"Format of the key-value cache of generate: {', '.join(CACHE_FORMATS)}. Default: "
            "in float.",
        ),
    },
    "Data": {
        "data": (
            "FILE|DATASET",
            "Calibration data: a text file; .jsonl, .csv, .json or .parquet with texts or chats; a "
            "folder of datasets; or name[:config][:split] of a hub dataset. Default: text that the "
            "model writes and packaged text, if the method needs any.",
        ),
        "eval.data": ("FILE|DATASET", "Text to measure on, as for quantize; can be repeated."),
        "report.data": ("FILE|DATASET", "Text to measure on, as for quantize; can be repeated."),
        "merge.data": (
            "FILE|DATASET",
            "Calibration data, as for quantize; an eighth of it is held out to measure the cost. "
            "Default: text that base + adapter writes.",
        ),
        "held_out": ("FILE|DATASET", "Other data to measure the cost on."),
        "samples": (
            "N",
            "Windows to read, spread evenly; to calibrate 128 by default, or as many as the "
            "quality has where there is no data, to measure all.",
        ),
        "seq_len": ("N", "Tokens per window; 512 by default, or the context of the model."),
        "stride": ("N", "New tokens in each window; --seq-len by default."),
        "batch_size": ("N", "Windows that run at once."),
        "seed": ("N", "Draw windows at random; by default they are spread evenly."),
        "reference": ("MODEL", "The float model to compare with: a folder or a hub id."),
        "fail_above": ("X", "Largest relative weight error of a layer."),
    },
    "Device": {
        "sequential": (
            "",
            "Move one layer at a time to the device, and calibrate it on the outputs of the "
            "quantized layers before it; for models larger than the device.",
        ),
        "stream": (
            "",
            "Also write each layer to disk once it is packed, and read the next one meanwhile; for "
            "models larger than memory. Needs text only if the method does.",
        ),
        "dtype": ("NAME", "Dtype of dense weights: auto, bfloat16, float16 or float32."),
        "device": ("NAME", "cpu, cuda, or auto for all devices; by default cuda, else cpu."),
        "serve.device": ("NAME", "cpu, cuda, cuda:1, ..., or auto for the GPU, if any."),
        "trust_remote_code": ("", "Run code from the folder of a model."),
    },
    "Output": {
        "output": ("DIR", "The folder to write."),
        "report.output": ("FILE.html", "The page to write."),
        "to": ("LAYOUT", f"The layout of the checkpoint: {', '.join(LAYOUTS)}."),
        "transcode.to": ("LAYOUT", f"The layout: {', '.join(transcode_targets())}."),
        "copy_files": (
            "GLOB",
            "Files of the model's folder to copy besides those that go with it; can be repeated.",
        ),
        "max_shard_size": ("SIZE", "Largest size of a file of weights."),
        "overwrite": ("", "Replace what is there."),
        "card": ("", "Replace the model's README.md with a model card."),
    },
    "Options": {
        "host": ("HOST", "Address to listen on; 0.0.0.0 is all."),
        "port": ("N", "Port to listen on; 0 is any free one."),
        "log_level": ("NAME", "debug, info, warning, error or critical; info logs requests."),
        "json": ("", "Print the result as JSON on stdout."),
    },
}

# The options of commands for arguments of Python with another name.
_ARGUMENTS = {
    "to": ("layout",),
    "output": ("directory", "path"),
    "data": ("batches",),
    "seq_len": ("window",),
    "samples": ("windows",),
}


# The negative form of an option.
_OFF = {"weight_only": "--quantize-inputs", "card": "--no-card"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the words of a command, and exit."""
        complain(f"{self.prog}: {message.removeprefix('argument ')}. See {self.prog} --help.")
        raise SystemExit(BAD_INPUT)


def parser(name: str) -> Parser:
    """Return the parser of a command, made of the parameters of its function."""
    command = COMMANDS[name]
    text = " ".join((command.__doc__ or "").split())
    made = Parser(f"fp4pass {name}", description=text, add_help=False, allow_abbrev=False)
    groups = {heading: made.add_argument_group(heading) for heading in _HELP}
    hints = typing.get_type_hints(command)
    for each in inspect.signature(command).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            for field in OPTIONS:
                _add_field(groups["Quality"], field)
            continue
        keys = itertools.product((f"{name}.{each.name}", each.name), _HELP)
        key, heading = next((key, heading) for key, heading in keys if key in _HELP[heading])
        metavar, said = _HELP[heading][key]
        if heading == "Arguments":
            kind = hints[each.name]
            groups[heading].add_argument(each.name, help=said, metavar=metavar, type=kind)
        else:
            if each.default not in (each.empty, None, True, False):
                said += f" Default: {each.default}."
            _add(groups[heading], each.name, hints[each.name], metavar, said, each.default)
    groups["Options"].add_argument("-h", "--help", action="help", help="Print this and exit.")
    return made


def _add(group: Any, name: str, hint: Any, metavar: str, said: str, default: Any = None) -> None:
    """Add an option; one that is on or off has no value, and one of a list can be repeated."""
    kinds = [each for each in typing.get_args(hint) if each is not type(None)] or [hint]
    kind = kinds[0] if isinstance(hint, types.UnionType) else hint
    on, more = flag(name), {"dest": name, "default": default}
    if kind is bool:
        group.add_argument(on, action="store_true", help=said, **more)
        if name in _OFF:
            said = f"The reverse of {on}."
            group.add_argument(_OFF[name], action="store_false", help=said, **more)
        return
    if typing.get_origin(kind) is list:
        more["action"], kind = "append", str
    if default is inspect.Parameter.empty:
        more |= {"required": True, "default": None}
    # The library says what is wrong with a name, and which one may be meant.
    more["type"] = kind if kind in (int, float, Path) else str
    short = ["-o"] if name == "output" else []
    group.add_argument(*short, on, help=said, metavar=metavar, **more)


def _add_field(group: Any, field: dataclasses.Field[Any]) -> None:
    """Add the option of a field of LinearConfig, which is None where it is not given."""
    said, choices = field.metadata["help"], field.metadata["choices"]
    hint = typing.get_type_hints(LinearConfig)[field.name]
    if choices:
        said += f" One of {', '.join(map(str, choices))}."
    if field.default is not None:
        said += f" Default: {field.default}."
    is_name = isinstance((*choices, field.default)[0], str)
    _add(group, field.name, hint, "NAME" if is_name else "N", said)


def run(words: Sequence[str] | None = None) -> int:
    """Run a command, print its errors and warnings as lines on stderr; return the exit code."""
    name, *rest = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: fp4pass COMMAND [OPTIONS]\n\n{_WHAT}\n\nCommands:")
        for each, command in COMMANDS.items():
            first = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
            print(f"  {each:10}{first}")
        print(f"\n{_CODES}")
        return OK
    if name == "--version":
        print(f"fp4pass {__version__}")
        return OK
    if name not in COMMANDS:
        complain(f"fp4pass: {unknown_name('Command', name, COMMANDS)} See fp4pass --help.")
        return BAD_INPUT
    made = parser(name)
    try:
        given = vars(made.parse_args(rest))
    except SystemExit as stop:
        return int(stop.code or 0)
    flags: dict[str, tuple[str, str]] = {}
    for action in made._actions:
        if action.option_strings:
            on = flag(action.dest)
            off = _OFF.get(action.dest, f"no {on}")
            flags |= dict.fromkeys((action.dest, *_ARGUMENTS.get(action.dest, ())), (on, off))
    with warnings.catch_warnings(), news(), named_as(flags):
        if not sys.warnoptions:
            warnings.showwarning = lambda text, *_, **__: note(f"fp4pass: warning: {text}")
        try:
            # One bar for all that a command does.
            with shown(""):
                code = COMMANDS[name](**given)
            sys.stdout.flush()
            return code or OK
        except BrokenPipeError:
            # Python would write the rest when it ends, and print an error again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED
        except (Fp4PassError, OSError) as error:
            complain(f"fp4pass: {error}")
            return BAD_INPUT
        except KeyboardInterrupt as stop:
            note(f"fp4pass: interrupted. {stop}")
            return INTERRUPTED
