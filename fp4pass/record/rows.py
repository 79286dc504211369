"""Hold the report of a conversion: the numbers of each linear layer, or why it was skipped."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from ..core.formats import E2M1, E4M3, E8M0
from ..core.machine import has_fp4_tensor_cores
from ..errors import OptionError, expected
from .config import LinearConfig
from .schemes import scheme_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One linear layer."""

    name: str
    shape: tuple[int, ...]  # [N, K] of its weight
    config: LinearConfig | None = None  # None before, and for a skipped layer
    bits: float = 0.0  # for one weight, block scales included
    weight_error: float | None = None  # |W - Q| / |W|, W what the method approximated
    # |(W - Q) x| / |W x| on the calibration inputs, None without any; as if blocks of columns were
    # uncorrelated unless the whole Hessian was collected.
    output_error: float | None = None
    tokens: int = 0  # that calibration saw
    proved: float | None = None  # `Hessian(exact=True)`: share of the blocks proved optimal
    gap: float | None = None  # the part of the loss that the other blocks could lose at most
    # Of a stack: experts that calibration never reached, the fewest, median and most tokens of one,
    # and the share of the routing weight of those with fewer than 32.
    unreached: tuple[int, ...] = ()
    expert_tokens: tuple[int, ...] = ()
    rare_routing: float | None = None
    note: str = ""  # why an option was not followed, "" if all were
    skip_reason: str = ""  # why the layer was skipped, "" if it was not

    @property
    def scheme(self) -> str:
        """The name of the scheme, "" for a layer without a config."""
        return "" if self.config is None else self.config.scheme

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, `scheme` among them; `from_dict` reads them."""
        return {**self.record(), "scheme": self.scheme}

    def record(self) -> dict[str, Any]:
        """Return the fields alone as plain values, as files have them; `from_dict` reads them."""
        config = None if self.config is None else self.config.to_dict()
        lists = {name: list(value) for name, value in vars(self).items() if type(value) is tuple}
        return {**vars(self), **lists, "config": config}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Row:
        """Read what `to_dict` returned. Raises OptionError for a value of another type."""
        given = data["config"]
        config = None if given is None else LinearConfig.from_dict(given)
        tuples = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        fields = {name: value for name, value in data.items() if name != "scheme"}
        row = Row(**{**fields, **tuples, "config": config})
        for name, hint in get_type_hints(Row).items():
            if not _fits(value := getattr(row, name), hint):
                raise OptionError(expected(f"Report: a row: {name}", str(hint), f"{value!r:.100}"))
        return row


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type as the fields of rows have them."""
    if get_origin(hint) is tuple:
        return type(value) is tuple and all(_fits(each, get_args(hint)[0]) for each in value)
    if get_args(hint):
        return any(_fits(value, each) for each in get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)


@dataclass(frozen=True)
class Report:
    """A row for each linear layer; prints as a table.

    Example:
        >>> report = fp4pass.report(fp4pass.convert(model, method="sse"))
        >>> [row.name for row in report.converted], len(report.skipped)
        (['0', '2'], 0)
        >>> list(report.record()), json.loads(report.to_json())["rows"][1]["name"]
        (['rows'], '2')
        >>> fp4pass.Report.from_dict(report.to_dict()) == report
        True
    """

    rows: tuple[Row, ...]

    @property
    def converted(self) -> tuple[Row, ...]:
        """The rows of the layers that are quantized, or will be."""
        return tuple(row for row in self.rows if not row.skip_reason)

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The rows of the layers that stay as they are."""
        return tuple(row for row in self.rows if row.skip_reason)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the whole model on this machine, each in a sentence."""
        note = tensor_core_note(row.config for row in self.rows if row.config is not None)
        return (note,) if note else ()

    def to_dict(self) -> dict[str, Any]:
        """Return {"rows": [...], "notes": [...]} of plain values, which `from_dict` reads."""
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, "notes": list(self.notes)}

    def record(self) -> dict[str, Any]:
        """Return the same without notes, as files have them; `from_dict` reads it."""
        return {"rows": [row.record() for row in self.rows]}

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """Read what `to_dict` returned. Raises OptionError for anything else."""
        if not (isinstance(data, Mapping) and isinstance(data.get("rows"), list)):
            raise OptionError(expected("Report: data", "what Report.to_dict returned", data))
        return Report(tuple(map(Row.from_dict, data["rows"])))

    def __str__(self) -> str:
        header = ("layer", "N x K", "scheme", "method", "bits", "weight err", "output err")
        lines = [header]
        for row in self.converted:
            # A prepared model has layers that are not converted yet.
            how = ("-", "-", "-")
            if row.config is not None:
                how = (row.config.label, row.config.method_name, f"{row.bits:.2f}")
            errors = (percent(row.weight_error), percent(row.output_error))
            lines.append((row.name, _size(row.shape), *how, *errors))
        text = table_lines(lines)
        rare = [row for row in self.converted if row.unreached]
        if rare:
            text += ["", "experts that calibration never reached (by the average of their layer):"]
            text += [f"  {row.name}: {', '.join(map(str, row.unreached))}" for row in rare]
        noted = [row for row in self.converted if row.note]
        if noted or self.notes:
            text += ["", "notes:", *(f"  {row.name}: {row.note}" for row in noted)]
            text += [f"  {note}" for note in self.notes]
        if self.skipped:
            text += ["", "skipped:"]
            width = max(len(row.name) for row in self.skipped)
            text += [
                f"  {row.name.ljust(width)}  {_size(row.shape)}  {row.skip_reason}"
                for row in self.skipped
            ]
        return "\n".join(line.rstrip() for line in text)


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the first row its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (rows[0], ["-" * width for width in widths], *rows[1:])
    text = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return [line.rstrip() for line in text]


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def percent(value: float | None) -> str:
    """Return a share in per cent, `-` for None."""
    return "-" if value is None else f"{100 * value:.2f} %"


def tensor_core_note(configs: Iterable[LinearConfig], machine: str = "this machine") -> str:
    """Return a sentence on layers whose inputs are quantized in vain on a machine, or ""."""
    # FP4 tensor cores multiply these alone.
    keys = {
        config.format.with_multiplier(False).key: None
        for config in configs
        if config.input_format == config.format
        and config.format.element == E2M1
        and config.format.scale in (E4M3, E8M0)
    }
    if not keys or has_fp4_tensor_cores():
        return ""
    names = ", ".join(scheme_name(key, weight_only=False) for key in keys)
    others = ", ".join(scheme_name(key, weight_only=True) for key in keys)
    schemes, s, verb = ("scheme", "s", "is") if len(keys) == 1 else ("schemes", "", "are")
    return (
        f"{schemes.capitalize()} {names} also quantize{s} inputs, for FP4 tensor cores, which "
        f"{machine} lacks. Without them, {schemes} {others} {verb} faster and more accurate."
    )


@functools.cache
def say_once(note: str) -> None:
    """Log a note, once in a process however many models it converts."""
    _log.warning(note)
