"""Layer by layer, where a batch does not come to every layer: as text passes by cross attention."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import CalibrationError

WIDTH = 32
CROSS = fp4pass.Gptq(target="cross")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu()) + shift


class Model(nn.Module):
    """Calls the layers that a batch names, and its tower only if a batch asks for it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.tower = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, passed: Collection[int] = (), sees: bool = False) -> Tensor:
        shift = x.mean()
        for layer in self.tower if sees else ():
            x = layer(x, shift)
        for i, layer in enumerate(self.layers):
            x = x if i in passed else layer(x, shift)
        return x


def made(layers: int = 4) -> Any:
    torch.manual_seed(0)
    return Model(layers).eval()


def without(*passed: int, **more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(40, WIDTH, generator=generator) for _ in range(3)]
    return [{"x": x, "passed": passed, **more} for x in data]


def calibrated(data: Any, method: Any = "hessian", loop: bool = False, **options: Any) -> Any:
    model = fp4pass.prepare(made(), method, **{"sequential": True} | options)
    if not loop:
        return fp4pass.calibrate(model, data, progress=False)
    for batch in data:
        model(**batch)
    return model


def methods(model: nn.Module) -> dict[str, str]:
    rows = fp4pass.report(model).rows
    return {row.name: "" if row.config is None else row.config.method_name for row in rows}


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", ["hessian", CROSS])
@pytest.mark.parametrize("passed", [0, 1, 3])
@pytest.mark.parametrize("loop", [False, True])
@torch.no_grad()
def test_a_layer_that_is_passed_by(passed: int, method: Any, loop: bool) -> None:
    """The others are as if it were not there, and it becomes what `unreached` says."""
    rules = [(f"layers.{passed}.*", None), ("tower.*", None)]
    expected = fp4pass.convert(calibrated(without(passed), method, rules=rules), "nvfp4")
    data = without(passed)
    model = fp4pass.convert(
        calibrated(data, method, loop, rules=rules[1:], unreached="sse"), "nvfp4"
    )
    found = methods(model)
    assert {found[f"layers.{passed}.{each}"] for each in "ab"} == {"sse"}
    for i, layer in enumerate(model.layers):
        if i != passed:
            assert_same_bits(layer, expected.layers[i])
    skipped = fp4pass.convert(
        calibrated(data, method, loop, rules=rules[1:], unreached="skip"), "nvfp4"
    )
    assert isinstance(skipped.layers[passed].a, nn.Linear)
    reasons = {row.name: row.skip_reason for row in fp4pass.report(skipped).rows}
    assert reasons[f"layers.{passed}.a"] == "calibration never reached it"


@pytest.mark.core
def test_what_is_passed_by_is_an_error_before_anything_is_packed() -> None:
    model = calibrated(without(1), rules=[("tower.*", None)])
    message = r"layers\.1\.a, layers\.1\.b: calibration never reached.*\('layers\.1\.\*', None\)"
    with pytest.raises(CalibrationError, match=message):
        fp4pass.convert(model, "nvfp4")
    # It goes on: another batch comes there.
    fp4pass.calibrate(model, without()[:1], progress=False)
    found = fp4pass.convert(model, "nvfp4")
    tokens = {row.name: row.tokens for row in fp4pass.report(found).converted}
    assert tokens["layers.0.a"] == 160 and tokens["layers.1.a"] == 40


@pytest.mark.parametrize("sequential", [False, True])
def test_a_whole_stack_that_is_passed_by(sequential: bool) -> None:
    options: dict[str, Any] = {"sequential": sequential, "unreached": "sse"}
    model = fp4pass.convert(calibrated(without(), **options), "nvfp4")
    found = methods(model)
    assert {found[f"tower.{i}.{each}"] for i in range(2) for each in "ab"} == {"sse"}
    assert {found[f"layers.{i}.{each}"] for i in range(4) for each in "ab"} == {"hessian"}
    with pytest.raises(CalibrationError, match=r"tower\.0\.a.*never reached.*'tower\.\*'"):
        fp4pass.convert(calibrated(without(), sequential=sequential), "nvfp4")


def test_batches_that_come_to_different_layers() -> None:
    """Each layer has the tokens of the batches that come to it, in whatever order they are."""
    data = [*without(), *without(0, 3), *without(1)]
    both = [
        fp4pass.convert(calibrated(each, rules=[("tower.*", None)], loop=loop), "nvfp4")
        for each, loop in ((data, False), (data, True), (data[::-1], False))
    ]
    for model in both:
        tokens = {row.name: row.tokens for row in fp4pass.report(model).converted}
        assert [tokens[f"layers.{i}.a"] for i in range(4)] == [240, 240, 360, 240]
    assert_same_bits(both[0], both[1])


@pytest.mark.core
def test_a_batch_that_is_cut_off_leaves_nothing() -> None:
    rules = [("tower.*", None)]
    model = fp4pass.prepare(made(), "hessian", sequential=True, rules=rules)
    data = without()

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    for where in ("a", "b"):
        handle = getattr(model.layers[2], where).register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(**data[0])
        handle.remove()
    for batch in data:
        model(**batch)
    assert_same_bits(
        fp4pass.convert(model, "nvfp4"), fp4pass.convert(calibrated(data, rules=rules), "nvfp4")
    )
