"""Students: they start as the converted model, round as it will, and become one again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits
from students import pair, windows
from torch import nn

import fp4pass
from fp4pass.errors import ShapeError, StateError
from fp4pass.lab.learning import freeze, kl_loss, parameter_groups, trainable
from fp4pass.lab.learning.optimizer import Optimizer, schedule

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


@pytest.mark.quick(3)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_student_computes_what_the_converted_model_does(options: dict[str, Any]) -> None:
    model, original = pair(**options)
    before = copy.deepcopy(model)
    student = trainable(model, original)
    assert student is model and student.up.latent.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(student(windows()), before(windows()))
    freeze(student)
    assert_same_bits(student, before)
    with torch.no_grad():
        assert torch.equal(student(windows()), before(windows()))


@pytest.mark.core
def test_a_loop_of_ones_own_changes_codes_and_only_these() -> None:
    model, original = pair()
    before = copy.deepcopy(model)
    student = trainable(model, original, others=False)
    adam = torch.optim.Adam(parameter_groups(student, 3, travel=1.0))
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


def test_rates_sum_up_to_the_travel() -> None:
    model, original = pair()
    groups = parameter_groups(trainable(model, original), 50, travel=2.0, others=0.1)
    latents = {id(model.up.latent), id(model.down.latent)}
    sizes = [id(each) in latents for group in groups for each in group["params"]]
    assert sum(sizes) == 2 and len(sizes) == 2 + 4
    for group in groups:
        total = group["lr"] * sum(schedule(i, 50) for i in range(50))
        for each in group["params"]:
            rms = each.detach().square().mean().sqrt().item()
            if id(each) in latents:
                assert total == pytest.approx(2.0)
            else:
                assert total == 0 if not rms else 0.7 < total / (0.1 * rms) < 1.5


def test_latents_end_with_the_last_cell() -> None:
    model, original = pair()
    student = trainable(model, original)
    latents = [student.up.latent, student.down.latent]
    optimizer = Optimizer(student, 1, travel=20.0, others=0.0)
    for each in latents:
        each.grad = -torch.ones_like(each)
    optimizer.step(0)
    assert all((each == 7.5).all() for each in latents)


@pytest.mark.parametrize("others", [False, True])
def test_only_norms_and_biases_learn_beside_codes(others: bool) -> None:
    model, original = pair()
    model.norm.bias.requires_grad_(False)
    before = {name for name, each in model.named_parameters() if each.requires_grad}
    student = trainable(model, original, others=others)
    found = {name for name, each in student.named_parameters() if each.requires_grad}
    vectors = {"up.bias", "norm.weight", "lm_head.bias"}
    assert found == {"up.latent", "down.latent"} | (vectors if others else set())
    freeze(student)
    assert {name for name, each in student.named_parameters() if each.requires_grad} == before


def test_layers_that_share_a_weight_train_one() -> None:
    original = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    original[1].weight = original[0].weight
    model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
    trainable(model, original)
    assert model[0].latent is model[1].latent
    assert len(list(model.parameters())) == 1
    freeze(model)
    assert model[0].weight_packed.data_ptr() == model[1].weight_packed.data_ptr()


def test_a_student_is_neither_float_nor_converted(tmp_path: Path) -> None:
    model, original = pair()
    with pytest.raises(StateError, match="Call trainable"):
        freeze(model)
    trainable(model, original)
    with pytest.raises(StateError, match="nothing to convert"):
        fp4pass.convert(model, "nvfp4")
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
    with pytest.raises(StateError, match=r"expected the float model with a parameter up\.weight"):
        trainable(copy.deepcopy(model), copy.deepcopy(model))
    with pytest.raises(StateError, match=r"with a parameter up\.weight, got Linear without it"):
        trainable(copy.deepcopy(model), nn.Linear(64, 64))
    wide = copy.deepcopy(original)
    wide.down = nn.Linear(96, 64)
    before = copy.deepcopy(model)
    with pytest.raises(ShapeError, match=r"down: the weight of the original: expected \(64, 128\)"):
        trainable(model, wide)
    assert_same_bits(model, before)
    with pytest.raises(StateError, match=r"up\.weight is on the meta device"):
        trainable(copy.deepcopy(model), copy.deepcopy(original).to("meta"))
    with pytest.raises(StateError, match="it is not in memory"):
        trainable(copy.deepcopy(model).to("meta"), original)
    graph = fp4pass.trace(copy.deepcopy(original), (windows(),))
    fp4pass.convert(graph, method="naive", weight_only=True)
    with pytest.raises(StateError, match="is a graph"):
        trainable(graph, original)
    # Nothing was changed on the way.
    assert type(trainable(model, original).up).__name__ == "TrainableLinear"
