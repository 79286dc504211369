"""Rotations that move into the rows of the linear before: where a whole graph proves it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernels.test_rotate import matrix
from safetensors.torch import load_file
from torch import Tensor, fx, nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.evaluation import output_errors
from fp4pass.nn.linear import PACKED, QuantizedLinear

K, HIDDEN, N = 64, 128, 48
ops = torch.ops.fp4pass


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, 2, K, generator=torch.Generator().manual_seed(seed))


def chain(*between: nn.Module, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(K, HIDDEN, bias=bias), *between, nn.Linear(HIDDEN, N))
    return nn.Sequential(*layers).eval()


class Fork(nn.Module):
    """Two linears of one hidden value, behind a dropout and a reshape; also: who else reads it."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(K, HIDDEN)
        self.a, self.b = (nn.Linear(HIDDEN, N) for _ in range(2))
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        flat = nn.functional.dropout(hidden, 0.5, False).reshape(-1, HIDDEN)
        y = self.a(flat) + self.b(flat)
        if self.also == "output":
            return y + hidden.sum()
        if self.also == "twice":
            y = y + self.a(self.first(x * 2).reshape(-1, HIDDEN))
        if self.also == "other":
            y = y + self.a(x.repeat(1, 1, 2).reshape(-1, HIDDEN))
        return y


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model)


def exported(model: nn.Module) -> fx.GraphModule:
    return torch.export.export(model.eval(), (batch(),), strict=False).module()


doors = pytest.mark.parametrize("door", [traced, exported])


def folded(model: nn.Module) -> dict[str, tuple[bool, int]]:
    rows = fp4pass.report(model).converted
    return {row.name: (row.config.folded, row.config.output_rotation) for row in rows}


def calls(model: fx.GraphModule, name: str) -> int:
    return sum(node.target is getattr(ops, name).default for node in model.graph.nodes)


@pytest.mark.quick(2)
@doors
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_two_linears_in_a_row(
    door: Callable[[nn.Module], fx.GraphModule], bias: bool, weight_only: bool, fmt: str
) -> None:
    original = chain(bias=bias)
    model = door(copy.deepcopy(original))
    fp4pass.prepare(model, "gptq")
    for seed in range(20):
        model(batch(seed))
    fp4pass.convert(model, fmt, "gptq", rotation=32, weight_only=weight_only)
    assert folded(model) == {"0": (False, 32), "1": (True, 0)}
    # Only the first rotates its inputs.
    assert calls(model, "rotate" if weight_only else "rotate_quantize") == 1
    found = [model.get_submodule(name) for name in ("0", "1")]
    for linear, dense in zip(found, original, strict=True):
        assert isinstance(linear, QuantizedLinear)
        assert (linear.weight - dense.weight).norm() < 0.16 * dense.weight.norm()
    # The hidden value is rotated: exactly, but for the weight's own error.
    if bias:
        hidden = found[0](batch())
        expected = original[0](batch()).double() @ matrix(32, HIDDEN)
        assert (hidden - expected).norm() < 0.25 * expected.norm()
    assert (model(batch()) - original(batch())).norm() < 0.3 * original(batch()).norm()
    rows = {row.name: row for row in fp4pass.report(model).rows}
    for row in rows.values():
        assert row.output_error is not None and 0.01 < row.output_error < 0.12


@pytest.mark.parametrize(("door", "build"), [(traced, chain), (exported, chain), (exported, Fork)])
def test_with_little_rounding_it_is_the_same_function(
    door: Callable[[nn.Module], fx.GraphModule], build: Callable[[], nn.Module]
) -> None:
    """In a format of 8 bits, so that a wrong basis cannot hide behind what is rounded."""
    model = fp4pass.convert(door(build()), "int8", "sse", rotation=64, weight_only=True)
    assert any(each for each, _ in folded(model).values())
    expected = build()(batch())
    assert (model(batch()) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("between", [nn.GELU(), nn.SiLU(), nn.LayerNorm(HIDDEN)], ids=str)
@doors
def test_what_does_not_commute_blocks_it(
    door: Callable[[nn.Module], fx.GraphModule], between: nn.Module
) -> None:
    model = fp4pass.convert(door(chain(between)), "mxfp4", "naive", rotation=32)
    assert set(folded(model).values()) == {(False, 0)}
    assert calls(model, "rotate_quantize") == 2


@pytest.mark.core
def test_one_value_and_several_readers() -> None:
    model = fp4pass.convert(exported(Fork()), "mxfp4", "naive", rotation=64)
    assert folded(model) == {"first": (False, 64), "a": (True, 0), "b": (True, 0)}
    assert calls(model, "rotate_quantize") == calls(model, "quantize") == 1


@pytest.mark.core
@pytest.mark.parametrize("also", ["output", "twice", "other"])
def test_another_reader_blocks_it(also: str) -> None:
    model = fp4pass.convert(exported(Fork(also)), "mxfp4", "naive", rotation=64)
    assert set(folded(model).values()) == {(False, 0)}


@pytest.mark.core
def test_rules_and_sizes_that_block_it() -> None:
    for rules in ([("a", None)], [("first", None)], [("b", {"rotation": 32})]):
        model = fp4pass.convert(exported(Fork()), "mxfp4", "naive", rotation=64, rules=rules)
        assert set(folded(model).values()) == {(False, 0)}
    # The first need not rotate its own inputs.
    rules = [("first", {"rotation": 0})]
    model = fp4pass.convert(exported(Fork()), "mxfp4", "naive", rotation=64, rules=rules)
    assert folded(model)["first"] == (False, 64) and calls(model, "rotate_quantize") == 0
    assert calls(model, "quantize") == 2


def test_a_bias_that_is_shared_blocks_it() -> None:
    model = traced(chain())
    model.add_module("other", nn.Linear(HIDDEN, HIDDEN))
    model.get_submodule("other").bias = model.get_submodule("0").bias
    fp4pass.convert(model, "mxfp4", "naive", rotation=32)
    assert set(folded(model).values()) == {(False, 0)}


class ComputedBias(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        first, last = self
        return last(nn.functional.linear(x, first.weight, 2 * first.bias))


class ReadBias(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        first, last = self
        return last(first(x)) + first.bias.sum()


class Dropping(nn.Sequential):
    """A dropout that is on whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self
        return last(nn.functional.dropout(first(x), 0.5, True))


@pytest.mark.parametrize("build", [ComputedBias, ReadBias, Dropping])
def test_what_else_is_made_of_a_bias_or_a_value_blocks_it(build: type[nn.Sequential]) -> None:
    model = exported(build(*chain()))
    fp4pass.convert(model, "mxfp4", "naive", rotation=32)
    assert set(folded(model).values()) == {(False, 0)}


def test_the_error_of_each_layer_is_measured_in_its_own_basis() -> None:
    model, reference = traced(chain()), traced(chain())
    fp4pass.convert(model, "mxfp4", "naive", rotation=32)
    x = batch().flatten(0, 1)
    off = output_errors(model, reference, [x], activations=True, progress=False)
    assert set(off) == {"0", "1"} and all(0.05 < each < 0.25 for each in off.values())


def test_checkpoints_keep_it(tmp_path: Path) -> None:
    original = chain()
    before = copy.deepcopy(original)
    model = fp4pass.convert(exported(original), "mxfp4", "sse", rotation=32)
    # What was exported stays as it was.
    assert torch.equal(before(batch()), original(batch()))
    fp4pass.save(model, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q", model=exported(chain()))
    assert torch.equal(loaded(batch()), model(batch()))
    assert calls(loaded, "rotate_quantize") == calls(loaded, "quantize") == 1
    for name in ("0", "1"):
        assert PACKED in loaded.get_submodule(name)._buffers
        assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)
    transcode(tmp_path / "q", tmp_path / "dense", "bf16")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for name in ("0", "1"):
        bias = original.get_submodule(name).bias
        assert (dense[f"{name}.bias"] - bias).abs().max() < 2.0**-8
        assert torch.equal(dense[f"{name}.weight"], loaded.get_submodule(name).weight.bfloat16())
    with pytest.raises(fp4pass.errors.CheckpointError, match="rotated weights"):
        transcode(tmp_path / "q", tmp_path / "c", "compressed-tensors")
