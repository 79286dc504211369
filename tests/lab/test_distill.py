"""distill: what it keeps, where it goes on, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import build
from small_models import assert_same_bits
from students import VOCABULARY, Predictor, cut_off, pair, windows
from torch import Tensor, nn

import fp4pass
from fp4pass.core.packing import unpack_codes
from fp4pass.errors import (
    CalibrationError,
    CheckpointError,
    NonFiniteError,
    OptionError,
    ShapeError,
    StateError,
)
from fp4pass.lab.learning import Distillation, freeze, trainable

OPTIONS: dict[str, Any] = {"steps": 24, "travel": 0.6, "batch_size": 4, "progress": False}


def distilled(model: nn.Module, original: nn.Module, **options: Any) -> Distillation:
    return fp4pass.distill(model, original, windows(), **{**OPTIONS, **options})


def kl(model: nn.Module, original: nn.Module, ids: Tensor) -> float:
    found = fp4pass.evaluate(model, None, ids, original, window=ids.shape[1], progress=False).kl
    assert found is not None
    return found


def untimed(found: Distillation) -> Distillation:
    return dataclasses.replace(found, seconds=0.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [{"weight_only": True}, {"method": "gptq"}, {"fmt": "mxfp4"}],
    ids=["weights", "inputs", "mxfp4"],
)
def test_training_lowers_kl_on_what_was_not_trained_on(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model, original = pair(**options)
    before = kl(model, original, windows(seed=5))
    found = distilled(model, original)
    assert found.best.kl < 0.9 * found.history[0].kl
    assert kl(model, original, windows(seed=5)) < 0.95 * before
    # The start and 8 evaluations, of which the best is kept.
    assert [each.step for each in found.history] == list(range(0, 25, 3))
    assert found.best.kl == min(each.kl for each in found.history)
    assert 0 < found.codes_changed < 0.5
    assert (found.tokens, found.distinct_tokens, found.held_out_tokens) == (24 * 64, 352, 32)
    fp4pass.save(model, tmp_path / "out")
    loaded = fp4pass.load(tmp_path / "out", model=Predictor().eval())
    assert_same_bits(loaded, model)
    recipe = json.loads((tmp_path / "out" / "fp4pass.json").read_text())["recipe"]
    assert recipe["distilled"]["best"] == dataclasses.asdict(found.best)
    assert fp4pass.Recipe.from_dict(recipe).config.fmt == options.get("fmt", "nvfp4")
    assert all(row.weight_error is None for row in fp4pass.report(loaded).converted)


@pytest.mark.core
def test_the_history_is_of_the_converted_model() -> None:
    model, original = pair()
    apart = windows(6, seed=7)
    start = copy.deepcopy(model)
    found = distilled(model, original, held_out=apart)
    assert found.history[0].kl == pytest.approx(kl_of_all(start, original, apart), abs=1e-7)
    assert found.best.kl == pytest.approx(kl_of_all(model, original, apart), abs=1e-7)
    assert found.distinct_tokens == 24 * 16
    assert f"{found.best.kl:.5f} at" in str(found) and "which is kept" in str(found)
    own, old = (each.up.weight_packed for each in (model, start))
    assert not torch.equal(own, old)
    pairs = [
        [unpack_codes(each.get_submodule(name).weight_packed, 4) for each in (model, start)]
        for name in ("up", "down")
    ]
    # Not a zero that changed its sign alone.
    differ = sum(int(((a != b) & ((a % 8 != 0) | (b % 8 != 0))).sum()) for a, b in pairs)
    assert found.codes_changed == differ / (2 * 64 * 128)


@torch.no_grad()
def kl_of_all(model: nn.Module, original: nn.Module, ids: Tensor) -> float:
    q, p = (each(ids).flatten(0, 1).double().log_softmax(-1) for each in (model, original))
    return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True).item()


@pytest.mark.core
def test_the_start_is_kept_where_no_step_is_better() -> None:
    model, original = pair(method="gptq")
    before = copy.deepcopy(model)
    found = distilled(model, original, travel=90.0, steps=6)
    assert found.best == found.history[0] and found.codes_changed == 0
    assert "no step was better than the start" in str(found)
    assert_same_bits(model, before)


def test_an_evaluation_before_the_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    measured = iter([5.0, 4.0, 3.0, *[3.5] * 6])
    module = sys.modules["fp4pass.lab.learning.distilling"]
    monkeypatch.setattr(module, "mean_divergence", lambda *args: next(measured))
    found = distilled(model, original)
    assert found.best.step == 6 and len(found.history) == 9
    assert "5.00000 -> 3.00000 at step 6, which is kept" in str(found)


def test_interrupted_training_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    (whole, original), (first, _), (second, _) = pair(), pair(), pair()
    options: dict[str, Any] = {"resume": tmp_path}
    expected = distilled(whole, original)
    with cut_off(original, 26):
        distilled(first, original, **options)
    # It has the best so far, and is converted.
    assert kl(first, original, windows(seed=5)) < kl(second, original, windows(seed=5))
    assert fp4pass.report(first).converted
    with cut_off(original, 8):
        distilled(second, original, **options)
    second, _ = pair()
    found = distilled(second, original, **options)
    assert untimed(found) == untimed(expected)
    assert_same_bits(second, whole)
    # And once more when it is done.
    again, _ = pair()
    assert distilled(again, original, **options) == found
    assert_same_bits(again, whole)


def test_a_folder_of_another_call_is_refused(tmp_path: Path) -> None:
    (model, original), (other, _) = pair(), pair(method="gptq")
    distilled(model, original, steps=2, resume=tmp_path)
    fresh, _ = pair()
    before = copy.deepcopy(fresh)
    for changed in ({"travel": 2.0}, {"steps": 3}, {"seed": 1}, {"batch_size": 2}, {"others": 0.1}):
        with pytest.raises(StateError, match="keeps another distillation"):
            distilled(fresh, original, **{"steps": 2, "resume": tmp_path, **changed})
        assert_same_bits(fresh, before)
    with pytest.raises(StateError, match="keeps another distillation"):
        distilled(other, original, steps=2, resume=tmp_path)
    (tmp_path / "distillation-0.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="cannot be read"):
        distilled(fresh, original, steps=2, resume=tmp_path)
    assert_same_bits(fresh, before)


@pytest.mark.parametrize("others", [0.0, 0.05])
def test_norms_and_biases_learn_in_float32_and_embeddings_do_not(others: float) -> None:
    model, original = pair(dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    # A step is far below what bfloat16 resolves at 1, where the weight of the norm is.
    distilled(model, original, others=others, steps=120)
    for name, own in model.named_parameters():
        assert own.dtype == torch.bfloat16 and own.requires_grad
        is_vector = own.ndim == 1 and name != "norm.bias"  # which is 0, and has no size
        assert torch.equal(own, before.get_parameter(name)) != (is_vector and others > 0), name


def test_batches_as_they_are() -> None:
    model, original = pair()
    batches = [(each,) for each in windows().split(4)]
    found = fp4pass.distill(model, original, batches, **OPTIONS)
    assert found.best.kl < found.history[0].kl
    # One of the six is held out, each of the others is a step.
    assert (found.tokens, found.distinct_tokens, found.held_out_tokens) == (24 * 64, 320, 64)


class Masked(Predictor):
    """A predictor that is called by names."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids)


def test_padding_is_left_out() -> None:
    found = []
    mask = torch.ones(24, 16, dtype=torch.int64)
    mask[:, 10:] = 0
    for padding in (0, VOCABULARY - 1):
        ids = windows().masked_fill(mask == 0, padding)
        original = Masked().eval()
        model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
        rows = zip(ids.split(4), mask.split(4), strict=True)
        batches = [{"input_ids": a, "attention_mask": b} for a, b in rows]
        found.append(untimed(fp4pass.distill(model, original, batches, **OPTIONS)))
    assert found[0] == found[1]


def language_model(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        **sizes,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval()


def test_activation_checkpointing_changes_no_bit() -> None:
    original = language_model(attention_dropout=0.5)
    models, calls = [], []
    for checkpoints in (False, True):
        model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
        if checkpoints:
            for layer in model.model.layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = lambda *args: (
                    calls.append(1) or torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)
                )
        distilled(model, original, steps=2)
        assert not any(module.training for module in model.modules())
        models.append(model)
    # Two layers in each of two steps; evaluations have no backward to save memory for.
    assert len(calls) >= 2 * 2
    assert_same_bits(*models)


def test_the_original_writes_the_text_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    asked: list[Any] = []

    def sample(model: nn.Module, tokenizer: Any, *, tokens: int, **options: Any) -> Tensor:
        asked.append((model is original, tokenizer, tokens, options["seed"]))
        return windows(24, seed=options["seed"])

    monkeypatch.setattr(sys.modules["fp4pass.lab.learning.distilling"], "sample", sample)
    options = {**OPTIONS, "steps": 11, "batch_size": 2, "seed": 3}
    found = fp4pass.distill(model, original, tokenizer="the tokenizer", **options)
    # One window in twelve of what it wrote is held out.
    assert asked == [(True, "the tokenizer", 24 * 512, 3)]
    assert (found.distinct_tokens, found.held_out_tokens) == (22 * 16, 2 * 16)
    with pytest.raises(OptionError, match="batches: expected windows of token ids, or tokenizer="):
        fp4pass.distill(pair()[0], original, **options)


def test_mixtures_learn_their_experts() -> None:
    original = build("mixtral")
    ids = torch.randint(original.config.vocab_size, (24, 16))
    model = fp4pass.convert(copy.deepcopy(original), "nvfp4a16", "naive")
    stacks = {
        name: module.weight_packed.clone()
        for name, module in model.named_modules()
        if isinstance(module, fp4pass.nn.experts.QuantizedExpertStack)
    }
    found = fp4pass.distill(model, original, ids, **OPTIONS)
    assert stacks and found.best.kl < found.history[0].kl
    for name, before in stacks.items():
        assert not torch.equal(model.get_submodule(name).weight_packed, before)


def test_wrong_calls_change_nothing() -> None:
    model, original = pair()
    before, beyond = copy.deepcopy(model), windows()
    beyond[13, 4] = VOCABULARY
    numbers = ("steps", "batch_size", "travel", "share", "others", "seed")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (OptionError, "steps: expected 1, 2, ..., got 0", {"steps": 0}),
        (OptionError, "travel: expected a number that is not neg.*, got -1", {"travel": -1}),
        (OptionError, r"share: expected a number in \[0, 1\], got 2", {"share": 2}),
        (OptionError, "others: expected a number that is not negative, got -1", {"others": -1}),
        (OptionError, "others: expected a number that is not negative, got nan", {"others": nan()}),
        (OptionError, "batch_size: expected 1, 2, ..., got 0", {"batch_size": 0}),
        (CalibrationError, "batches: expected windows of token ids", {"batches": windows()[0]}),
        (CalibrationError, "batches: expected windows of token ids", {"batches": {"a": 1}}),
        (CalibrationError, "batches: expected at least 2 windows", {"batches": windows(1)}),
        (CalibrationError, "held_out: expected .* an empty list", {"held_out": []}),
        (
            CalibrationError,
            "batches: batch 3: expected tokens from 0 to 47, .*, got 48",
            {"batches": beyond},
        ),
        (
            CalibrationError,
            "held_out: batch 0: expected tokens from .*, got -1",
            {"held_out": windows() - 1},
        ),
        (
            CalibrationError,
            "batches: batch 1: expected tokens, got .0, 16.",
            {"batches": [windows(), windows(0)]},
        ),
        *((OptionError, f"{name}: expected", {name: 10**400}) for name in numbers),
        *((OptionError, f"{name}: expected", {name: float("inf")}) for name in numbers),
        *((OptionError, f"{name}: expected", {name: -(10**400)}) for name in numbers),
        (ShapeError, "those of the student", {"original": Predictor(64).eval()}),
        (StateError, "expected logits", {"original": nn.Identity().eval()}),
        (StateError, "in evaluation mode", {"original": Predictor()}),
    ]
    for error, message, options in cases:
        options = {"original": original, "batches": windows(), **OPTIONS, **options}
        with pytest.raises(error, match=message):
            fp4pass.distill(model, **options)
        assert_same_bits(model, before)
    with pytest.raises(StateError, match="not converted"):
        distilled(copy.deepcopy(original), original)


@pytest.mark.core
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_gradients_are_off(mode: Any) -> None:
    (model, original), (other, _) = pair(), pair()
    expected = distilled(model, original)
    with mode():
        found = distilled(other, original)
    assert untimed(found) == untimed(expected) and found.codes_changed
    assert_same_bits(other, model)


def test_models_that_cannot_be_trained() -> None:
    with torch.inference_mode():
        model, original = pair()
    with pytest.raises(StateError, match=r"embedding\.weight: it was made in inference mode"):
        distilled(model, original)
    for name, which in (("up.weight", 1), ("embedding.weight", 1), ("norm.weight", 0)):
        models = pair()
        before = copy.deepcopy(models[0])
        models[which].get_parameter(name).data[3] = nan()
        with pytest.raises(NonFiniteError, match=f"^{name} of the (original|model) holds NaN"):
            fp4pass.distill(*models, windows() * 0 + 3, **OPTIONS)
        if which:
            assert_same_bits(models[0], before)
    # No weight of it is NaN.
    model, original = pair()
    original.register_forward_hook(lambda module, args, logits: logits * nan())
    with pytest.raises(NonFiniteError, match="The KL of the held-out batches is NaN"):
        distilled(model, original)
    # NaN that only training batches reach.
    model, original = pair()
    before = copy.deepcopy(model)
    original.embedding.weight.data[3] = nan()
    with pytest.raises(NonFiniteError, match=r"embedding\.weight of the original holds NaN"):
        distilled(model, original, held_out=windows() * 0)
    assert_same_bits(model, before)


def nan() -> float:
    return float("nan")


def test_a_student_stays_one() -> None:
    (model, original), (other, _) = pair(), pair()
    found = distilled(trainable(model, original), original)
    assert untimed(found) == untimed(distilled(other, original))
    assert_same_bits(freeze(model), other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("options", [{"weight_only": True}, {"method": "gptq"}])
def test_training_on_a_gpu(options: dict[str, Any]) -> None:
    model, original = (each.cuda() for each in pair(dtype=torch.bfloat16, **options))
    found = distilled(model, original)
    assert found.best.kl < 0.9 * found.history[0].kl
