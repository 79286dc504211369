"""distill: what it trains, what it keeps, and what it refuses; KL against PyTorch's in float64."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits
from students import VOCABULARY, Predictor, cut_off, pair, windows
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.core.packing import unpack_codes
from fp4pass.errors import CalibrationError, NonFiniteError, OptionError, ShapeError, StateError
from fp4pass.lab import Distillation, kl_loss, trainable
from fp4pass.lab import divergence as kls
from fp4pass.lab.distill import Training, draw

OPTIONS: dict[str, Any] = {"steps": 24, "rate": 0.045, "batch_size": 4, "progress": False}


def distilled(model: nn.Module, original: nn.Module, **options: Any) -> Distillation:
    return fp4pass.distill(model, original, windows(), **{**OPTIONS, **options})


def kl(model: nn.Module, original: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        q, p = (each(ids).flatten(0, 1).double().log_softmax(-1) for each in (model, original))
    return F.kl_div(q, p, reduction="batchmean", log_target=True).item()


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
    apart, start = windows(6, seed=7), copy.deepcopy(model)
    found = distilled(model, original, held_out=apart)
    assert found.history[0].kl == pytest.approx(kl(start, original, apart), abs=1e-7)
    assert found.best.kl == pytest.approx(kl(model, original, apart), abs=1e-7)
    assert found.distinct_tokens == 24 * 16
    assert f"{found.best.kl:.5f} at" in str(found) and "which is kept" in str(found)
    codes = [
        [unpack_codes(each.get_submodule(name).weight_packed, 4) for each in (model, start)]
        for name in ("up", "down")
    ]
    # Not a zero that changed its sign alone.
    differ = sum(int(((a != b) & ((a % 8 != 0) | (b % 8 != 0))).sum()) for a, b in codes)
    assert found.codes_changed == differ / (2 * 64 * 128) > 0


@pytest.mark.core
def test_the_start_is_kept_where_no_step_is_better() -> None:
    model, original = pair(method="gptq")
    before = copy.deepcopy(model)
    found = distilled(model, original, rate=7.0, steps=6)
    assert found.best == found.history[0] and found.codes_changed == 0
    assert "no step was better than the start" in str(found)
    assert_same_bits(model, before)


def test_a_step_that_memory_has_no_room_for_is_taken_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (model, original), (other, _) = pair(), pair()
    expected = distilled(model, original, steps=2)
    logits_of, sizes = kls.logits_of, list[int]()

    def scarce(model: nn.Module, batch: Tensor) -> Any:
        if model is other and torch.is_grad_enabled():
            sizes.append(len(batch))
            if len(batch) > 1:
                raise torch.OutOfMemoryError("out of memory")
        return logits_of(model, batch)

    monkeypatch.setattr(kls, "logits_of", scarce)
    found = distilled(other, original, steps=2)
    # The size that fits is kept for the next step.
    assert sizes == [4, 2, *[1] * 8]
    assert found.tokens == expected.tokens and found.best.kl == pytest.approx(expected.best.kl)
    monkeypatch.setattr(kls, "logits_of", lambda *args: scarce(other, windows(2)))
    with pytest.raises(torch.OutOfMemoryError):
        Training(trainable(pair()[0], original), 0.1)._gradients(original, [windows(1)])


def test_an_evaluation_before_the_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    measured = iter([5.0, 4.0, 3.0, *[3.5] * 6])
    module = sys.modules["fp4pass.lab.distill"]
    monkeypatch.setattr(module, "_held_out_kl", lambda *args: next(measured))
    found = distilled(model, original)
    assert found.best.step == 6 and len(found.history) == 9
    assert "5.00000 -> 3.00000 at step 6, which is kept" in str(found)


def test_a_call_that_is_cut_off_leaves_the_best_so_far() -> None:
    model, original = pair()
    start = copy.deepcopy(model)
    with cut_off(original, 26):
        distilled(model, original)
    assert kl(model, original, windows(seed=5)) < kl(start, original, windows(seed=5))
    assert fp4pass.report(model).converted


@pytest.mark.parametrize("others", [0.0, 1e-3])
def test_parameters_in_floating_point_learn_in_float32(others: float) -> None:
    model, original = pair(dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    # A step is far below what bfloat16 resolves at 1, where the weight of the norm is.
    model.up.bias.requires_grad_(False)
    distilled(model, original, others=others, steps=120)
    for name, own in model.named_parameters():
        # norm.bias is 0, and has no size.
        learns = others > 0 and own.requires_grad and name != "norm.bias"
        assert own.dtype == torch.bfloat16 and own.requires_grad == (name != "up.bias")
        assert torch.equal(own, before.get_parameter(name)) != learns, name


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
        model = fp4pass.convert(copy.deepcopy(original), "nvfp4a16", "naive")
        rows = zip(ids.split(4), mask.split(4), strict=True)
        batches = [{"input_ids": a, "attention_mask": b} for a, b in rows]
        found.append(untimed(fp4pass.distill(model, original, batches, **OPTIONS)))
    assert found[0] == found[1]


def test_activation_checkpointing_changes_no_bit() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.5}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads)
    original = transformers.Qwen3ForCausalLM(config).eval()
    models, calls = [], []
    for checkpoints in (False, True):
        model = fp4pass.convert(copy.deepcopy(original), "nvfp4a16", "naive")
        if checkpoints:
            for layer in model.model.layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = lambda *args: (
                    calls.append(1) or torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)
                )
        distilled(model, original, steps=2)
        assert not any(module.training for module in model.modules())
        models.append(model)
    # Two layers in each of two steps.
    assert len(calls) >= 2 * 2
    assert_same_bits(*models)


def test_the_original_writes_the_text_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    asked: list[Any] = []

    def batches(data: Any, tokenizer: Any, *, model: Any, **options: Any) -> list[Tensor]:
        asked.append((data, tokenizer, model is original, options["samples"], options["seed"]))
        return list(windows(24).split(1))

    monkeypatch.setattr(fp4pass.calibration, "batches", batches)
    options = {**OPTIONS, "steps": 11, "batch_size": 2, "seed": 3}
    found = fp4pass.distill(model, original, tokenizer="the tokenizer", **options)
    # One window in twelve of what it wrote is held out.
    assert asked == [(None, "the tokenizer", True, 25, 3)]
    assert (found.distinct_tokens, found.held_out_tokens) == (22 * 16, 2 * 16)
    monkeypatch.undo()
    with pytest.raises(OptionError, match="tokenizer"):
        fp4pass.distill(pair()[0], original, **options)


def test_wrong_calls_change_nothing() -> None:
    model, original = pair()
    before, beyond = copy.deepcopy(model), windows()
    beyond[13, 4] = VOCABULARY
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (OptionError, "steps: expected 1, 2, ..., got 0", {"steps": 0}),
        (OptionError, "rate: expected a number that is not neg.*, got -1", {"rate": -1}),
        (OptionError, "others: expected a number that is not negative", {"others": math.nan}),
        (OptionError, "batch_size: expected 1, 2, ..., got 0", {"batch_size": 0}),
        (CalibrationError, "give at least 2 windows or batches", {"batches": windows(1)}),
        (CalibrationError, "at least one window in each", {"held_out": []}),
        (CalibrationError, "expected tokens from 0 to 47, .*, got 48", {"batches": beyond}),
        (ShapeError, "those of the converted model", {"original": Predictor(64).eval()}),
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
    # NaN that only training batches reach.
    model, original = pair()
    before = copy.deepcopy(model)
    original.embedding.weight.data[3] = math.nan
    with pytest.raises(NonFiniteError, match="The KL of step 1 is NaN"):
        distilled(model, original, held_out=windows() * 0)
    assert_same_bits(model, before)
    # No weight of it is NaN.
    model, original = pair()
    original.register_forward_hook(lambda module, args, logits: logits * math.nan)
    with pytest.raises(NonFiniteError, match=r"The KL is NaN\. A model returns NaN"):
        distilled(model, original)


def test_each_epoch_draws_every_window_in_its_own_order() -> None:
    steps = draw(list(range(10)), 4, seed=0)
    drawn = [i for _ in range(5) for i in next(steps)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


@pytest.mark.parametrize("chunk", [1 << 24, 64])
def test_kl_and_its_gradient(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fp4pass.lab.divergence"], "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    student = (3 * torch.randn(2, 5, 31, generator=generator)).requires_grad_()
    teacher = (3 * torch.randn(2, 5, 31, generator=generator)).requires_grad_()
    found = kl_loss(student, teacher)
    (2 * found).backward()
    exact = student.detach().double().requires_grad_()
    logs = [each.log_softmax(-1).flatten(0, 1) for each in (exact, teacher.detach().double())]
    expected = F.kl_div(*logs, reduction="batchmean", log_target=True)
    (2 * expected).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(student.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)
    assert teacher.grad is None


def test_a_token_that_the_teacher_rules_out_adds_nothing() -> None:
    student = torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    found = kl_loss(student, torch.tensor([[0.0, 0.0, -math.inf]]))
    found.backward()
    assert found.item() == pytest.approx(math.log(3 / 2))
    assert student.grad.dtype == torch.bfloat16
    assert torch.allclose(student.grad.float(), torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]), rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("options", [{"weight_only": True}, {"method": "gptq"}])
def test_training_on_a_gpu(options: dict[str, Any]) -> None:
    model, original = (each.cuda() for each in pair(dtype=torch.bfloat16, **options))
    found = distilled(model, original)
    assert found.best.kl < 0.9 * found.history[0].kl
