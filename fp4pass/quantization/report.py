"""The report of a conversion: a row per linear, with its numbers or why it was left alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..config import Rule
from ..core.formats import Format, get_format
from ..core.quant_state import QuantState
from ..errors import OptionError, StateError
from ..kernels.statistics.reference import output_energy
from ..methods import Certified, Stats
from .plan import Site

_RECORD = "_fp4pass_record"


@dataclass(frozen=True)
class Row:
    """One linear.

    shape: [N, K]; bits: per weight, with block scales; weight_error: |W - Q| / |W|; output_error:
    |(W - Q) x| / |W x| on the calibration inputs, as if blocks of columns were uncorrelated unless
    the whole Hessian was collected, None without any; W is what the method was given, which
    `Gptq(target="cross")` corrects before; tokens: that calibration saw; proved: the
    share of the blocks whose scale and codes are proved the best, and gap, the part of the loss
    that the others could still lose at most, for `Hessian(exact=True)`; reason: why it was left
    alone, "" if it was converted.
    """

    name: str
    shape: tuple[int, ...]
    format: str = ""
    method: str = ""
    block: int = 0
    weight_only: bool = False
    bits: float = 0.0
    weight_error: float | None = None
    output_error: float | None = None
    tokens: int = 0
    proved: float | None = None
    gap: float | None = None
    reason: str = ""
    activation_scales: str = "naive"
    rotation: int = 0
    folded: bool = False
    output_rotation: int = 0

    @property
    def inputs(self) -> str:
        """What becomes of the inputs of a converted linear, in few words."""
        fmt = get_format(self.format, self.block)
        return inputs_of(fmt, self.weight_only, self.activation_scales, self.rotation)


def inputs_of(fmt: Format, weight_only: bool, activation_scales: str, rotation: int) -> str:
    """What becomes of the inputs of a linear, in few words."""
    rotated = f", rotated by {rotation}" if rotation else ""
    if weight_only:
        return f"float{rotated}"
    searched = "" if activation_scales == "naive" else f", {activation_scales}"
    return f"{fmt.element.bits} bit{searched}{rotated}"


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows with one format, method and treatment of inputs together."""

    def key(row: Row) -> tuple[str, int, bool, str, int, str]:
        inputs = (row.weight_only, row.activation_scales, row.rotation)
        return row.format, row.block, *inputs, row.method

    return [list(group) for _, group in itertools.groupby(sorted(rows, key=key), key)]


@dataclass(frozen=True)
class Report:
    """A row per linear; prints as a table."""

    rows: tuple[Row, ...]

    @property
    def converted(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left_alone(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason)

    def to_dict(self) -> dict[str, Any]:
        """{"rows": [...]} of plain values; `from_dict` reads it."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        return Report(tuple(Row(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]))

    def __str__(self) -> str:
        header = ("layer", "N x K", "format", "method", "bits", "weight err", "output err")
        lines = [header]
        for row in self.converted:
            activations = "" if row.weight_only else " + input"
            # A prepared model has linears that are not converted yet.
            lines.append(
                (
                    row.name,
                    _size(row.shape),
                    f"{row.format}/{row.block}{activations}" if row.format else "-",
                    row.method or "-",
                    f"{row.bits:.2f}" if row.format else "-",
                    _percent(row.weight_error),
                    _percent(row.output_error),
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        text.insert(1, "  ".join("-" * width for width in widths))
        if self.left_alone:
            text += ["", "left alone:"]
            width = max(len(row.name) for row in self.left_alone)
            text += [
                f"  {row.name.ljust(width)}  {_size(row.shape)}  {row.reason}"
                for row in self.left_alone
            ]
        return "\n".join(line.rstrip() for line in text)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


@dataclass(frozen=True)
class Record:
    """What prepare, convert or load did to a model: kept on its root module.

    status: "prepared" or "converted"; recipe: the options it was done with, as plain values;
    rules, needs: those that prepare was given and what its observers collect.
    """

    status: str
    recipe: Mapping[str, Any]
    report: Report
    rules: tuple[Rule, ...] = ()
    needs: tuple[str, ...] = ()


def set_record(model: nn.Module, record: Record) -> None:
    """Remember what was done to a model."""
    model.__dict__[_RECORD] = record


def forget_record(model: nn.Module) -> None:
    """The model is on its way from one state to the next, and with it parts that were prepared."""
    for module in model.modules():
        record = module.__dict__.get(_RECORD)
        if module is model or (record is not None and record.status == "prepared"):
            module.__dict__.pop(_RECORD, None)


def get_record(model: nn.Module) -> Record | None:
    """What was done to a model, None for an untouched one. Looks through torch.compile."""
    return unwrap(model).__dict__.get(_RECORD)


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, also when it is wrapped by torch.compile."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"The model is a {type(model).__name__}; a torch.nn.Module is wanted.")
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


def report(model: nn.Module) -> Report:
    """The report of a prepared or converted model.

    Raises StateError for a model that fp4pass has not touched.
    """
    record = get_record(model)
    if record is None:
        raise StateError(
            "The model was neither prepared nor converted. Call fp4pass.convert(model) first."
        )
    return record.report


def make_row(site: Site, weight: Tensor | None = None, state: QuantState | None = None) -> Row:
    """The row of a site: with `weight` [N, K] and its quantized state if it was converted."""
    shape = tuple(reversed(site.shape)) if site.transposed else site.shape
    if state is None or weight is None or site.settings is None:
        return Row(site.name, shape, reason=site.reason, tokens=site.stats.tokens)
    fmt = state.format
    weight_error, output_error = _errors(weight, state, site.stats)
    certificate = state.certificate if isinstance(state, Certified) else None
    return Row(
        name=site.name,
        shape=shape,
        format=fmt.name,
        method=site.settings.method.name,
        block=fmt.block,
        weight_only=site.settings.weight_only,
        bits=fmt.bits_per_weight,
        weight_error=weight_error,
        output_error=output_error,
        tokens=site.stats.tokens,
        proved=None if certificate is None else certificate.proved,
        gap=None if certificate is None else certificate.gap,
        activation_scales=site.settings.activation_scales,
        rotation=site.settings.rotation,
        folded=site.settings.folded,
        output_rotation=site.settings.output_rotation,
    )


def _errors(weight: Tensor, state: QuantState, stats: Stats) -> tuple[float, float | None]:
    """|W - Q| / |W|, and |(W - Q) x| / |W x| by the Hessian or else by its diagonal blocks."""
    hessian = stats.block_hessian
    divisor = torch.tensor([1.0 / state.global_scale], dtype=torch.float32, device=weight.device)
    sums = torch.ops.fp4pass.errors(
        weight, state.qdata, state.scale, divisor, hessian, state.format.key
    )
    error, size, output, energy = sums.clamp_(min=0).sqrt().tolist()
    weight_error = error / size if size else 0.0
    if stats.hessian is not None:
        # Errors of one block make up for those of others.
        dense = ops.dequantize(state.qdata, state.scale, divisor, state.format.key, torch.float32)
        whole = stats.hessian.to(weight.device)
        output = math.sqrt(output_energy(weight - dense, whole))
        energy = math.sqrt(output_energy(weight, whole))
    if hessian is None:
        return weight_error, None
    return weight_error, output / energy if energy else 0.0
