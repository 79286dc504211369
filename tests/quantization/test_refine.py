"""refine: codes, norms and biases that are learned, one layer after the other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from small_models import assert_same_bits, linears
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass import Refine
from fp4pass.errors import CalibrationError, OptionError, StateError
from fp4pass.methods import Gptq
from fp4pass.quantization.layer_stack import Stack
from fp4pass.quantization.learned import LearnedLayer, put
from fp4pass.quantization.recipe import Recipe
from fp4pass.quantization.state import get_state

K = 64


class Block(nn.Module):
    """A residual layer with a norm; `up` has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.side, self.up = nn.Linear(K, 96, bias=False), nn.Linear(K, 96)
        self.down = nn.Linear(96, K, bias=False)
        nn.init.normal_(self.norm.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.side(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(K, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().eval().to(dtype)


def batches(count: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(K, K, generator=generator) * 0.95 ** torch.arange(K).view(K, 1)
    return [(torch.randn(96, K, generator=generator) @ mix).to(dtype) for _ in range(count)]


def converted(source: nn.Module, method: Any = "naive", fmt: str = "nvfp4", **options: Any) -> Any:
    """A copy of a model, calibrated on what refine learns from and not on what judges it."""
    options = {"weight_only": True} | options
    copied, dtype = copy.deepcopy(source), next(source.parameters()).dtype
    prepared = fp4pass.prepare(copied, method, rules=[("head", None)])
    fp4pass.calibrate(prepared, batches(dtype=dtype)[:7], progress=False)
    return fp4pass.convert(prepared, fmt, method, **options)


def refined(start: Any, source: nn.Module, **options: Any) -> Any:
    data = batches(dtype=next(source.parameters()).dtype)
    options = Refine(**{"steps": 40, "lr": 0.02} | options)
    return fp4pass.refine(copy.deepcopy(start), source, data, options, progress=False)


def error(a: nn.Module, b: nn.Module) -> float:
    """The error of outputs on inputs that nobody has seen."""
    with torch.no_grad():
        pairs = [(a(x).float(), b(x).float()) for x in batches(12)[8:]]
    return float(sum((y - t).norm() for y, t in pairs) / sum(t.norm() for _, t in pairs))


CASES = {
    "nvfp4-w4a16": ("nvfp4", {"weight_only": True}, 0.9),
    "nvfp4-w4a4": ("nvfp4", {"weight_only": False}, 0.95),
    "nvfp4-w4a4-sse": ("nvfp4", {"weight_only": False, "activation_scales": "sse"}, 0.95),
    "mxfp4-w4a16": ("mxfp4", {"weight_only": True}, 0.9),
    "mxfp4-w4a4-rotated": ("mxfp4", {"weight_only": False, "rotation": 32}, 0.95),
}


@pytest.mark.parametrize("fmt, options, factor", CASES.values(), ids=CASES)
def test_outputs_come_nearer_to_the_float_model(
    fmt: str, options: dict[str, Any], factor: float
) -> None:
    source = model()
    start = converted(source, fmt=fmt, **options)
    found = refined(start, source)
    assert error(found, source) < factor * error(start, source)
    layers = fp4pass.report(found).refined
    assert [layer.name for layer in layers] == ["layers.0", "layers.1"]
    assert all(layer.kept and layer.after < layer.before for layer in layers)


@pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_learning_begins_with_the_codes_and_outputs_that_are_there(
    dtype: torch.dtype, weight_only: bool
) -> None:
    start = converted(model(dtype), Gptq(), weight_only=weight_only)
    before, layer = copy.deepcopy(start), start.layers[0]
    x = batches(1, dtype)[0]
    learned = LearnedLayer(layer, frozenset(), small=True)
    with learned.learning():
        y = learned((x,), {})
    put(learned.learned())
    assert_same_bits(start, before)
    torch.testing.assert_close(y, layer(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert "forward" not in layer.up.__dict__


def test_gradients_are_those_of_rounded_weights_and_inputs() -> None:
    start = converted(model(), weight_only=False)
    layer = start.layers[0]
    learned = LearnedLayer(layer, frozenset(), small=False)
    x = batches(1)[0].requires_grad_()
    with learned.learning():
        of_x, *_ = torch.autograd.grad(learned((x,), {}).sum(), [x, *learned.weights])
    twin = batches(1)[0].requires_grad_()
    torch.testing.assert_close(of_x, torch.autograd.grad(layer(twin).sum(), twin)[0])
    # A latent is in units of the scale: its gradient is that of the weight, times the scale.
    module = layer.down
    seen = batches(1)[0] @ torch.randn(K, 96, generator=torch.Generator().manual_seed(2))
    with learned.learning():
        gradient = torch.autograd.grad(
            module(seen).square().sum(), learned.weights, allow_unused=True
        )
    (gradient,) = [each for each in gradient if each is not None]
    packed, scale, _ = fp4pass.linear.quantize_input(seen, module.packed_weight, module.config)
    stored = (module.packed_weight.input_global_scale, module.config.format.key, torch.float32)
    rounded = fp4pass.ops.dequantize(packed, scale, *stored)
    dense = 2 * (rounded @ module.weight.T).T @ rounded
    steps = module.weight_scale.float().unsqueeze(-1) / module.weight_global_scale
    torch.testing.assert_close(gradient, dense.view_as(gradient) * steps)


def test_norms_and_biases_learn_unless_told_not_to() -> None:
    source = model()
    start = converted(source)
    found, kept = refined(start, source, norm_lr=1e-3), refined(start, source, norm_lr=0)
    for name, before in start.layers.named_parameters():
        assert torch.equal(before, kept.layers.get_parameter(name)), name
        assert not torch.equal(before, found.layers.get_parameter(name)), name
    # Those of the float model are not touched, nor given gradients.
    assert_same_bits(source, model())
    assert all(each.grad is None for each in (*source.parameters(), *found.parameters()))


def test_a_layer_that_is_no_better_stays_as_it_was() -> None:
    source = model()
    start = converted(source, Gptq())
    found = refined(start, source, steps=4, lr=5.0)
    assert_same_bits(found, start)
    layers = fp4pass.report(found).refined
    assert not any(layer.kept for layer in layers) and layers[0].after > layers[0].before
    assert "layers.0: " in str(fp4pass.report(found)) and "left as it was" in str(
        fp4pass.report(found)
    )


def test_held_out_batches_judge_and_teach_nothing() -> None:
    source, data = model(), batches()
    start = converted(source)
    options = {"options": Refine(steps=12), "progress": False}

    def run(held_out: list[Tensor]) -> Any:
        return fp4pass.refine(copy.deepcopy(start), source, data[:7], held_out=held_out, **options)

    assert_same_bits(run(data[7:]), refined(start, source, steps=12, lr=0.01))
    # On noise nothing is better.
    first, other = run(data[7:]), run([1e3 * torch.randn(8, K)])
    assert fp4pass.report(first).refined[0].before != fp4pass.report(other).refined[0].before


def test_the_same_seed_gives_the_same_bits() -> None:
    source = model()
    start = converted(source)
    a, b, other = (refined(start, source, steps=9, seed=seed) for seed in (0, 0, 1))
    assert_same_bits(a, b)
    assert not torch.equal(a.layers[0].up.bias, other.layers[0].up.bias)


def test_what_is_refined_is_an_ordinary_converted_model(tmp_path: Path) -> None:
    source = mixtures.build("qwen3_moe", num_experts=0, mlp_only_layers=[0, 1]).eval()
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(1, 96, (4, 40), generator=generator) for _ in range(6)]
    start = fp4pass.convert(copy.deepcopy(source), "nvfp4", "naive", weight_only=True)
    found = fp4pass.refine(
        copy.deepcopy(start), source, data, Refine(steps=20, lr=0.04), progress=False
    )
    changed = [
        n
        for n, m in linears(found).items()
        if not torch.equal(m.weight, start.get_submodule(n).weight)
    ]
    layers = fp4pass.report(found).refined
    assert any(layer.kept for layer in layers) and len(changed) == 7 * sum(e.kept for e in layers)
    recipe = get_state(found).recipe["refine"]
    assert recipe == {"steps": 20, "lr": 0.04, "norm_lr": 1e-4, "seed": 0, "tokens": 800}
    fp4pass.save(found, tmp_path / "out")
    loaded: Any = fp4pass.load(tmp_path / "out")
    assert_same_bits(loaded, found)
    assert fp4pass.report(loaded).to_dict() == fp4pass.report(found).to_dict()
    assert Recipe.read(tmp_path / "out" / "fp4pass.json").config.method_name == "naive"


def test_weights_that_layers_share_stay() -> None:
    source = model()
    source.layers[1].up.weight = source.layers[0].up.weight
    source.layers[1].norm.weight = source.layers[0].norm.weight
    start = converted(source)
    found = refined(start, source, norm_lr=1e-3)
    assert torch.equal(found.layers[0].up.weight, start.layers[0].up.weight)
    assert torch.equal(found.layers[0].norm.weight, start.layers[0].norm.weight)
    assert not torch.equal(found.layers[0].side.weight, start.layers[0].side.weight)


def test_experts_learn() -> None:
    source = mixtures.build("qwen3_moe").float()
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(1, 96, (4, 40), generator=generator) for _ in range(6)]
    start = fp4pass.convert(copy.deepcopy(source), "nvfp4", "naive", weight_only=True)
    found = fp4pass.refine(
        copy.deepcopy(start), source, data, Refine(steps=30, lr=0.02), progress=False
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert fp4pass.report(found).refined[0].kept
    assert not torch.equal(found.get_submodule(name).weight, start.get_submodule(name).weight)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps"),
        ({"lr": -1}, "lr"),
        ({"norm_lr": float("inf")}, "norm_lr"),
        ({"seed": None}, "seed"),
    ],
    ids=lambda each: str(each),
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Refine(**options)


def test_errors() -> None:
    source, data = model(), batches(2)
    start = converted(source)
    with pytest.raises(StateError, match="not converted"):
        fp4pass.refine(source, source, data)
    with pytest.raises(StateError, match="expected the float model"):
        fp4pass.refine(start, start, data)
    with pytest.raises(OptionError, match="other layers"):
        fp4pass.refine(start, Model(3).eval(), data)
    with pytest.raises(CalibrationError, match="at least two batches"):
        fp4pass.refine(start, source, data[:1], progress=False)
    with pytest.raises(OptionError, match=r"fp4pass.Refine\(...\)"):
        fp4pass.refine(start, source, data, {"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(StateError, match="without one"):
        alone = nn.Linear(32, 32).eval()
        fp4pass.refine(fp4pass.convert(copy.deepcopy(alone), method="sse"), alone, data)
    # Nothing is left behind.
    assert not start.layers[0]._forward_hooks and not source.layers[0]._forward_pre_hooks
    assert Stack("layers", "*", list(source.layers)).tokens == 0
