"""One call of convert: prepare, calibrate and convert, by a quality or by data."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import build as mixture
from mixtures import build_more, ids
from small_models import assert_same_bits, linears, mlp, tokens
from torch import nn

import fp4pass
from fp4pass.api.one_call import OneCall
from fp4pass.errors import CalibrationError, OptionError, StateError, TraceError
from fp4pass.methods import Gptq
from fp4pass.quantization.observers.observer import OBSERVERS
from fp4pass.record import state
from fp4pass.record.schemes import QUALITIES
from fp4pass.record.state import get_state

pytest.importorskip("transformers")

BATCHES = list(tokens(3).split(1))


class Reader:
    """A tokenizer of which nothing is asked but its files."""

    @staticmethod
    def save_pretrained(folder: Path) -> None:
        (folder / "tokenizer.json").touch()


def language_model() -> Any:
    """Two small layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 2048}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16().eval()


def uneven() -> Any:
    """The same with channels larger than others of a block, before linears and between them."""
    model = language_model()
    sizes = torch.logspace(-2, 2, 64, base=2).round(decimals=1).view(16, 4).T.flatten()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(sizes)
            layer.mlp.up_proj.weight.mul_(torch.arange(96)[:, None] % 7 + 1)
    return model


def by_hand(fmt: str, quality: str, **options: Any) -> Any:
    """The same by calls one after the other."""
    recipe = QUALITIES[quality]
    weight_only = options.get("weight_only", False)
    decided = recipe.options_for(weight_only)
    model = options.pop("model", None) or language_model()
    if recipe.smoothing and not weight_only:
        fp4pass.smooth(model, recipe.smoothing, data=BATCHES, progress=False)
    if recipe.tokens or (fmt == "nvfp4" and not options.get("weight_only")):
        fp4pass.prepare(model, fmt=fmt, sequential=recipe.sequential, **decided, **options)
        fp4pass.calibrate(model, BATCHES, progress=False)
    return fp4pass.convert(model, fmt, **decided, **options)


def in_one(fmt: str = "nvfp4", quality: str | None = "good", **options: Any) -> Any:
    options = {"data": BATCHES, "progress": False} | options
    model = options.pop("model", None) or language_model()
    return fp4pass.convert(model, fmt, quality=quality, **options)


def hooks_of(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Models write few tokens, and how they were asked."""
    asked: list[dict[str, Any]] = []

    def text(model: nn.Module, tokenizer: Any, **options: Any) -> torch.Tensor:
        assert get_state(model) is None
        asked.append({"tokenizer": tokenizer, **options})
        return tokens(3)

    monkeypatch.setattr("fp4pass.calibration.mixture", text)
    return asked


@pytest.mark.quick(1)
@pytest.mark.parametrize("fmt", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("quality", ["fast", "good", "best"])
def test_bits_are_those_of_three_calls(fmt: str, quality: str) -> None:
    expected = by_hand(fmt, quality)
    model = in_one(fmt, quality)
    assert_same_bits(model, expected)
    assert fp4pass.report(model) == fp4pass.report(expected)


@pytest.mark.slow
def test_inputs_are_smoothed_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp4pass")
    model = in_one(quality="good", model=uneven())
    assert "smoothed the inputs of 4 groups of layers" in caplog.text
    assert_same_bits(model, by_hand("nvfp4", "good", model=uneven()))
    assert get_state(model).recipe["smooth"] == 0.5
    scales = uneven().model.layers[0].input_layernorm.weight / (
        model.model.layers[0].input_layernorm.weight
    )
    assert set(scales.log2().tolist()) > {-1.0, 1.0}
    floats = in_one(quality="good", model=uneven(), weight_only=True)
    assert "smooth" not in get_state(floats).recipe


@pytest.mark.slow
@pytest.mark.core
def test_inputs_in_fp8_have_the_recipe_of_weights_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp4pass")
    for quality in ("good", "best"):
        model = in_one("mxfp4a8", quality, model=uneven())
        alone = in_one("mxfp4a16", quality, model=uneven())
        assert "smoothed" not in caplog.text
        layer, other = (each.model.layers[1].mlp.down_proj.config for each in (model, alone))
        assert layer == other.override({"inputs": "fp8"})


def test_an_error_takes_the_smoothing_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp4pass")
    model = uneven()
    # Smoothing reads the first alone, and calibration all.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp4pass.api.one_call.INPUT_TOKENS", 1)
        with pytest.raises(RuntimeError):
            in_one(quality="good", model=model, data=[*BATCHES, torch.ones(1, 4)])
    assert "smoothed the inputs of 4 groups" in caplog.text
    assert_same_bits(model, uneven())
    assert get_state(model) is None and not state.smoothing_of(model)


def test_a_model_without_a_graph_is_not_smoothed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise TraceError("layers.0: it has no graph.")

    caplog.set_level(logging.INFO, "fp4pass")
    monkeypatch.setattr("fp4pass.calibration.smoothing.trace_call", refuse)
    model = in_one(quality="good", model=uneven())
    assert 'quality "good": inputs are not smoothed, which needs a graph: layers.0' in caplog.text
    assert "smooth" not in get_state(model).recipe


def test_a_model_without_outliers_is_not_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced: list[nn.Module] = []

    def refuse(model: nn.Module, *args: Any, **options: Any) -> Any:
        traced.append(model)
        raise TraceError("it has no graph.")

    caplog.set_level(logging.INFO, "fp4pass")
    monkeypatch.setattr("fp4pass.calibration.smoothing.trace_call", refuse)
    even, outliers = in_one(quality="good"), uneven()
    assert not traced and 'quality "good": inputs are not smoothed: few outliers' in caplog.text
    assert "smooth" not in get_state(even).recipe
    # The bits, and what calibration has seen, are as without a look.
    expected = language_model()
    decided = QUALITIES["good"].options_for(False)
    fp4pass.calibrate(fp4pass.prepare(expected, fmt="nvfp4", **decided), BATCHES, progress=False)
    assert_same_bits(even, fp4pass.convert(expected, "nvfp4", **decided))
    assert get_state(even).recipe["calibration"] == get_state(expected).recipe["calibration"]
    in_one(quality="good", model=outliers)
    assert traced == [outliers]


def test_data_alone_is_for_the_method_given() -> None:
    plain = in_one(quality=None)
    assert {row.config.method_name for row in fp4pass.report(plain).converted} == {"hessian"}
    assert "quality" not in get_state(plain).recipe
    assert OneCall(language_model(), None, {"method": Gptq(target="cross")}).sequential


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "sse"}, r"quality='best' and method are both given"),
        ({"activation_scales": "naive"}, r"quality='best' and activation_scales are both given"),
        ({"quality": "beast"}, r"Quality 'beast' does not exist\. Did you mean 'best'"),
        ({"rules": [("model.layers.9.*", None)]}, r"model\.layers\.9"),
    ],
    ids=["method", "input scales", "unknown", "rule"],
)
def test_contradictions_leave_the_model_alone(options: dict[str, Any], match: str) -> None:
    model = language_model()
    before = hooks_of(model)
    with pytest.raises(ValueError, match=match):
        in_one(model=model, **{"quality": "best", **options})
    assert get_state(model) is None and hooks_of(model) == before


@pytest.mark.core
@pytest.mark.parametrize("given", ["quality", "data", "tokenizer"])
def test_a_prepared_model_says_where_data_go(given: str) -> None:
    model = fp4pass.prepare(mlp())
    value = {"quality": "good", "data": [torch.ones(2, 64)], "tokenizer": object()}[given]
    with pytest.raises(StateError, match=r"fp4pass\.calibrate\(model, data"):
        fp4pass.convert(model, **{given: value})


@pytest.mark.core
def test_nobody_calibrates_by_surprise() -> None:
    with pytest.raises(CalibrationError, match="needs calibration data"):
        fp4pass.convert(mlp())


@pytest.mark.parametrize("quality", ["good", pytest.param("best", marks=pytest.mark.slow)])
def test_what_ends_early_leaves_no_observer(quality: str) -> None:
    model = language_model()
    before, weights = hooks_of(model), [id(each) for each in model.parameters()]

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        in_one(model=model, quality=quality, kv_cache="fp8")
    handle.remove()
    assert get_state(model) is None and hooks_of(model) == before
    assert not any(OBSERVERS in module.__dict__ for module in model.modules())
    assert [id(each) for each in model.parameters()] == weights


@pytest.mark.slow
def test_a_model_without_data_writes_its_own(writes: list[dict[str, Any]]) -> None:
    model = in_one(data=None, tokenizer=Reader)
    assert writes == [{"tokenizer": Reader, "tokens": 32768, "seq_len": 512, "seed": 0}]
    assert get_state(model).recipe["calibration"]["tokens"] == tokens(3).numel()
    assert_same_bits(model, in_one(data=tokens(3)))
    # A tokenizer says it, too, without a quality.
    assert_same_bits(in_one(quality=None, data=None, tokenizer=Reader), model)


def test_tuned_is_best_and_then_distilled(
    writes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[Any, ...]] = []
    distill = fp4pass.distill

    def distilled(model: nn.Module, original: nn.Module, data: Any, **options: Any) -> Any:
        calls.append((copy.deepcopy(model), original, data, options["tokenizer"]))
        return distill(model, original, tokens(8), steps=2, batch_size=2, rate=0.1)

    monkeypatch.setattr(fp4pass, "distill", distilled)
    model = in_one(quality="tuned", model=uneven(), tokenizer=Reader)
    (start, original, data, reader), best = calls[0], in_one(quality="best", model=uneven())
    assert_same_bits(start, best)
    assert data is BATCHES and reader is Reader and not writes
    # The original has the weights that were quantized: smoothed ones.
    with torch.no_grad():
        assert torch.equal(original(tokens(2)).logits, uneven()(tokens(2)).logits)
    norms = [each.model.layers[0].input_layernorm.weight for each in (original, uneven())]
    assert not torch.equal(*norms)
    assert get_state(model).recipe["quality"] == "tuned"
    assert len(get_state(model).recipe["distilled"]["history"]) == 3
    assert 'quality "tuned" trains for about' in caplog.text
    # Without data there is more text to train on than to calibrate on.
    in_one(quality="tuned", data=None, tokenizer=Reader, weight_only=True)
    assert [each["tokens"] for each in writes] == [1 << 15, 1 << 22]
    assert calls[1][2].equal(tokens(3))
    # An iterator can be read once.
    in_one(quality="tuned", data=iter(BATCHES), weight_only=True, tokenizer=Reader, device="cpu")
    assert torch.equal(torch.cat(calls[2][2]), torch.cat(BATCHES))


def test_what_cannot_be_tuned(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no stream\. Choose another quality"):
        in_one(quality="tuned", stream=tmp_path / "layers")
    headless = language_model().model
    with pytest.raises(StateError, match="expected a model with logits"):
        in_one(quality="tuned", model=headless)
    assert get_state(headless) is None


def test_fast_reads_text_for_the_scales_of_inputs_alone(
    writes: list[dict[str, Any]], tmp_path: Path
) -> None:
    fp4pass.save(in_one(quality="fast", data=None, tokenizer=Reader), tmp_path / "q")
    assert [each["tokens"] for each in writes] == [4096]
    # No scale without a tokenizer, and none where it is not stored.
    dynamic = in_one(quality="fast", data=None)
    assert all(each.input_global_scale is None for each in linears(dynamic).values())
    for options in ({"weight_only": True}, {"fmt": "mxfp4"}):
        in_one(quality="fast", data=None, tokenizer=Reader, **options)
    assert len(writes) == 1


def test_data_that_nothing_needs_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp4pass.api.one_call")
    model = in_one(quality="fast", weight_only=True)
    assert "calibration" not in get_state(model).recipe
    assert caplog.messages[0] == 'quality "fast" needs no data: data= is not read.'


def test_layers_on_a_disk(tmp_path: Path) -> None:
    options = {"weight_only": True, "device": "cpu"}
    streamed = in_one(stream=tmp_path / "layers", **options)
    # By layers, whatever the method.
    assert get_state(streamed).recipe["calibration"]["sequential"]
    assert_same_bits(streamed, in_one(**options))


def test_a_model_without_layers_cannot_be_best() -> None:
    with pytest.raises(OptionError, match=r"quality='best' calibrates one layer after the other"):
        fp4pass.convert(mlp(), quality="best", data=[torch.ones(2, 64)])
    fp4pass.convert(mlp().eval(), quality="good", data=[torch.ones(2, 64)], progress=False)


def test_experts_get_what_fits_them() -> None:
    rules = [("*.0.*gate_up_proj", {"fmt": "mxfp4"})]
    call = OneCall(mixture("mixtral"), "best", {"weight_only": True}, rules)
    methods = {each.name: each.config.method for each in call.plan.layers}
    experts = [name for name in methods if "experts" in name]
    assert [methods.pop(name) for name in experts] == [Gptq()] * 4
    assert set(methods.values()) == {Gptq(target="cross")}
    formats = [e.config.fmt for e in call.plan.layers if e.name.endswith("gate_up_proj")]
    assert formats == ["mxfp4", "nvfp4"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("quality", ["good", "best"])
def test_a_tower_that_text_does_not_reach_is_skipped(
    quality: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_more("llava")
    fp4pass.convert(model, quality=quality, data=[ids()], progress=False)
    skipped = [row.name for row in fp4pass.report(model).skipped]
    towers = [name for name in skipped if "vision_tower" in name or "projector" in name]
    assert len(towers) == len(skipped) - 1 >= 8
    assert all("language_model" in row.name for row in fp4pass.report(model).converted)
    assert "text does not reach model." in caplog.text
