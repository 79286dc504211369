"""distill: train the quantized weights of a model until it says what the original says."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..distributed import ONE, Ranks, ranks, sharded_parameter
from ..errors import CalibrationError, OptionError, StateError, expected, require_flags
from ..quantization.state import unwrap
from .batches import Batches, batches_of, divergence, hold_out, mean_divergence
from .optimizer import Optimizer
from .record import Distillation, Evaluated
from .resume import Kept, Progress
from .student import freeze, is_trainable, trainable

# Tokens that are read by default, or all of the text once if it is longer.
_TOKENS = 2_500_000

# Evaluations of a whole run, and how many may pass without a better one.
_EVALUATIONS, _PATIENCE = 12, 4


def distill(
    model: nn.Module,
    original: nn.Module,
    batches: Tensor | Sequence[Any],
    *,
    held_out: Tensor | Sequence[Any] | None = None,
    steps: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 8,
    others: bool = False,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Distillation:
    """Train the quantized weights of a converted model, in place, to say what the original says.

    The loss is KL(original || model) of the next token. Layers compute with rounded weights and
    inputs, as they will, and rounding counts as the identity in the backward. The weights of the
    evaluation that has the least KL on held-out batches are kept, those of the start if none has
    less. Activation checkpointing works as the model has it enabled.

    Args:
        model: converted or loaded, in eval mode; or what `fp4pass.distillation.trainable` returned,
            which may be sharded by fully_shard, and then stays trainable.
        original: the float model that was converted, in eval mode; it may be on another device.
        batches: windows of token ids [n, window], shuffled anew each time all were read; or a list
            of batches as `calibrate` takes them.
        held_out: as batches; by default every twelfth of these, which is not trained on.
        steps: of the optimizer; by default as many as read 2.5 million tokens, or all tokens once.
        lr: the learning rate of AdamW, as a part of the root mean square of each weight.
        batch_size: windows of a step.
        others: train norms, biases and embeddings too, unless the model is trainable already.
        seed: of the order of the batches.
        resume: a folder that keeps the training after each evaluation, so that the same call after
            an interruption goes on from there; delete it when the model is saved.
        progress: show a progress bar with the loss and the held-out KL.

    Returns:
        What was measured. It is in fp4pass.json too, under "distilled".

    Raises:
        StateError: the model is not converted or cannot be trained, one is in training mode, or
            `resume` is of another call.
        ShapeError: the original has other layers or another vocabulary.
        CalibrationError: there are no batches.
        OptionError: an argument is out of range.

    If the call is cut off, the model is converted and has the best weights so far.
    """
    require_flags(others=others, progress=progress)
    for each in (model, original):
        if unwrap(each).training:
            raise StateError(
                "Expected models in evaluation mode, got one in training mode, in which dropout is "
                "on. Call .eval() on both first."
            )
    is_student = is_trainable(model)
    group = ranks() if sharded_parameter(unwrap(model)) else ONE
    places = (group.size, group.rank)
    own = batches_of(batches, batch_size, places, "batches")
    if held_out is None:
        own, apart = hold_out(own)
    else:
        apart = batches_of(held_out, batch_size, places, "held_out")
    if not own.steps:
        raise CalibrationError(
            expected("batches", f"one for each of {group.size} processes", len(own))
        )
    steps = _steps(own) if steps is None else steps
    if type(steps) is not int or steps < 1:
        raise OptionError(expected("steps", "1, 2, ...", steps))
    if not (isinstance(lr, int | float) and 0 < lr < math.inf):
        raise OptionError(expected("lr", "a positive number", lr))
    # With the converted model, so that nothing is changed if the two do not fit.
    start = Evaluated(0, None, mean_divergence(model, original, apart))
    call = (steps, lr, batch_size, others, seed, own.items, apart.items)
    kept = None if resume is None else Kept.open(resume, group.rank, model, call)
    if not is_student:
        trainable(model, original, others=others)
    run = Progress(model, [start], kept)
    optimizer = Optimizer(model, lr, steps)
    run.restore(optimizer)
    try:
        with _checkpointing(unwrap(model)):
            _train(model, original, own, apart, run, optimizer, progress, seed, group)
    finally:
        run.keep_best()
        result = _result(run, own, apart)
        if not is_student:
            freeze(model, **result.to_dict())
    return result


def _steps(batches: Batches) -> int:
    """Return the steps that read `_TOKENS`, or all tokens once if these are more."""
    return max(batches.steps, math.ceil(_TOKENS / max(1, batches.tokens_of_a_step)))


def _train(
    student: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    held_out: Batches,
    run: Progress,
    optimizer: Optimizer,
    progress: bool,
    seed: int,
    group: Ranks,
) -> None:
    """Take the steps that are left, until the last one or until evaluations no longer improve."""
    steps = optimizer.steps
    marks = {math.ceil(steps * (i + 1) / _EVALUATIONS) for i in range(_EVALUATIONS)}
    losses: list[Tensor] = []
    began = time.perf_counter() - run.seconds
    bar = tqdm(total=steps, initial=run.step, desc="distill", unit="step", disable=not progress)
    with bar:
        while run.step < steps and not run.stopped:
            loss, _ = divergence(student, teacher, batches.at(run.step, seed))
            loss.backward()
            optimizer.step(run.step)
            losses.append(loss.detach())
            run.step += 1
            bar.update()
            if run.step in marks:
                # The mean over processes is that over their tokens, of which they have as many.
                each = group.gather(torch.stack(losses).mean().item())
                mean = sum(each) / len(each)
                losses.clear()
                kl = mean_divergence(student, teacher, held_out)
                run.seconds = time.perf_counter() - began
                run.add(Evaluated(run.step, mean, kl), _PATIENCE)
                run.save(optimizer)
                bar.set_postfix(
                    loss=f"{mean:.4f}", held_out=f"{kl:.4f}", start=f"{run.start.kl:.4f}"
                )


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


def _result(run: Progress, batches: Batches, held_out: Batches) -> Distillation:
    return Distillation(
        history=tuple(run.history),
        best=run.best,
        tokens=run.step * batches.tokens_of_a_step,
        distinct_tokens=batches.tokens,
        held_out_tokens=held_out.tokens,
        seconds=round(run.seconds, 3),
        stopped=run.stopped,
    )
