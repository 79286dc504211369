"""The report: its numbers against float64, its forms, and its table."""

from __future__ import annotations

import json
import math

import oracle
import pytest
import torch
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import FORMATS
from fp4pass.errors import StateError
from fp4pass.record.rows import Report


class Model(nn.Module):
    """Two linears that can be converted and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 80)
        self.down = nn.Linear(80, 48, bias=False)
        self.last = nn.Linear(48, 5)
        self.odd = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.last(torch.relu(self.down(torch.relu(self.up(x))))))


def build() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def batches() -> list[Tensor]:
    return [torch.randn(7, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def converted(fmt: str, method: str, **options: object) -> Model:
    model = build()
    fp4pass.prepare(model, method)
    fp4pass.calibrate(model, batches(), progress=False)
    fp4pass.convert(model, fmt, method, **options)
    return model


def direct_errors(fmt: str, name: str, method: str) -> tuple[float, float]:
    """|W - Q| / |W| and |(W - Q) x| / |W x| by the block diagonal, both in float64."""
    original, model = build(), converted(fmt, method)
    inputs = {"up": torch.cat(batches()).double()}
    inputs["down"] = torch.relu(inputs["up"] @ original.up.weight.double().t() + original.up.bias)
    inputs["down"].detach_()
    weight = original.get_submodule(name).weight.detach().double()
    layer = model.get_submodule(name)
    g = 1.0 if layer.weight_global_scale is None else 1.0 / layer.weight_global_scale.item()
    scale = layer.weight_scale.view(torch.uint8)
    quantized = oracle.dequantize(layer.weight_packed, scale, g, fmt, FORMATS[fmt].block)
    residual, x = weight - quantized, inputs[name]
    energies = []
    for matrix in (residual, weight):
        parts = zip(matrix.split(32, 1), x.split(32, 1), strict=True)
        energies.append(sum(float((p @ m.t()).square().sum()) for m, p in parts))
    relative = float(residual.norm() / weight.norm())
    return relative, math.sqrt(energies[0] / energies[1])


@pytest.mark.parametrize(
    ("fmt", "method", "name"),
    [
        ("nvfp4", "hessian", "up"),
        ("nvfp4", "hessian", "down"),
        ("nvfp4", "sse", "down"),
        ("mxfp4", "hessian", "up"),
        ("mxfp4", "naive", "up"),
    ],
)
@pytest.mark.core
def test_errors_are_those_of_float64(fmt: str, method: str, name: str) -> None:
    rows = {row.name: row for row in fp4pass.report(converted(fmt, method)).rows}
    weight_error, output_error = direct_errors(fmt, name, method)
    assert rows[name].weight_error == pytest.approx(weight_error, rel=1e-6)
    if method == "hessian":
        # The Hessian is a float32 sum over the tokens.
        assert rows[name].output_error == pytest.approx(output_error, rel=1e-4)
    else:
        assert rows[name].output_error is None


@pytest.mark.core
def test_rows() -> None:
    report = fp4pass.report(converted("nvfp4", "hessian", weight_only=True, block=16))
    assert [row.name for row in report.rows] == ["up", "down", "last", "odd"]
    up = report.rows[0]
    assert up.shape == (80, 64)
    assert up.config == fp4pass.LinearConfig("nvfp4", "hessian", weight_only=True)
    assert (up.bits, up.tokens, up.skip_reason) == (4.5, 28, "")
    assert [row.name for row in report.converted] == ["up", "down", "last"]
    (odd,) = report.skipped
    assert "in_features=5 is not a multiple of 16" in odd.skip_reason
    assert (odd.config, odd.weight_error, odd.output_error) == (None, None, None)


@pytest.mark.core
def test_forms_round_trip() -> None:
    report = fp4pass.report(converted("nvfp4", "hessian"))
    assert Report.from_dict(report.to_dict()) == report
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert set(report.to_dict()) == {"rows", "notes"}


@pytest.mark.core
def test_the_table() -> None:
    report = fp4pass.report(converted("nvfp4", "hessian"))
    lines = str(report).splitlines()
    assert lines[0].split() == "layer N x K scheme method bits weight err output err".split()
    assert set(lines[1]) == {"-", " "}
    up = report.rows[0]
    assert up.weight_error is not None and up.output_error is not None
    assert lines[2].split() == [
        "up", "80", "x", "64", "nvfp4", "hessian", "4.50",
        f"{100 * up.weight_error:.2f}", "%", f"{100 * up.output_error:.2f}", "%",
    ]  # fmt: skip
    assert lines[-2] == "skipped:"
    assert lines[-1].split(maxsplit=4)[:4] == ["odd", "3", "x", "5"]
    assert lines[-1].endswith(report.skipped[0].skip_reason)
    columns = {line.index(" x ") for line in lines[2:5]}
    assert len(columns) <= 2 and not any(line != line.rstrip() for line in lines)


def test_a_weight_of_zeros_has_no_error() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    nn.init.zeros_(model[0].weight)
    fp4pass.prepare(model)
    model(torch.ones(3, 32))
    fp4pass.convert(model, "nvfp4")
    (row,) = fp4pass.report(model).rows
    assert (row.weight_error, row.output_error) == (0.0, 0.0)


def test_a_prepared_model_has_a_report() -> None:
    model = fp4pass.prepare(build())
    report = fp4pass.report(model)
    assert [row.name for row in report.rows] == ["up", "down", "last", "odd"]
    assert "not a multiple" in report.rows[-1].skip_reason
    line = next(line for line in str(report).splitlines() if line.startswith("up"))
    assert line.split()[-5:] == ["-"] * 5


def test_an_untouched_model_has_none() -> None:
    with pytest.raises(StateError, match=r"neither prepared nor converted\. Call fp4pass.convert"):
        fp4pass.report(build())
