"""distill: train the codes of a quantized model to predict what the original predicts."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration import sample
from ...core.progress import shown
from ...distributed import ONE, Ranks, ranks, sharded_parameter
from ...errors import (
    CalibrationError,
    NonFiniteError,
    OptionError,
    StateError,
    expected,
    require_number,
)
from ...quantization.observers.batches import device_of
from ...record.state import unwrap
from .batches import Batches, batches_of, divergence, hold_out, mean_divergence
from .optimizer import Optimizer
from .record import Distillation, Evaluated
from .resume import Kept, Run, fill
from .student import changed_codes, freeze, is_trainable, require_share, trainable

# Evaluations of a whole run.
_EVALUATIONS = 8

# Tokens that the original writes, with a window to hold out beside the training windows.
_SAMPLED = 1 << 19


def distill(
    model: nn.Module,
    original: nn.Module,
    batches: Tensor | Sequence[Any] | None = None,
    *,
    tokenizer: Any = None,
    held_out: Tensor | Sequence[Any] | None = None,
    steps: int = 400,
    batch_size: int = 8,
    travel: float = 1.0,
    share: float = 0.5,
    others: float = 0.05,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Distillation:
    """Train the codes of a converted model, in place, to predict what the original predicts.

    The loss is KL(original || model) of the next token. Layers compute with rounded weights and
    inputs, as they will, and rounding counts as the identity in the backward. The state that has
    the least KL on held-out batches is kept, and that of the start, bit by bit, if none has less.
    Activation checkpointing works as the model has it enabled.

    Args:
        model: converted or loaded, in eval mode; or what `fp4pass.lab.learning.trainable` returned,
            which may be sharded by fully_shard, and then stays trainable.
        original: the float model that was converted, in eval mode; it may be on another device.
        batches: windows of token ids [n, window], shuffled anew each time all were read; or a list
            of batches as `calibrate` takes them. By default the original writes them.
        tokenizer: of the original, for it to write text.
        held_out: as batches; by default every twelfth of these, which is not trained on.
        steps: of the optimizer.
        batch_size: windows of a step.
        travel: how far a latent weight can go in all steps, in cells of its code. With more, or
            with fewer windows in all, more codes change by chance.
        share: how far latent weights begin on the way from the values of their codes to the float
            weight, from 0 to 1.
        others: how far norms and biases can go, as a part of their root mean square; 0 leaves them.
            Embeddings and layers in floating point stay.
        seed: of the order of the batches, and of text that the original writes.
        resume: a folder that keeps the training after each evaluation, so that the same call after
            an interruption goes on from there; delete it when the model is saved.
        progress: as for `convert`.

    Returns:
        The record, which fp4pass.json has too, under "distilled". A call that is cut off leaves the
        model converted, with the best state so far.

    Raises:
        StateError: the model is not converted or cannot be trained, one is in training mode, or
            `resume` is of another call.
        ShapeError: the original has other layers or another vocabulary.
        CalibrationError: there are too few batches.
        OptionError: an argument is out of range, or the original cannot write text.

    Example:
        >>> found = fp4pass.distill(model, original, windows, steps=4, progress=False)
        >>> found.best.kl <= found.history[0].kl
        True
    """
    require_number("steps", "1, 2, ...", steps, least=1)
    require_number("seed", "an integer", seed)
    require_share(share)
    for name, value in (("travel", travel), ("others", others)):
        require_number(name, "a number that is not negative", value, float, 0)
    model, original = unwrap(model), unwrap(original)
    for each in (model, original):
        if each.training:
            raise StateError(
                "Expected models in evaluation mode, got one in training mode, in which dropout is "
                "on. Call .eval() on both first."
            )
    is_student = is_trainable(model)
    group = ranks() if sharded_parameter(model) else ONE
    places = (group.size, group.rank)
    options = (steps, batch_size, travel, share, others, seed)
    # Training needs gradients, wherever it is called.
    grads = (torch.inference_mode(False), torch.enable_grad())
    with shown("distill", progress) as bar, grads[0], grads[1]:
        if batches is None:
            batches = _written(original, tokenizer, steps * batch_size, seed, progress)
        own = batches_of(original, batches, batch_size, places, "batches")
        if held_out is None:
            own, apart = hold_out(own)
        else:
            apart = batches_of(original, held_out, batch_size, places, "held_out")
        if not own.steps:
            raise CalibrationError(
                expected("batches", f"one for each of {group.size} processes", len(own))
            )
        own, apart = (each.to(device_of(model)) for each in (own, apart))
        # With the converted model, so that nothing is changed if the two do not fit.
        start = Evaluated(0, None, mean_divergence(model, original, apart))
        _require_finite(start.kl, model, original, "the held-out batches")
        call = (*options, own.items, apart.items)
        kept = None if resume is None else Kept.open(resume, group.rank, model, call)
        if not is_student:
            trainable(model, original, others=bool(others), share=share)
        run = Run(model, start, kept)
        try:
            optimizer = Optimizer(model, steps, travel, others)
            run.restore(optimizer)
            with _checkpointing(model):
                _train(model, original, own, apart, run, optimizer, seed, group, bar)
        finally:
            fill(model, run.best_state)
            result = _result(run, own, apart)
            if not is_student:
                freeze(model, **result.to_dict())
    return result


def _require_finite(kl: float, model: nn.Module, original: nn.Module, where: str) -> None:
    """Raise NonFiniteError for a KL that is NaN, and name a weight that is not finite."""
    if not math.isnan(kl):
        return
    for which, each in (("the original", original), ("the model", model)):
        for name, weight in each.named_parameters():
            if not weight.isfinite().all():
                raise NonFiniteError(
                    f"{name} of {which} holds NaN or infinity. Repair it before the call."
                )
    raise NonFiniteError(
        f"The KL of {where} is NaN: the original or the model returns NaN there, or no token is "
        "visible. Try both in float32, and look at attention_mask."
    )


def _written(original: nn.Module, tokenizer: Any, windows: int, seed: int, show: bool) -> Tensor:
    """Return windows that the original writes, at most as many as the steps read."""
    if tokenizer is None:
        raise OptionError(
            "batches: expected windows of token ids, or tokenizer= for the original to write "
            "text, got neither."
        )
    tokens = min(windows * 512, _SAMPLED)
    # One in twelve is held out.
    return sample(original, tokenizer, tokens=tokens + tokens // 11, seed=seed, progress=show)


def _train(
    student: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    held_out: Batches,
    run: Run,
    optimizer: Optimizer,
    seed: int,
    group: Ranks,
    bar: Any,
) -> None:
    """Take the steps that are left, and evaluate some of them."""
    steps = optimizer.steps
    marks = {math.ceil(steps * (i + 1) / _EVALUATIONS) for i in range(_EVALUATIONS)}
    losses: list[Tensor] = []
    began = time.perf_counter() - run.seconds
    bar.expect(steps, "steps", run.step)
    while run.step < steps:
        found, _ = divergence(student, teacher, batches.at(run.step, seed))
        _require_finite(found.item(), student, teacher, f"step {run.step + 1}")
        found.backward()
        optimizer.step(run.step)
        losses.append(found.detach())
        run.step += 1
        bar.step()
        if run.step not in marks:
            continue
        # The mean over processes is that over their tokens: all have the same number.
        each = group.gather(torch.stack(losses).mean().item())
        loss = sum(each) / len(each)
        losses.clear()
        run.add(Evaluated(run.step, loss, mean_divergence(student, teacher, held_out)))
        run.seconds = time.perf_counter() - began
        run.save(optimizer)
        bar.begin(f"KL {run.best.kl:.3g} of {run.start.kl:.3g}")


@contextlib.contextmanager
def _checkpointing(student: nn.Module) -> Iterator[None]:
    """Let modules that checkpoint activations do so, which those of transformers do in training."""
    chosen = [each for each in student.modules() if getattr(each, "gradient_checkpointing", False)]
    for each in chosen:
        # Not their children, whose dropout stays off.
        each.training = True
    try:
        yield
    finally:
        for each in chosen:
            each.training = False


def _result(run: Run, own: Batches, held_out: Batches) -> Distillation:
    return Distillation(
        history=tuple(run.history),
        best=run.best,
        codes_changed=changed_codes(run.student, run.first, run.best_state),
        tokens=run.step * own.tokens_of_a_step,
        distinct_tokens=own.tokens,
        held_out_tokens=held_out.tokens,
        seconds=round(run.seconds, 3),
    )
