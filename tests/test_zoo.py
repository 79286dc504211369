"""Every kind of model: observed, converted, exported and compiled, against plain references."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Iterable

import pytest
import torch
import zoo
from swap import float_experts, swapped
from torch import Tensor, nn
from zoo import Case

import fp4pass
from fp4pass.methods import Stats
from fp4pass.nn.experts import QUANTIZED
from fp4pass.nn.linear import QuantizedLinear
from fp4pass.quantization.observers.observer import collect

ALL = {case.name: case for case in zoo.CASES}

# What tells families apart: rotary and learned positions, sliding windows, Conv1D, experts,
# encoders, fused attention, shared weights. Their checks are quick, and one check of all others.
FAMILIES = (
    "llama",
    "gemma3",
    "gpt2",
    "qwen3_moe",
    "bert",
    "transformer_encoder_padded",
    "shared_weight",
    "used_twice",
)


def params_of(names: Iterable[str], quick: Iterable[str] = FAMILIES) -> list[object]:
    def marks(case: Case) -> list[pytest.MarkDecorator]:
        lacking = any(importlib.util.find_spec(name) is None for name in case.requires)
        skip = [pytest.mark.skip(reason="needs what is not installed")] if lacking else []
        return skip + ([] if case.name in quick else [pytest.mark.slow])

    return [pytest.param(ALL[name], id=name, marks=marks(ALL[name])) for name in names]


every_case = pytest.mark.parametrize("case", params_of(ALL))


def plain(case: Case) -> Case:
    """The case whose model has the same weights and nothing attached to it."""
    return ALL["llama"] if case.name == "llama_cpu_offload" else case


def statistics(module: nn.Module) -> Stats:
    return collect([module], "").matrix(0)


def assert_same_statistics(stats: Stats, reference: zoo.InputStatistics) -> None:
    assert stats.tokens == reference.count
    # What torch fuses of nn.MultiheadAttention, it rounds in another order.
    assert stats.input_amax == pytest.approx(reference.amax, rel=1e-6)
    size = reference.hessian.diagonal(dim1=1, dim2=2).sqrt()
    bound = 1e-5 * size.unsqueeze(2) * size.unsqueeze(1)
    assert stats.block_hessian is not None
    assert ((stats.block_hessian.double() - reference.hessian).abs() <= bound).all()


def rounding(expected: Tensor) -> float:
    """What the order of float32 sums may change in a small model."""
    return 1e-5 * float(expected.detach().abs().amax())


def calibrate(case: Case, model: nn.Module) -> None:
    """Two batches of different shapes and, if the model generates, a generation."""
    for i in range(2):
        case.run(model, i)
    if case.generate:
        case.generate(model)


def reference_statistics(case: Case) -> dict[str, zoo.InputStatistics]:
    model = case.build()
    with zoo.hook_reference(model, zoo.eligible_linears(model)) as reference:
        calibrate(case, model)
    return reference


def assert_same_runs(case: Case, model: nn.Module, reference: nn.Module) -> None:
    """Equal to the bit on three batches, and equal tokens."""
    assert model.training == case.grad
    for i in range(3):
        with zoo.unfused():
            expected, got = case.run(reference, i), case.run(model, i)
        assert torch.equal(got, expected)
        torch.testing.assert_close(case.run(model, i), expected, rtol=0, atol=rounding(expected))
    if case.generate:
        assert torch.equal(case.generate(model), case.generate(reference))


@every_case
def test_prepared_models_observe_every_linear_and_change_no_result(case: Case) -> None:
    model = case.build()
    names = list(zoo.eligible_linears(model))
    assert fp4pass.prepare(model) is model
    reference = reference_statistics(plain(case))
    calibrate(case, model)
    for name in names:
        assert_same_statistics(statistics(model.get_submodule(name)), reference[name])
    assert_same_runs(case, model, plain(case).build())


@pytest.mark.quick(2)
@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("fmt, weight_only", [("nvfp4", True), ("mxfp4", False)])
@every_case
def test_converted_models_equal_a_module_swap(case: Case, fmt: str, weight_only: bool) -> None:
    check_converted(case, fmt, weight_only)


def check_converted(case: Case, fmt: str, weight_only: bool) -> None:
    model = case.build()
    names = {*zoo.eligible_linears(model), *zoo.stacks(model)}
    fp4pass.convert(model, fmt, "naive", weight_only=weight_only)
    reference = swapped(plain(case).build(), fmt, weight_only=weight_only)
    assert_same_runs(case, model, reference)
    rows = fp4pass.report(model).rows
    assert {row.name for row in rows if not row.skip_reason} == names
    converted = {n for n, m in model.named_modules() if isinstance(m, QUANTIZED)}
    assert converted == names


@pytest.mark.quick(2)
@every_case
def test_calibration_gives_static_activation_scales(case: Case) -> None:
    model = case.build()
    fp4pass.prepare(model)
    calibrate(case, model)
    fp4pass.convert(model, "nvfp4", method="naive")
    seen = reference_statistics(plain(case))
    amax = {name: stats.amax for name, stats in seen.items()}
    experts = float_experts(original := plain(case).build())
    calibrate(case, original)
    for name in zoo.stacks(plain(case).build()):
        path = next(path for path in experts if name.startswith(f"{path}."))
        amax[name] = experts[path].seen[name.removeprefix(f"{path}.")]
    if case.name == "shared_weight":
        # What shares a weight shares its statistics.
        amax = dict.fromkeys(amax, max(amax.values()))
    reference = swapped(plain(case).build(), weight_only=False, input_amax=amax)
    assert_same_runs(case, model, reference)


@every_case
def test_what_is_skipped_is_a_row_with_its_reason(case: Case) -> None:
    model = case.build()
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    fp4pass.convert(model, "nvfp4", method="naive")
    rows = {row.name: row.skip_reason for row in fp4pass.report(model).rows}
    assert linears <= set(rows)
    left = {name: reason for name, reason in rows.items() if reason}
    for pattern, word in case.skipped.items():
        matching = fnmatch.filter(left, pattern)
        assert matching, f"{pattern} matches none of {sorted(left)}"
        assert all(word.lower() in left[name].lower() for name in matching)
    for name, reason in left.items():
        assert any(fnmatch.fnmatchcase(name, p) for p in case.skipped), (name, reason)


@pytest.mark.parametrize("case", params_of(["llama_cpu_offload"], ALL))
def test_offloaded_weights_stay_offloaded(case: Case) -> None:
    model = case.build()
    fp4pass.convert(model, method="naive", weight_only=True)
    linears = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    case.run(model, 0)
    assert linears and all(linear.weight_packed.is_meta for linear in linears)


def test_what_shares_a_weight_shares_its_packed_buffers() -> None:
    model = fp4pass.convert(
        fp4pass.prepare(ALL["shared_weight"].build(), "naive"), "nvfp4", method="naive"
    )
    assert model.first.weight_packed is model.second.weight_packed
    assert model.first.weight_scale is model.second.weight_scale
    assert torch.equal(model.first.weight_global_scale, model.second.weight_global_scale)
    assert [row.name for row in fp4pass.report(model).rows] == ["first", "second"]
    model = fp4pass.convert(ALL["used_twice"].build(), "nvfp4", method="naive")
    assert [row.name for row in fp4pass.report(model).rows] == ["proj"]
