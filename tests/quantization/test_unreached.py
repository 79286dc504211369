"""Layers that calibration never reached: why, what the error says, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.errors import CalibrationError

UNREACHED = "calibration never reached it"


class Reads(nn.Module):
    """As Mamba and Swin do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.spare = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        # That its dtype is read says nothing.
        x = x.to(self.spare.weight.dtype)
        return self.proj(F.linear(x, self.qkv.weight, self.qkv.bias)) + x


def batch(seed: int = 0) -> Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, method: str = "hessian", **options: Any) -> nn.Module:
    fp4pass.prepare(model.eval(), method, **options)
    return fp4pass.calibrate(model, [batch(), batch(1)], progress=False)


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.skip_reason for row in fp4pass.report(model).rows}


@pytest.mark.core
def test_a_weight_that_is_read_is_an_error_that_says_so() -> None:
    model = calibrated(Reads(), rules=[("spare", None)])
    with pytest.raises(CalibrationError, match=r"^qkv: .*reads a weight and never calls the layer"):
        fp4pass.convert(model, "nvfp4")
    assert reasons(fp4pass.convert(model, "nvfp4", unreached="skip"))["qkv"] == UNREACHED


def test_weights_alone_are_packed_by_sse_all_the_same() -> None:
    model = fp4pass.convert(calibrated(Reads(), "sse", weight_only=True))
    assert not any(reasons(model).values())


@pytest.mark.parametrize("sequential", [False, True])
def test_so_it_is_in_a_list_of_layers(sequential: bool) -> None:
    blocks = nn.Sequential(Reads(), Reads())
    model = calibrated(blocks, sequential=sequential, unreached="skip")
    found = reasons(fp4pass.convert(model, "nvfp4"))
    assert {found["0.qkv"], found["1.qkv"]} == {UNREACHED}
    assert found["1.spare"] == UNREACHED and not found["1.proj"]


@pytest.mark.core
def test_what_becomes_of_unreached_layers() -> None:
    options: dict[str, Any] = {"rules": [("qkv", None)]}
    model = fp4pass.convert(calibrated(Reads(), **options), unreached="skip")
    assert reasons(model)["spare"] == UNREACHED
    model = fp4pass.convert(calibrated(Reads(), **options, unreached="sse"), "nvfp4")
    rows = {row.name: row.config for row in fp4pass.report(model).rows}
    assert rows["spare"].method_name == "sse" and rows["spare"].weight_only
    assert rows["proj"].method_name == "hessian" and not rows["proj"].weight_only
    rule = [("spare", {"unreached": "skip"}), ("qkv", None)]
    assert reasons(fp4pass.convert(calibrated(Reads(), rules=rule)))["spare"]
    with pytest.raises(CalibrationError, match="No batch was run"):
        # Nothing was calibrated at all.
        fp4pass.convert(fp4pass.prepare(Reads()), unreached="skip")


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        names = ("self_attn", "encoder_attn")
        layers = [{name: nn.Linear(32, 32) for name in names} for _ in range(2)]
        self.layers = nn.ModuleList(map(nn.ModuleDict, layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["self_attn"](x)
        return x


@pytest.mark.core
def test_the_advice_is_a_few_patterns_for_all() -> None:
    with pytest.raises(CalibrationError) as caught:
        fp4pass.convert(calibrated(Towers()), "nvfp4")
    message = str(caught.value)
    rules = [("visual.*", None), ("*.encoder_attn", None)]
    for part in (f"rules={rules}", "unreached='skip' or 'sse'"):
        assert part in message
    found = fp4pass.convert(calibrated(Towers()), "nvfp4", rules=rules)
    assert {row.name for row in fp4pass.report(found).converted} == {
        "layers.0.self_attn",
        "layers.1.self_attn",
    }
