"""Students: they start as the converted model, round as it will, and become one again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import build
from small_models import assert_same_bits
from students import layers, pair, windows
from torch import Tensor, nn

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format
from fp4pass.core.packing import pack_codes, unpack_codes
from fp4pass.distillation import TrainableLinear, freeze, kl_loss, parameter_groups, trainable
from fp4pass.distillation.student import latent_weight
from fp4pass.errors import ShapeError, StateError
from fp4pass.kernels.common.rounding import round_to_codes_

CASES = {
    "nvfp4, weights": {"weight_only": True},
    "nvfp4, static": {},
    "nvfp4, sse inputs": {"activation_scales": "sse"},
    "nvfp4, error feedback": {"method": "gptq"},
    "nvfp4, rotated": {"rotation": 32, "method": "gptq"},
    "nvfp4, rows of two": {"block": 32, "weight_only": True},
    "mxfp4, weights": {"fmt": "mxfp4", "weight_only": True},
    "mxfp4, rotated": {"fmt": "mxfp4", "rotation": 64, "method": "gptq"},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_student_computes_what_the_converted_model_does(options: dict[str, Any]) -> None:
    model, original = pair(**options)
    before = copy.deepcopy(model)
    student = trainable(model, original)
    assert student is model and type(student.up) is TrainableLinear
    assert student.up.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(student(windows()), before(windows()))
    freeze(student)
    assert_same_bits(student, before)
    with torch.no_grad():
        assert torch.equal(student(windows()), before(windows()))


@pytest.mark.parametrize("name", FORMATS)
def test_latent_weights_round_to_any_codes(name: str) -> None:
    fmt: Format = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    count = len(fmt.element.magnitudes)
    sign = 1 << (fmt.element.bits - 1)
    every = torch.cat([torch.arange(count), sign + torch.arange(count)]).to(torch.uint8)
    codes = every.repeat_interleave(fmt.block)[torch.randperm(2 * count * fmt.block)]
    codes = codes.view(2, -1)
    packed = pack_codes(codes, fmt.element.bits)
    steps = torch.rand(2, codes.shape[1] // fmt.block, generator=generator) + 0.5
    # Far beyond, at zero, on the boundaries of cells.
    values = torch.tensor(fmt.element.magnitudes)
    for target in (-1e3, 0.0, -0.0, float((values[1] + values[2]) / 2), 1e3):
        weight = latent_weight(torch.full(codes.shape, target), packed, steps, fmt)
        quotient = weight.unflatten(-1, (-1, fmt.block)) / steps.unsqueeze(-1)
        found = round_to_codes_(quotient, fmt.element).flatten(-2)
        assert torch.equal(found, unpack_codes(packed, fmt.element.bits))


def test_latent_weights_lie_towards_the_original() -> None:
    model, original = pair(method="gptq", weight_only=True)
    values = {name: layer.weight for name, layer in layers(model).items()}
    trainable(model, original)
    for name, layer in layers(model).items():
        target = original.get_submodule(name).weight
        moved, distance = (layer.weight - values[name]), (target - values[name])
        assert (moved * distance >= 0).all() and moved.abs().mean() > 0.2 * distance.abs().mean()
        assert (moved.abs() <= distance.abs() / 2 + 1e-7).all()


@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("weight_only", [True, False])
def test_gradients_are_those_of_a_straight_through_product(
    weight_only: bool, rotation: int
) -> None:
    method = "gptq" if rotation else "naive"
    model, original = pair(method=method, weight_only=weight_only, rotation=rotation)
    layer: Any = model.up
    stored, config = layer.packed_weight, layer.config
    rounded = layer.stored_weight(torch.float32)
    trainable(model, original)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 5, 64, generator=generator).requires_grad_()
    own = torch.randn(3, 5, 128, generator=generator)
    layer.bias.requires_grad_()
    (layer(x) * own).sum().backward()
    found = [x.grad, layer.weight.grad, layer.bias.grad]

    y = x.detach().clone().requires_grad_()
    weight, bias = layer.weight.detach().clone().requires_grad_(), layer.bias.detach().clone()
    bias.requires_grad_()
    turned: Tensor = ops.rotate(y, rotation) if rotation else y
    if not weight_only:
        key = config.format.key
        codes, scale = ops.quantize(turned, stored.input_global_scale, key)
        near = ops.dequantize(codes, scale, stored.input_global_scale, key, torch.float32)
        turned = turned + (near - turned).detach()
    out = F.linear(turned, weight + (rounded - weight).detach(), bias)
    (out * own).sum().backward()
    for a, b in zip(found, [y.grad, weight.grad, bias.grad], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_changes_codes_and_only_these() -> None:
    model, original = pair()
    before = copy.deepcopy(model)
    student = trainable(model, original)
    adam = torch.optim.AdamW(parameter_groups(student, 0.05), weight_decay=0.0)
    for _ in range(3):
        kl_loss(student(windows()), original(windows())).backward()
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        trained = student(windows())
        assert torch.equal(freeze(student)(windows()), trained)
    old, new = before.state_dict(), student.state_dict()
    changed = {
        n for n in new if not torch.equal(new[n].view(torch.uint8), old[n].view(torch.uint8))
    }
    assert changed == {"up.weight_packed", "down.weight_packed"}
    assert all(row.weight_error is None for row in fp4pass.report(student).converted)


def test_groups_have_a_rate_by_the_size_of_their_weight() -> None:
    model, original = pair()
    groups = parameter_groups(trainable(model, original), 0.01)
    assert len(groups) == 2
    for group in groups:
        rms = group["params"][0].detach().square().mean().sqrt().item()
        assert group["lr"] == pytest.approx(0.01 * rms)


@pytest.mark.parametrize("others", [False, True])
def test_the_rest_is_trained_only_if_asked_for(others: bool) -> None:
    model, original = pair()
    model.norm.bias.requires_grad_(False)
    before = {name for name, each in model.named_parameters() if each.requires_grad}
    student = trainable(model, original, others=others)
    found = {name for name, each in student.named_parameters() if each.requires_grad}
    assert found == {"up.weight", "down.weight"} | (before if others else set())
    freeze(student)
    assert {name for name, each in student.named_parameters() if each.requires_grad} == before


def test_layers_that_share_a_weight_train_one() -> None:
    original = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    original[1].weight = original[0].weight
    model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
    trainable(model, original)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
    freeze(model)
    assert model[0].weight_packed.data_ptr() == model[1].weight_packed.data_ptr()


def test_a_student_is_neither_float_nor_converted(tmp_path: Any) -> None:
    model, original = pair()
    with pytest.raises(StateError, match="Call trainable"):
        freeze(model)
    trainable(model, original)
    with pytest.raises(StateError, match=r"student, whose weights are trained, .* nothing to conv"):
        fp4pass.convert(model)
    with pytest.raises(StateError, match="not converted"):
        fp4pass.save(model, tmp_path / "out")
    with pytest.raises(StateError, match="trainable already"):
        trainable(model, original)


def test_states_of_students_are_loaded() -> None:
    (model, original), (other, _) = pair(), pair(method="gptq")
    first, second = trainable(model, original), trainable(other, original)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        assert torch.equal(first(windows()), second(windows()))


def test_what_cannot_be_trained_is_an_error() -> None:
    model, original = pair()
    with pytest.raises(StateError, match="The model to train is not converted"):
        trainable(copy.deepcopy(original), original)
    with pytest.raises(StateError, match="up: the original is converted too"):
        trainable(copy.deepcopy(model), copy.deepcopy(model))
    with pytest.raises(ShapeError, match="up: the original has no such layer"):
        trainable(copy.deepcopy(model), nn.Linear(64, 64))
    wide = copy.deepcopy(original)
    wide.down = nn.Linear(96, 64)
    with pytest.raises(ShapeError, match=r"down: the weight of the original: expected \(64, 128\)"):
        trainable(copy.deepcopy(model), wide)
    with pytest.raises(StateError, match="up: the weight of the original is on the meta device"):
        trainable(copy.deepcopy(model), copy.deepcopy(original).to("meta"))
    with pytest.raises(StateError, match="it is not in memory"):
        trainable(copy.deepcopy(model).to("meta"), original)
    graph = fp4pass.trace(copy.deepcopy(original), (windows(),))
    fp4pass.convert(graph, method="naive", weight_only=True)
    with pytest.raises(StateError, match="is a graph"):
        trainable(graph, original)
    # Nothing was changed on the way.
    assert type(trainable(model, original).up) is TrainableLinear


def test_stacks_of_experts_are_an_error() -> None:
    original = build("mixtral")
    model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
    with pytest.raises(StateError, match="stacks of experts cannot be trained, only linear layers"):
        trainable(model, original)
