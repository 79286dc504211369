"""Latents round as every number does; students compute as the model does, and become it again."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from blocks import ALL
from small_models import assert_same_bits
from students import Predictor, pair, windows
from torch import Tensor, nn

import fp4pass
from fp4pass import ops
from fp4pass.core.elements import Element
from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.errors import NonFiniteError, OptionError, ShapeError, StateError
from fp4pass.kernels.common.rounding import round_to_codes_, round_to_values_
from fp4pass.lab import freeze, kl_loss, trainable
from fp4pass.lab.latent import (
    LatentExperts,
    codes_of,
    in_steps,
    last_latent,
    latent_weight,
    latents_of,
    rounded,
    steps_of,
)
from fp4pass.methods import search_scales
from fp4pass.nn.linear import StoredWeight, quantize_input

ELEMENTS = {fmt.element.name: fmt.element for fmt in FORMATS.values()}


def numbers(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 256, generator=generator) * torch.logspace(-1, 1, 256)


def quantized(fmt: Format, weight: Tensor, method: str = "sse") -> tuple[StoredWeight, Tensor]:
    """A packed weight, and its values."""
    number = fmt.global_scale_for(float(weight.abs().max()))
    state = search_scales(weight, fmt, number, method)
    divisor = torch.tensor([fmt.global_scale_of(number)]) if fmt.has_global_scale else None
    stored = StoredWeight(state.qdata, state.scale, divisor, None)
    return stored, ops.dequantize(*stored[:3], fmt.key, torch.float32)


@pytest.mark.core
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_rounding_is_that_of_the_element(element: Element) -> None:
    """To nearest, ties to the even code, saturating: at every boundary and its neighbours."""
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(element.magnitudes)])
    near = [torch.nextafter(middles, torch.tensor(end)) for end in (-math.inf, math.inf)]
    past = torch.tensor([2.0, 1e30]) * element.max
    x = torch.cat((middles, torch.tensor(element.magnitudes), *near, past))
    x = torch.cat((x, torch.linspace(0, element.max * 1.2, 999)))
    x = torch.cat((x, -x))
    x = torch.cat((x, torch.zeros(-len(x) % 4)))
    assert torch.equal(rounded(x, element), round_to_values_(x.clone(), element))
    codes = unpack_codes(codes_of(x, element), element.bits)
    assert torch.equal(codes, round_to_codes_(x.clone(), element))


@pytest.mark.core
@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.key)
def test_latents_begin_with_the_codes_that_are_there(fmt: Format) -> None:
    """Whatever the float weight: the one that was rounded, or quite another."""
    weight = numbers()
    stored, dense = quantized(fmt, weight)
    steps = steps_of(stored, fmt)
    for target in (weight, numbers(seed=1), torch.zeros_like(weight), -1e30 * weight):
        latent = latent_weight(stored.packed, steps, target, fmt)
        assert torch.equal(codes_of(latent, fmt.element), stored.packed)
        assert torch.equal(in_steps(rounded(latent, fmt.element), steps), dense)
        assert latent.abs().max() <= last_latent(fmt.element)
    # Half way to the float weight.
    latent = latent_weight(stored.packed, steps, weight, fmt)
    left = (in_steps(latent.clone(), steps) - weight).norm()
    assert left <= (dense - weight).norm() * 0.7


def test_steps_of_a_stack_are_those_of_its_matrices() -> None:
    """A global scale for each expert, or for two parts of its rows."""
    fmt = get_format("nvfp4")
    parts = [quantized(fmt, numbers(i) * 4.0**i, "naive")[0] for i in range(4)]
    apart = torch.cat([steps_of(part, fmt) for part in parts])
    for rows, experts in ((1, 4), (2, 2)):
        packed, scale = (
            torch.stack([getattr(part, name) for part in parts]).unflatten(0, (experts, rows))
            .flatten(1, 2) for name in ("packed", "scale")
        )  # fmt: skip
        number = torch.cat([part.global_scale for part in parts]).view(experts, rows)
        stack = StoredWeight(packed, scale, number.flatten() if rows == 1 else number, None)
        assert torch.equal(steps_of(stack, fmt).flatten(0, 1), apart)


CASES: dict[str, dict[str, Any]] = {
    "nvfp4, weights": {"weight_only": True},
    "nvfp4, static": {},
    "nvfp4, sse inputs": {"activation_scales": "sse"},
    "nvfp4, rotated": {"rotation": 32, "method": "gptq"},
    "nvfp4, rows of two": {"block": 32, "weight_only": True},
    "mxfp4, rotated": {"fmt": "mxfp4", "rotation": 64, "method": "gptq"},
    "mxfp6": {"fmt": "mxfp6_e2m3"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.quick(4)
@pytest.mark.core
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_student_computes_what_the_converted_model_does(options: dict[str, Any]) -> None:
    model, original = pair(**options)
    before = copy.deepcopy(model)
    student = trainable(model, original)
    assert student is model and student.up.latent.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(student(windows()), before(windows()), rtol=2e-3, atol=1e-3)
    freeze(student)
    assert_same_bits(student, before)
    with torch.no_grad():
        assert torch.equal(student(windows()), before(windows()))


def test_gradients_pass_both_roundings() -> None:
    """As if weight and input were what they are rounded to, and rounding were the identity."""
    model, original = pair()
    layer = trainable(model, original).up
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    seen = x.clone().requires_grad_()
    of_x, of_latent = torch.autograd.grad(layer(seen).square().sum(), [seen, layer.latent])
    weight = layer.weight(torch.float32).detach()
    packed, scale, number = quantize_input(x, layer.packed.packed_weight, layer.packed.config)
    rows = ops.dequantize(packed, scale, number, "nvfp4", torch.float32)
    assert not torch.equal(rows, x)
    y = rows @ weight.T + layer.packed.bias
    torch.testing.assert_close(of_x, 2 * y @ weight)
    steps = steps_of(layer.packed.packed_weight, get_format("nvfp4"))
    torch.testing.assert_close(of_latent, in_steps(2 * y.T @ rows, steps), rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_a_loop_of_ones_own_changes_codes_and_only_these() -> None:
    model, original = pair()
    before = copy.deepcopy(model)
    student = trainable(model, original, others=False)
    adam = torch.optim.AdamW([each.latent for each in latents_of(student).values()], 0.2)
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


@pytest.mark.parametrize("others", [False, True])
def test_what_required_gradients_learns_beside_codes(others: bool) -> None:
    model, original = pair()
    model.norm.bias.requires_grad_(False)
    before = {name for name, each in model.named_parameters() if each.requires_grad}
    student = trainable(model, original, others=others)
    found = {name for name, each in student.named_parameters() if each.requires_grad}
    floats = {name for name in before if name != "up.bias"} | {"up.packed.bias"}
    assert found == {"up.latent", "down.latent"} | (floats if others else set())
    freeze(student)
    assert {name for name, each in student.named_parameters() if each.requires_grad} == before


def test_layers_that_share_a_weight_train_one() -> None:
    original = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    original[1].weight = original[0].weight
    model = fp4pass.convert(copy.deepcopy(original), "nvfp4a16", "naive")
    trainable(model, original)
    assert model[0].latent is model[1].latent
    freeze(model)
    assert model[0].weight_packed is model[1].weight_packed


@pytest.mark.quick(2)
@pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_experts_learn(name: str, weight_only: bool) -> None:
    source = mixtures.build(name)
    model = fp4pass.prepare(copy.deepcopy(source), "naive")
    model = fp4pass.calibrate(model, [mixtures.ids()], progress=False)
    model = fp4pass.convert(model, "nvfp4", "naive", weight_only=weight_only)
    start, wanted = copy.deepcopy(model), mixtures.logits(model)
    stacks = [
        each
        for each in latents_of(trainable(model, source)).values()
        if isinstance(each, LatentExperts)
    ]
    assert stacks
    torch.testing.assert_close(mixtures.logits(model), wanted, rtol=1e-3, atol=1e-3)
    model(mixtures.ids()).logits.square().sum().backward()
    for stack in stacks:
        assert stack.latent.grad is not None and stack.latent.grad.any((1, 2)).all()
    assert_same_bits(freeze(model), start)


def test_experts_with_global_scales_of_inputs() -> None:
    """One for each expert, as some libraries calibrate them."""
    source = mixtures.build("qwen3_moe")
    model = fp4pass.prepare(copy.deepcopy(source), "naive")
    model = fp4pass.calibrate(model, [mixtures.ids()], progress=False)
    model = fp4pass.convert(model, "nvfp4", "naive")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack: Any = model.get_submodule(name)
    stack.input_global_scale = stack.input_global_scale * 2.0 ** torch.arange(5)
    rows, ids = torch.randn(12, 64), torch.randint(0, 5, (12, 2))
    wanted = stack(rows, ids)
    trainable(model, source)
    torch.testing.assert_close(model.get_submodule(name)(rows, ids), wanted)


def test_a_student_is_neither_float_nor_converted(tmp_path: Path) -> None:
    model, original = pair()
    with pytest.raises(StateError, match="Call trainable"):
        freeze(model)
    trainable(model, original)
    with pytest.raises(StateError, match="nothing to convert"):
        fp4pass.convert(model, "nvfp4")
    with pytest.raises(StateError, match=r"\(up\.packed\), the model is not"):
        fp4pass.save(model, tmp_path / "out")
    with pytest.raises(StateError, match="trainable already"):
        trainable(model, original)


def test_what_cannot_be_trained_is_an_error() -> None:
    model, original = pair()
    wide, broken = copy.deepcopy(original), copy.deepcopy(original)
    wide.down, broken.up.weight.data[3] = nn.Linear(96, 64), math.nan
    graph = fp4pass.trace(copy.deepcopy(original), (windows(),))
    fp4pass.convert(graph, "nvfp4a16", "naive")
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (StateError, "is not converted", copy.deepcopy(original), original),
        (StateError, r"with a parameter up\.weight", copy.deepcopy(model), copy.deepcopy(model)),
        (ShapeError, r"down: the weight of the original: expected \(64, 128\)", model, wide),
        (NonFiniteError, "up: the weight of the original holds NaN", model, broken),
        (
            StateError,
            "up.weight, got Predictor without it, or without values",
            model,
            copy.deepcopy(original).to("meta"),
        ),
        (StateError, "it is not in memory", copy.deepcopy(model).to("meta"), original),
        (StateError, "is a graph", graph, original),
    ]
    before = copy.deepcopy(model)
    for error, message, converted, source in cases:
        with pytest.raises(error, match=message):
            trainable(converted, source)
        assert_same_bits(model, before)
    assert type(trainable(model, original).up).__name__ == "LatentLinear"
    rows = fp4pass.convert(copy.deepcopy(original), "fp8a16", "naive")
    with pytest.raises(OptionError, match="No layer can learn"):
        trainable(rows, original)


def test_layers_with_float32_scales_stay_and_pass_gradients() -> None:
    original = Predictor().eval()
    model = fp4pass.convert(
        copy.deepcopy(original), "nvfp4a16", "naive", rules=[("down", {"fmt": "fp8"})]
    )
    before = copy.deepcopy(model)
    student = trainable(model, original)
    assert set(latents_of(student)) == {"up"} and type(student.down) is type(before.down)
    kl_loss(student(windows()), original(windows())).backward()
    assert student.up.latent.grad.any()
    assert_same_bits(freeze(student), before)
