"""Rotated linears from prepare to a checkpoint: what they compute, and who may read them."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_products import assert_product
from kernels.test_rotate import matrix
from nn.test_input_cache import unshared
from small_models import assert_same_bits, language_model, logits
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4pass
from fp4pass import ops
from fp4pass.checkpoint import transcode
from fp4pass.errors import CalibrationError, CheckpointError, ShapeError, StateError
from fp4pass.kernels.statistics.naive import diagonal_blocks
from fp4pass.methods import Stats
from fp4pass.nn.linear import quantize_input

K, HIDDEN, N = 256, 128, 48

both_ways = pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(K, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, N)).eval()


def batch(rows: int = 300, seed: int = 1) -> Tensor:
    """Correlated inputs, some of whose columns are much larger."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) * 0.97 ** torch.arange(K).view(K, 1)
    x = torch.randn(rows, K, generator=generator) @ mix
    x[:, ::37] *= 20
    return x


def converted(method: Any = "naive", prepared: bool = True, **options: Any) -> nn.Sequential:
    model = mlp()
    if prepared:
        fp4pass.prepare(model, method, rotation=options.get("rotation", 0))
        fp4pass.calibrate(model, [batch()], progress=False)
    return fp4pass.convert(model, method=method, **options)


def calls(graph: fx.Graph, name: str) -> int:
    op = getattr(torch.ops.fp4pass, name).default
    return sum(node.target is op for node in graph.nodes)


@pytest.mark.parametrize(
    ("rotation", "fmt", "weight_only", "static"),
    [
        (64, "nvfp4", False, True),
        # A global scale for each call is that of what is rotated.
        (128, "nvfp4", False, False),
        (32, "mxfp4", False, False),
        (64, "mxfp4", True, False),
    ],
)
@pytest.mark.core
def test_a_linear_computes_what_its_parts_say(
    rotation: int, fmt: str, weight_only: bool, static: bool
) -> None:
    model = converted(prepared=static, fmt=fmt, rotation=rotation, weight_only=weight_only)
    linear, x = model[0], batch(5, seed=2)
    d = matrix(rotation, K)
    stored = linear.stored_weight(torch.float32)
    assert (linear.weight - stored.double() @ d).abs().max() < 1e-6
    original = mlp()[0].weight
    assert (linear.weight - original).norm() < 0.13 * original.norm()
    if weight_only:
        assert_product(linear(x), ops.rotate(x, rotation), stored, linear.bias)
        dense = F.linear(x, linear.weight, linear.bias)
        torch.testing.assert_close(linear(x), dense, rtol=1e-4, atol=1e-4)
        return
    divisor = linear.input_global_scale
    assert (divisor is not None) == (static and fmt == "nvfp4")
    if fmt == "nvfp4" and not static:
        divisor = ops.dynamic_global_scale(ops.rotate(x, rotation), fmt)
    rounded = ops.rotate_quantize(x, rotation, divisor, fmt)
    rows = ops.dequantize(*rounded, divisor, fmt, torch.float32)
    assert_product(linear(x), rows, stored, linear.bias)
    assert (rows - x.double() @ d).norm() < 0.13 * x.norm()


@pytest.mark.parametrize(("rotation", "method"), [(128, "hessian"), (64, "gptq")])
def test_the_report_has_the_errors_of_the_dense_weight(rotation: int, method: str) -> None:
    model = mlp()
    fp4pass.prepare(model, "gptq")
    fp4pass.calibrate(model, [batch()], progress=False)
    fp4pass.convert(model, "mxfp4", method, rotation=rotation, weight_only=True)
    row = fp4pass.report(model).rows[0]
    w, q, x = mlp()[0].weight.detach().double(), model[0].weight.double(), batch().double()
    weight_error = float((w - q).norm() / w.norm())
    assert row.weight_error == pytest.approx(weight_error, rel=1e-4)
    output_error = float((x @ (w - q).t()).norm() / (x @ w.t()).norm())
    assert row.output_error == pytest.approx(output_error, rel=1e-3)
    assert row.config.rotation == rotation
    assert row.config.label == f"mxfp4a16, rotated by {rotation}"


@pytest.mark.core
def test_blocks_of_rotated_inputs_are_those_of_the_whole_hessian() -> None:
    """What is beside the diagonal blocks gets into them."""
    x = batch()
    hessian = x.t() @ x
    found = Stats(diagonal_blocks(hessian), len(x), 1.0, hessian).rotated(64)
    assert found.hessian is not None and found.block_hessian is not None
    assert torch.equal(found.block_hessian, diagonal_blocks(found.hessian))


@pytest.mark.core
def test_static_scales_hold_all_rotated_inputs() -> None:
    """The worst there can be: an input that is a row of the Hadamard matrix."""
    model = mlp()
    fp4pass.prepare(model, "naive", rotation=128)
    x = matrix(128, 256)[:, :K].float() * math.sqrt(128)
    fp4pass.calibrate(model, [x], progress=False)
    fp4pass.convert(model, "nvfp4", "naive", rotation=128)
    codes, scale, divisor = quantize_input(x, model[0].packed_weight, model[0].config)
    rows = ops.dequantize(codes, scale, divisor, "nvfp4", torch.float32)
    exact = math.sqrt(128) * torch.eye(256)
    assert (rows - exact).abs().max() < 0.1 * math.sqrt(128)


def test_a_hessian_that_is_too_small_is_an_error() -> None:
    model = fp4pass.prepare(mlp(), "hessian")
    fp4pass.calibrate(model, [batch()], progress=False)
    small = fp4pass.convert(copy.deepcopy(model), "mxfp4", "hessian", rotation=32)
    assert small[0].config.rotation == 32
    wanted = r"0, 2: .*rotation.*prepare\(model, 'hessian', rotation=64\)"
    with pytest.raises(CalibrationError, match=wanted):
        fp4pass.convert(model, "mxfp4", "hessian", rotation=64)
    with pytest.raises(StateError, match="fresh copy"):
        fp4pass.prepare(model, "hessian", rotation=64)
    with pytest.raises(CalibrationError, match="rotation=64"):
        fp4pass.convert(mlp(), "mxfp4", "hessian", rotation=64)


def test_columns_that_do_not_divide_are_skipped() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(K, 96), nn.ReLU(), nn.Linear(96, N))

    result = fp4pass.convert(model(), "mxfp4", "naive", rotation=64)
    reasons = {row.name: row.skip_reason for row in fp4pass.report(result).rows}
    assert reasons == {"0": "", "2": "in_features=96 is not a multiple of 64 (the rotation)"}
    assert type(result[2]) is nn.Linear
    with pytest.raises(ShapeError, match=r"2: in_features=96 .*smaller rotation"):
        fp4pass.convert(model(), "mxfp4", "naive", rules=[("2", {"rotation": 64})])
    rules = [("2", {"rotation": 32})]
    result = fp4pass.convert(model(), "mxfp4", "naive", rotation=64, rules=rules)
    assert [result[0].config.rotation, result[2].config.rotation] == [64, 32]
    assert "rotated by 32" in repr(result[2])


class Fork(nn.Module):
    """Three linears with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def fork() -> nn.Module:
    torch.manual_seed(0)
    return Fork().eval()


def exported() -> nn.Module:
    return torch.export.export(fork(), (batch(3),), strict=False).module()


@both_ways
@pytest.mark.parametrize("door", [fork, exported], ids=["live", "exported"])
def test_linears_of_one_input_rotate_it_once(
    weight_only: bool, door: Callable[[], nn.Module]
) -> None:
    model, x = door(), batch(3)
    alone = fp4pass.convert(fork(), "nvfp4", "naive", rotation=64, weight_only=weight_only)
    fp4pass.convert(model, "nvfp4", "naive", rotation=64, weight_only=weight_only)
    # A global scale for each call is that of what is rotated.
    wanted = {"rotate": 1} if weight_only else {"rotate": 1, "rotate_quantize": 1}
    if isinstance(model, fx.GraphModule):
        kinds = ("quantize", "rotate", "rotate_quantize")
        assert Counter({kind: calls(model.graph, kind) for kind in kinds}) == Counter(wanted)
    with unshared():
        expected = alone(x)
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
        assert torch.equal(model(x), expected)
    names = Counter(event.name.removeprefix("fp4pass::") for event in profile.events())
    assert {kind: names[kind] for kind in wanted} == wanted


def test_checkpoints_are_ours_alone(tmp_path: Path) -> None:
    model = fp4pass.convert(language_model(), "mxfp4", "sse", rotation=64)
    with pytest.raises(CheckpointError, match=r"fp4pass\.save"):
        model.save_pretrained(tmp_path / "p")
    with pytest.raises(CheckpointError, match="rotated weights"):
        fp4pass.save(model, tmp_path / "m", layout="modelopt")
    fp4pass.save(model, tmp_path / "q")
    facts = json.loads((tmp_path / "q" / "fp4pass.json").read_text())
    assert facts["layout"] == "fp4pass" and facts["recipe"]["rotation"] == 64
    assert {layer["config"]["rotation"] for layer in facts["layers"].values()} == {64}
    loaded = fp4pass.load(tmp_path / "q")
    assert_same_bits(model, loaded)
    assert torch.equal(logits(model), logits(loaded))
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)
    with pytest.raises(CheckpointError, match="rotated weights"):
        transcode(tmp_path / "q", tmp_path / "c", to="compressed-tensors")
    transcode(tmp_path / "q", tmp_path / "dense", to="bf16")
    dense = language_model(tmp_path / "dense").get_submodule(name).weight
    assert torch.equal(dense, model.get_submodule(name).weight)


def test_transformers_dequantizes_it() -> None:
    hf = pytest.importorskip("fp4pass.integrations.transformers")
    model = language_model(quantization_config=hf.Fp4PassConfig(fmt="mxfp4", rotation=32))
    again = fp4pass.convert(language_model(), "mxfp4", "sse", rotation=32, weight_only=True)
    assert_same_bits(model, again)
    expected = model.model.layers[0].mlp.up_proj.weight
    linear = model.dequantize().model.layers[0].mlp.up_proj
    assert type(linear) is nn.Linear and torch.equal(linear.weight, expected)
