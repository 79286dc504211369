"""refine: codes, scales, norms and biases that are learned, one layer after the other."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from small_models import assert_same_bits, linears
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass import Gptq, Refine
from fp4pass.errors import CalibrationError, OptionError, StateError
from fp4pass.lab.learning.batches import logits_kl
from fp4pass.lab.learning.layers import TRAINABLE, original_weight
from fp4pass.lab.learning.learned_layer import Hessians, LearnedLayer
from fp4pass.record.state import get_state

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
    """Without `logits` its output is not compared."""

    def __init__(self, layers: int = 2, has_logits: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head, self.has_logits = nn.Linear(K, 32), has_logits

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return types.SimpleNamespace(logits=y[None]) if self.has_logits else y


def model(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval().to(dtype)


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
    options = Refine(**{"steps": 40} | options)
    return fp4pass.refine(copy.deepcopy(start), source, data, options, progress=False)


def error(a: nn.Module, b: nn.Module) -> float:
    """The error of outputs on inputs that nobody has seen."""
    with torch.no_grad():
        pairs = [(a(x).float(), b(x).float()) for x in batches(12)[8:]]
    return float(sum((y - t).norm() for y, t in pairs) / sum(t.norm() for _, t in pairs))


def ids(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 96, (4, 40), generator=generator) for _ in range(count)]


CASES = {
    "nvfp4-w4a16": ("nvfp4", {"weight_only": True}, 0.85),
    "nvfp4-w4a4": ("nvfp4", {"weight_only": False}, 0.95),
    "nvfp4-w4a4-sse": ("nvfp4", {"weight_only": False, "activation_scales": "sse"}, 0.95),
    "mxfp4-w4a16": ("mxfp4", {"weight_only": True}, 0.85),
    "mxfp4-w4a4-rotated": ("mxfp4", {"weight_only": False, "rotation": 32}, 0.95),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fmt, options, factor", CASES.values(), ids=CASES)
def test_outputs_come_nearer_to_the_float_model(
    fmt: str, options: dict[str, Any], factor: float
) -> None:
    source = model()
    start = converted(source, fmt=fmt, **options)
    found = refined(start, source)
    assert error(found, source) < factor * error(start, source)
    result = fp4pass.report(found).refined
    assert [layer.name for layer in result.layers] == ["layers.0", "layers.1"]
    assert all(layer.kept and layer.after < layer.before for layer in result.layers)
    # Without logits the layers alone are judged.
    assert result.kept and result.kl_before is None
    assert not any(isinstance(module, TRAINABLE) for module in found.modules())


def test_error_feedback_is_not_forgotten() -> None:
    """From codes that compensate for each other, learning goes on."""
    source, data = model(), batches(24)
    start = converted(source, Gptq())
    found, options = copy.deepcopy(start), Refine(steps=160, share=0.0)
    fp4pass.refine(found, source, data[12:], options, progress=False)
    assert error(found, source) < 0.98 * error(start, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_learns(dtype: torch.dtype) -> None:
    source = model(dtype)
    found = refined(converted(source), source)
    assert all(layer.kept for layer in fp4pass.report(found).refined.layers)
    assert {each.dtype for each in found.parameters()} == {dtype}


@pytest.mark.core
def test_norms_and_biases_learn_unless_told_not_to() -> None:
    source = model()
    start = converted(source)
    found, kept = refined(start, source, norm_lr=1e-3), refined(start, source, norm_lr=0)
    for name, before in start.layers.named_parameters():
        assert torch.equal(before, kept.layers.get_parameter(name)), name
        assert not torch.equal(before, found.layers.get_parameter(name)), name
        assert found.layers.get_parameter(name).requires_grad
    # Those of the float model are not touched, nor given gradients.
    assert_same_bits(source, model())
    assert all(each.grad is None for each in (*source.parameters(), *found.parameters()))


def test_a_layer_that_is_no_better_stays_as_it_was() -> None:
    source = model()
    start = converted(source, Gptq())
    found = refined(start, source, steps=4, travel=40.0, norm_lr=1.0, scales=False)
    assert_same_bits(found, start)
    result = fp4pass.report(found).refined
    assert not any(layer.kept for layer in result.layers) and not result.kept
    assert result.layers[0].after > result.layers[0].before
    text = str(fp4pass.report(found))
    assert "layers.0: " in text and "left as it was" in text
    # Its errors are still those of its codes.
    assert fp4pass.report(found).rows == fp4pass.report(start).rows


def test_the_whole_is_put_back_if_the_logits_are_no_nearer(monkeypatch: Any) -> None:
    source = model(has_logits=True)
    start = converted(source)
    found = refined(start, source)
    result = fp4pass.report(found).refined
    assert result.kept and result.kl_after < result.kl_before
    assert result.kl_before == logits_kl(start, source, batches()[7:])
    assert result.kl_after == logits_kl(found, source, batches()[7:])
    distances = iter([0.5, 0.6])
    monkeypatch.setattr("fp4pass.lab.learning.refining.logits_kl", lambda *args: next(distances))
    other = refined(start, source)
    result = fp4pass.report(other).refined
    assert all(layer.kept for layer in result.layers) and not result.kept
    assert_same_bits(other, start)
    assert "KL of the logits: 0.5000 to 0.6000, so all is left as it was" in str(
        fp4pass.report(other)
    )


def test_scales_are_searched_where_that_helps() -> None:
    """By the Hessians of the inputs, of the weights that were rounded by squared errors."""
    source = model()
    start, taught = converted(source, "sse"), batches()[:7]
    layer, twin = copy.deepcopy(start).layers[0], source.layers[0]
    weights = {m: original_weight(twin, n, m) for n, m in layer.named_modules() if n in LINEARS}
    learned = LearnedLayer(layer, weights, {})
    sums = Hessians(learned)
    for x in taught:
        layer(x)
    hessians = sums.close()
    for latent, (module,) in learned.latents.items():
        seen = torch.cat([_input(layer, module, x) for x in taught])
        wanted = torch.stack([part.T @ part for part in seen.split(32, dim=1)])
        torch.testing.assert_close(hessians[latent], wanted, rtol=1e-4, atol=1e-3)

    def away() -> float:
        return float(sum((layer(x) - twin(x)).square().sum() for x in taught))

    with torch.no_grad():
        before = away()
        learned.search_scales(hessians, away)
        assert away() < before
        scales = [m.weight_scale for m in weights]
        # A search that does not lower the error is undone.
        codes = [m.packed_codes() for m in weights]
        learned.search_scales(hessians, lambda: 1.0)
    assert all(a is m.weight_scale for a, m in zip(scales, weights, strict=True))
    assert all(torch.equal(a, m.packed_codes()) for a, m in zip(codes, weights, strict=True))
    learned.restore()
    assert_same_bits(layer, start.layers[0])


LINEARS = ("side", "up", "down")


def _input(layer: Any, module: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    with module.register_forward_pre_hook(lambda m, args: seen.append(args[0])), torch.no_grad():
        layer(x)
    return seen[0]


def test_held_out_batches_judge_and_teach_nothing() -> None:
    source, data = model(), batches()
    start = converted(source)
    options = {"options": Refine(steps=12), "progress": False}

    def run(held_out: list[Tensor]) -> Any:
        return fp4pass.refine(copy.deepcopy(start), source, data[:7], held_out=held_out, **options)

    assert_same_bits(run(data[7:]), refined(start, source, steps=12))
    first, other = run(data[7:]), run([1e3 * torch.randn(8, K)])
    reports = [fp4pass.report(each).refined.layers for each in (first, other)]
    assert reports[0][0].before != reports[1][0].before


def test_the_same_seed_gives_the_same_bits() -> None:
    source = model()
    start = converted(source)
    a, b, other = (refined(start, source, steps=9, travel=0.2, seed=seed) for seed in (0, 0, 1))
    assert_same_bits(a, b)
    assert not torch.equal(a.layers[0].up.bias, other.layers[0].up.bias)


def test_hidden_tokens_teach_and_judge_nothing() -> None:
    source = mixtures.build("qwen3_moe", num_experts=0, mlp_only_layers=[0, 1]).eval()
    start = fp4pass.convert(copy.deepcopy(source), "nvfp4", "naive", weight_only=True)
    mask = torch.ones(4, 40, dtype=torch.long)
    mask[:, 30:] = 0

    def run(change: Tensor) -> Any:
        data = [
            {"input_ids": torch.where(mask == 1, x, change), "attention_mask": mask} for x in ids(3)
        ]
        found = copy.deepcopy(start)
        return fp4pass.refine(found, source, data, Refine(steps=6, travel=0.2), progress=False)

    first, other = run(torch.tensor(7)), run(torch.tensor(11))
    assert_same_bits(first, other)
    assert fp4pass.report(first).refined == fp4pass.report(other).refined
    assert get_state(first).recipe["refine"]["tokens"] == 2 * 4 * 30


def test_a_refined_model_is_an_ordinary_converted_one(tmp_path: Path) -> None:
    source = mixtures.build("qwen3_moe", num_experts=0, mlp_only_layers=[0, 1]).eval()
    start = fp4pass.convert(copy.deepcopy(source), "nvfp4", "naive", weight_only=True)
    options = Refine(steps=20)
    found = fp4pass.refine(copy.deepcopy(start), source, ids(), options, progress=False)
    changed = [
        n
        for n, m in linears(found).items()
        if not torch.equal(m.weight, start.get_submodule(n).weight)
    ]
    report = fp4pass.report(found)
    assert report.refined.kept and report.refined.kl_after < report.refined.kl_before
    assert len(changed) == 7 * sum(layer.kept for layer in report.refined.layers)
    # The errors of the codes before are no longer theirs.
    assert {row.name for row in report.converted if row.weight_error is None} == set(changed)
    recipe = get_state(found).recipe["refine"]
    assert recipe["steps"] == 20 and recipe["tokens"] == 800 and recipe["share"] == 0.5
    fp4pass.save(found, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "fp4pass.json").read_text())
    assert stored["recipe"]["refine"] == recipe
    loaded: Any = fp4pass.load(tmp_path / "out")
    assert_same_bits(loaded, found)
    assert fp4pass.report(loaded) == report
    assert get_state(loaded).recipe["refine"] == recipe
    recipes = fp4pass.Recipe.read(tmp_path / "out" / "fp4pass.json")
    assert recipes.config.method_name == "naive"


def test_weights_that_layers_share_stay() -> None:
    source = model()
    source.layers[1].up.weight = source.layers[0].up.weight
    source.layers[1].norm.weight = source.layers[0].norm.weight
    start = converted(source)
    found = refined(start, source, norm_lr=1e-3)
    assert torch.equal(found.layers[0].up.weight, start.layers[0].up.weight)
    assert torch.equal(found.layers[0].norm.weight, start.layers[0].norm.weight)
    assert not torch.equal(found.layers[0].side.weight, start.layers[0].side.weight)


def test_a_weight_that_a_layer_uses_twice_stays_one() -> None:
    source = model()
    for layer in source.layers:
        layer.side.weight = layer.up.weight
    found = refined(converted(source), source)
    assert fp4pass.report(found).refined.layers[0].kept
    for layer in found.layers:
        assert layer.side.weight_packed is layer.up.weight_packed
        assert layer.side.weight_scale is layer.up.weight_scale


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_learn(name: str) -> None:
    source = mixtures.build(name).float()
    # The same experts are chosen in both models.
    rules = [("*self_attn*", None)]
    start = fp4pass.convert(copy.deepcopy(source), "nvfp4a16", "naive", rules=rules)
    options = Refine(steps=30)
    found = fp4pass.refine(copy.deepcopy(start), source, ids(), options, progress=False)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert fp4pass.report(found).refined.layers[0].kept
    assert not torch.equal(found.get_submodule(stack).weight, start.get_submodule(stack).weight)


def test_an_interrupted_call_leaves_whole_layers(monkeypatch: Any) -> None:
    source = model()
    start = converted(source)
    whole = refined(start, source, steps=12)
    found, steps = copy.deepcopy(start), 0
    own = torch.optim.Adam.step

    def step(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 17:
            raise KeyboardInterrupt
        return own(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with pytest.raises(KeyboardInterrupt):
        fp4pass.refine(found, source, batches(), Refine(steps=12), progress=False)
    assert_same_bits(found.layers[0], whole.layers[0])
    assert_same_bits(found.layers[1], start.layers[1])
    assert all(each.requires_grad and each.grad is None for each in found.parameters())
    assert [layer.name for layer in fp4pass.report(found).refined.layers] == ["layers.0"]
    found(batches()[0])
    assert not found.layers[0]._forward_hooks and not source.layers[0]._forward_pre_hooks


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps"),
        ({"travel": -1}, "travel"),
        ({"share": 1.5}, "share: expected a number from 0 to 1"),
        ({"norm_lr": float("inf")}, "norm_lr"),
        ({"scales": 1}, "scales"),
        ({"token_weights": "invers"}, "Did you mean 'inverse'"),
        ({"average": float("nan")}, "average"),
        ({"seed": None}, "seed"),
    ],
    ids=lambda each: str(each),
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Refine(**options)


def test_travel_bounds_what_adam_moves() -> None:
    options = Refine(steps=50, travel=0.7)
    rates = [options.travel * rate for rate in options.rates]
    assert abs(sum(rates) - 0.7) < 1e-6 and abs(rates[0] - 50 * rates[-1]) < 1e-6
    value = torch.zeros(3)
    adam = torch.optim.Adam([value], betas=(0.9, 0.99))
    for rate in rates:
        adam.param_groups[0]["lr"] = rate
        value.grad = torch.tensor([1.0, 1e-3, -5.0])
        adam.step()
    torch.testing.assert_close(value, torch.tensor([-0.7, -0.7, 0.7]), rtol=1e-3, atol=0)


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
    with pytest.raises(CalibrationError, match="an iterable of batches"):
        fp4pass.refine(start, source, data[0], progress=False)
    with pytest.raises(OptionError, match=r"fp4pass.Refine\(...\)"):
        fp4pass.refine(start, source, data, {"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(StateError, match="without one"):
        alone = nn.Linear(32, 32).eval()
        fp4pass.refine(fp4pass.convert(copy.deepcopy(alone), "nvfp4", method="sse"), alone, data)
    compiled = copy.deepcopy(start)
    compiled.layers[0].compile()
    with pytest.raises(StateError, match="compiled"):
        fp4pass.refine(compiled, source, data)
    with pytest.raises(StateError, match="meta device"):
        fp4pass.refine(start, copy.deepcopy(source).to("meta"), data)


def test_several_processes_are_refused(monkeypatch: Any) -> None:
    source = model()
    start = converted(source)
    several = types.SimpleNamespace(size=2)
    monkeypatch.setattr("fp4pass.lab.learning.refining.ranks", lambda: several)
    with pytest.raises(OptionError, match="one process"):
        fp4pass.refine(start, source, batches(2))


def test_offloaded_models_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    source = model()
    start = converted(source)
    original = accelerate.cpu_offload(copy.deepcopy(source), torch.device("cpu"))
    with pytest.raises(OptionError, match="accelerate offloads"):
        fp4pass.refine(start, original, batches(2))
