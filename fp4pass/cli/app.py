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
from typer.core import TyperGroup

from .._version import __version__
from ..core.progress import shown
from ..errors import Fp4PassError
from .convert import convert
from .doctor import doctor
from .evaluate import evaluate
from .inspect import inspect
from .merge import merge
from .quantize import quantize
from .report import report
from .screen import BAD_INPUT, CLOSED, INTERRUPTED, complain, news, note
from .serve import serve
from .verify import verify
from .words import Words, parsing_problem


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
            message = parsing_problem(error)
            end = "" if message.endswith("?") else "."
            complain(f"{command}: {message}{end} See {command} --help.")
            code = BAD_INPUT
        raise SystemExit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print its errors and warnings as lines on stderr."""

        def here(text: object) -> str:
            command = self.commands.get(ctx.invoked_subcommand)
            return Words(() if command is None else command.params).translate(str(text))

        with warnings.catch_warnings(), news():
            if not sys.warnoptions:
                warnings.showwarning = lambda text, *_, **__: note(
                    f"fp4pass: warning: {here(text)}"
                )
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
                complain(f"fp4pass: {here(error)}")
                raise Exit(BAD_INPUT) from error
            except KeyboardInterrupt as stop:
                note(f"fp4pass: interrupted. {stop}")
                raise Exit(INTERRUPTED) from stop


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
    "convert": convert,
    "merge": merge,
    "serve": serve,
    "doctor": doctor,
}
for _name, _command in _COMMANDS.items():
    # The first sentence, whole: what is not given as a short help is cut.
    _summary = " ".join(cleandoc(_command.__doc__ or "").split("\n\n")[0].split())
    app.command(_name, short_help=_summary)(_command)
