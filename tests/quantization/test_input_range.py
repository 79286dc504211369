"""input_range="headroom": a global scale of inputs for more than calibration has shown."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import build as mixture
from mixtures import ids
from small_models import language_model, linears, tokens
from torch import Tensor, nn

import fp4pass
from fp4pass import LinearConfig
from fp4pass.core.formats import FORMATS
from fp4pass.errors import CalibrationError, OptionError
from fp4pass.kernels.statistics.naive import headroom
from fp4pass.methods import Stats
from fp4pass.nn.experts import ExpertStack, QuantizedExperts
from fp4pass.quantization.observers.observer import collect
from fp4pass.record.config import input_scale_for

# Columns, and the experts of a token.
K, TOP = 64, 2


def blocks(x: Tensor) -> Tensor:
    """The reference: the largest magnitudes of blocks that are not zero, sorted."""
    largest = x.reshape(-1, x.shape[-1] // 16, 16).abs().amax(-1).flatten().float()
    return largest[largest > 0].sort().values


def exact(x: Tensor) -> float:
    """The reference: the smallest magnitude that 1 % of the blocks do not exceed."""
    found = blocks(x)
    return float(found[-(-len(found) // 100) - 1])


def draw(count: int = 400, seed: int = 0) -> Tensor:
    """Tokens of sizes that span many octaves, one an outlier, some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, K, generator=generator)
    x *= torch.exp2(4 * torch.randn(count, 1, generator=generator))
    x[3], x[7, 5] = 0.0, 5000.0
    return x


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 32)).eval()


def observed(*batches: Any, **options: Any) -> Any:
    given = {"fmt": "nvfp4", "input_range": "headroom", **options}
    model = fp4pass.prepare(layer(), "hessian", **given)
    for x in batches:
        model(x)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_percentile_is_that_of_all_blocks_up_to_a_bin(dtype: torch.dtype) -> None:
    x = draw().clamp(-6e4, 6e4).to(dtype)
    observer = observed(x.float(), x[:1].float())
    observer[0](x.float().view(2, 200, K))  # In another shape.
    stats = collect([observer[0]], "0")
    assert stats.magnitudes is not None
    least = exact(torch.cat([x, x[:1], x]))
    assert least < headroom(stats.magnitudes) / 16384 <= 1.125 * least


def test_chunks_and_processes_add_up_exactly() -> None:
    x = draw()
    whole, chunks = (collect([observed(*each)[0]], "0") for each in ([x], x.split(37)))
    parts = [collect([observed(each)[0]], "0") for each in x.split(150)]
    merged = parts[0].merged(parts[1]).merged(parts[2])
    assert whole.magnitudes is not None and whole.magnitudes.sum() == len(x) * K / 16
    for each in (chunks, merged):
        assert each.magnitudes is not None and torch.equal(whole.magnitudes, each.magnitudes)


@pytest.mark.parametrize("rotation", [0, 32])
def test_the_scale_follows_the_formula(rotation: int) -> None:
    x = draw()
    model = fp4pass.convert(observed(x, rotation=rotation))
    amax = max(16384 * exact(x), 5000.0 * max(rotation, 1) ** 0.5)
    scales = [FORMATS["nvfp4"].input_scale_for(each * amax) for each in (1.0, 1.125)]
    assert float(model[0].input_global_scale) in scales


def test_small_blocks_keep_normal_scales_and_large_ones_their_size() -> None:
    for x in (torch.randn(200, K), draw(), 1e-6 * draw(seed=1)):
        model = fp4pass.convert(observed(x))
        divisor = float(model[0].input_global_scale)
        assert blocks(x)[-1] * divisor <= 448 * 6
        assert exact(x) / 6 * divisor >= 2**-6 or blocks(x)[-1] > 8192 * exact(x)


@torch.no_grad()
def test_larger_inputs_are_clipped_less() -> None:
    generator = torch.Generator().manual_seed(1)
    seen, larger = (torch.randn(300, K, generator=generator) * size for size in (1.0, 40.0))
    errors: dict[str, list[float]] = {}
    for name in ("amax", "headroom"):
        model = fp4pass.convert(observed(seen, input_range=name))
        for x in (seen, larger):
            dense = x @ model[0].weight.t()
            error = (model(x) - model[0].bias - dense).norm() / dense.norm()
            errors.setdefault(name, []).append(float(error))
    assert errors["amax"][1] > 0.5 and errors["headroom"][1] < 0.12
    assert errors["headroom"][0] < 1.02 * errors["amax"][0]


def test_zero_inputs_have_the_scale_of_amax() -> None:
    zero = torch.zeros(4, K)
    scales = [
        float(fp4pass.convert(observed(zero, input_range=name))[0].input_global_scale)
        for name in ("amax", "headroom")
    ]
    assert scales[0] == scales[1] == 1.0


def test_hidden_tokens_count_nowhere() -> None:
    batch = tokens()
    mask = torch.ones_like(batch)
    mask[1, 20:] = 0
    found = []
    for given in ([{"input_ids": batch, "attention_mask": mask}], [batch[:1], batch[1:, :20]]):
        model = fp4pass.prepare(language_model(), fmt="nvfp4", input_range="headroom")
        fp4pass.calibrate(model, given, progress=False)
        found.append(collect([model.get_submodule("model.layers.0.self_attn.q_proj")], ""))
    assert found[0].magnitudes is not None and found[1].magnitudes is not None
    # But for the first bin, of zeros.
    assert torch.equal(found[0].magnitudes[0, 1:], found[1].magnitudes[0, 1:])


def whole(model: nn.Module, **options: Any) -> nn.Module:
    given = {"data": list(tokens(4).split(1)), "progress": False, **options}
    return fp4pass.convert(model, "nvfp4", input_range="headroom", **given)


def scales_of(model: nn.Module) -> dict[str, float]:
    return {name: float(each.input_global_scale) for name, each in linears(model).items()}


@pytest.mark.parametrize("quality", ["fast", pytest.param("best", marks=pytest.mark.slow)])
def test_every_way_to_calibrate_has_it(quality: str, tmp_path: Any) -> None:
    model = whole(language_model(), quality=quality)
    plain = fp4pass.convert(
        language_model(), "nvfp4", quality=quality, data=list(tokens(4).split(1)), progress=False
    )
    found, before = scales_of(model), scales_of(plain)
    # Divisors: the scales of most layers are larger.
    assert sum(found[name] < before[name] for name in found) > len(found) / 2
    streamed = whole(language_model(), quality=quality, stream=tmp_path / "layers")
    if quality == "best":
        assert scales_of(streamed) == found
    row = fp4pass.report(model).rows[0]
    assert row.config is not None and "inputs with headroom" in row.config.label
    fp4pass.save(model, tmp_path / "saved")
    assert scales_of(fp4pass.load(tmp_path / "saved")) == found


@pytest.mark.parametrize("method", ["sse", "gptq"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_count_the_tokens_they_get(name: str, method: str) -> None:
    def inputs(sequential: bool, input_range: str) -> list[float]:
        model: Any = mixture(name)
        options: dict[str, Any] = {"fmt": "nvfp4", "input_range": input_range}
        fp4pass.prepare(model, method, sequential=sequential, expert_prior=8.0, **options)
        fp4pass.calibrate(model, [ids(4)], progress=False)
        for stack in (each for each in model.modules() if isinstance(each, ExpertStack)):
            stats = collect([stack], "")
            if stats.magnitudes is not None and stats.counts is not None:
                blocks = stack.dense.shape[-1] // 16
                # Of the first stage each token once, of the second once for each of its experts.
                chosen = int(stats.counts.sum()) * blocks
                assert int(stats.magnitudes.sum()) in (chosen, chosen // TOP)
        fp4pass.convert(model)
        found = [each for each in model.modules() if isinstance(each, QuantizedExperts)]
        buffers = [b for each in found for b in each.named_buffers(remove_duplicate=False)]
        return [float(scale.max()) for name, scale in buffers if "input_global" in name]

    for sequential in (False, True):
        ours, amax = inputs(sequential, "headroom"), inputs(sequential, "amax")
        assert ours and len(ours) == len(amax) and min(ours) > 0
        assert ours != amax


def converted_late() -> object:
    model = fp4pass.prepare(layer(), "hessian")
    model(draw())
    return fp4pass.convert(model, "nvfp4", input_range="headroom")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (converted_late, r"collect what input_range='headroom' needs.*input_range='headroom'\)"),
        (
            lambda: fp4pass.convert(layer(), "nvfp4", "sse", input_range="headroom"),
            r"input_range='headroom' needs calibration data.*or choose input_range='amax'",
        ),
    ],
)
def test_what_is_missing_is_said(call: Callable[[], object], match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        call()


def test_it_is_of_inputs_with_a_global_scale() -> None:
    with pytest.raises(OptionError, match="input_range"):
        LinearConfig("nvfp4", input_range="most")  # type: ignore[arg-type]
    for scheme in ("nvfp4a16", "mxfp4", "fp8"):
        config = LinearConfig(scheme, input_range="headroom")
        assert "magnitudes" not in config.needs and "headroom" not in config.label
        found = input_scale_for(config, Stats(input_amax=3.0))
        assert found is None


def test_compiled_models_count_the_same() -> None:
    x, eager = draw(), observed()
    compiled = copy.deepcopy(eager)
    eager(x), torch.compile(compiled, fullgraph=True)(x)
    found = [collect([each[0]], "0").magnitudes for each in (eager, compiled)]
    assert found[0] is not None and found[1] is not None and torch.equal(*found)
