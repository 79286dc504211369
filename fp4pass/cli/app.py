"""The commands under one name, and what their errors look like."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer import Exit, Option
from typer.core import TyperCommand, TyperGroup

from .._version import __version__
from ..core.progress import shown
from ..errors import Fp4PassError, expected, named_as
from ..record.config import OPTIONS
from .doctor import doctor
from .evaluate import evaluate
from .folders import inspect, serve, transcode, verify
from .merge import merge
from .quantize import quantize
from .report import report
from .screen import BAD_INPUT, CLOSED, INTERRUPTED, complain, news, note

# The headings of --help under which parameters stand; others stand under Options.
_HEADINGS = {
    "Quality": {
        *(each.name for each in OPTIONS),
        *("rules", "quality", "budget", "schemes", "kv_cache"),
    },
    "Data": {"data", "held_out", "samples", "seq_len", "seed", "stride", "batch_size"},
    "Device": {"device", "dtype", "sequential", "stream", "trust_remote_code"},
    "Output": {"output", "to", "max_shard_size", "copy_files", "overwrite"},
}


class Command(TyperCommand):
    """A command whose errors name its flags, and whose --help has them under headings."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with named_as(_flags(self.params)):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters, heading by heading."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {heading: [] for heading in (*_HEADINGS, "Options")}
        for each in self.get_params(ctx):
            headings = (heading for heading, names in _HEADINGS.items() if each.name in names)
            heading = next(headings, "Options")
            if each.param_type_name == "argument":
                heading = "Arguments"
            if (record := each.get_help_record(ctx)) is not None:
                sections[heading].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Commands(TyperGroup):
    """The commands; whatever is wrong is one line on stderr and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit with its code."""
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(args, prog_name or "fp4pass", standalone_mode=False, **extra)
        except typer.TyperException as error:
            command = getattr(getattr(error, "ctx", None), "command_path", "fp4pass")
            message = _parsing_problem(error)
            end = "" if message.endswith("?") else "."
            complain(f"{command}: {message}{end} See {command} --help.")
            code = BAD_INPUT
        raise SystemExit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print its errors and warnings as lines on stderr."""
        with warnings.catch_warnings(), news():
            if not sys.warnoptions:
                warnings.showwarning = lambda text, *_, **__: note(f"fp4pass: warning: {text}")
            try:
                # One bar for all that a command does.
                with shown(""):
                    result = super().invoke(ctx)
                sys.stdout.flush()
                return result
            except BrokenPipeError as error:
                # Python would write the rest when it ends, and print an error again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise Exit(CLOSED) from error
            except (Fp4PassError, OSError) as error:
                complain(f"fp4pass: {error}")
                raise Exit(BAD_INPUT) from error
            except KeyboardInterrupt as stop:
                note(f"fp4pass: interrupted. {stop}")
                raise Exit(INTERRUPTED) from stop


# The options of commands for arguments of Python with another name.
_ARGUMENTS = {
    "to": ("layout",),
    "output": ("directory", "path"),
    "data": ("batches",),
    "seq_len": ("window",),
    "samples": ("windows",),
}

# Pydantic's names of what is wrong with a value.
_WANTED = {
    "bool_parsing": "true or false",
    "float_parsing": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
}


def _flags(parameters: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """Return the flags of a command, on and off, by the names of Python's arguments."""
    found: dict[str, tuple[str, str]] = {}
    for each in parameters:
        flags = [flag for flag in each.opts if flag.startswith("--")]
        if flags:
            both = flags[0], next(iter(each.secondary_opts), f"no {flags[0]}")
            found |= {name: both for name in (each.name, *_ARGUMENTS.get(each.name, ()))}
    return found


def _parsing_problem(error: Any) -> str:
    """Return what the parser of options found wrong, without the words of pydantic."""
    message = str(error.format_message()).rstrip(".")
    details = getattr(error.__cause__, "errors", None)
    flags = [
        flag for flag in getattr(getattr(error, "param", None), "opts", ()) if flag.startswith("--")
    ]
    if details is None or not flags:
        return message
    (first, *_) = details()
    wanted = _WANTED.get(first["type"])
    if wanted is None:
        return f"{flags[0]}: {str(first['msg']).removeprefix('Value error, ').rstrip('.')}"
    return expected(flags[0], wanted, str(first["input"])).rstrip(".")


app = typer.Typer(
    name="fp4pass",
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted, "
    "141 output closed by its reader.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fp4pass {__version__}")
        raise Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Quantize PyTorch models to 4-bit floating point; measure, inspect, check and export them."""


_COMMANDS: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "eval": evaluate,
    "inspect": inspect,
    "verify": verify,
    "report": report,
    "transcode": transcode,
    "merge": merge,
    "serve": serve,
    "doctor": doctor,
}
for _name, _command in _COMMANDS.items():
    # The first sentence, whole: what is not given as a short help is cut.
    _summary = " ".join(cleandoc(_command.__doc__ or "").split("\n\n")[0].split())
    app.command(_name, cls=Command, short_help=_summary)(_command)
