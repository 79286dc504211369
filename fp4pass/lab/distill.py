"""distill: train the codes of a quantized model to predict what the original predicts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.progress import current, shown
from ..errors import CalibrationError, NonFiniteError, require_number
from ..evaluation import require_evaluating
from ..record import unwrap
from . import divergence as kls
from .latent import freeze, last_latent, latents_of, rounded, trainable

# Evaluations of a whole run; one window in so many is held out, and so many at most.
_EVALUATIONS, _HELD_OUT, _MOST_HELD_OUT = 8, 12, 64

# Windows that the original writes at most.
_WRITTEN = 1 << 13

# For runs of some hundred steps; gradients of single codes of a large model are far below the usual
# 1e-8.
_ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}


@dataclass(frozen=True)
class Evaluated:
    """The student after so many steps."""

    step: int
    loss: float | None  # KL(original || student) on the batches since the evaluation before
    kl: float  # the same on the held-out batches


@dataclass(frozen=True)
class Distillation:
    """The record of a call of `distill`.

    Attributes:
        history: the start and every evaluation: `step`, `loss` on the batches since the one before,
            None at the start, and `kl` on the held-out batches.
        best: the one whose weights the model has.
        codes_changed: share of the codes of trained layers that differ from those of the start.
        tokens: that it was trained on, each as often as it was read.
        distinct_tokens: in the batches.
        held_out_tokens: that it was evaluated on.
        seconds: of training and evaluations.

    Example:
        >>> found = fp4pass.distill(model, original, windows, steps=2, progress=False)
        >>> found.to_dict()["tokens"]
        704
    """

    history: tuple[Evaluated, ...]
    best: Evaluated
    codes_changed: float
    tokens: int
    distinct_tokens: int
    held_out_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as fp4pass.json has them under "distilled"."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        start, last = self.history[0], self.history[-1]
        if self.best == start:
            kept = f"no step was better than the start, {start.kl:.5f}, which is kept"
        else:
            kept = f"{start.kl:.5f} -> {self.best.kl:.5f} at step {self.best.step}, which is kept"
        return (
            f"KL on {self.held_out_tokens} held-out tokens: {kept}; "
            f"{100 * self.codes_changed:.2f} % of the codes changed; "
            f"{last.step} steps, {self.tokens} tokens, {self.seconds:.0f} s"
        )


def distill(
    model: nn.Module,
    original: nn.Module,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    held_out: Any = None,
    steps: int = 256,
    batch_size: int = 32,
    rate: float = 0.01,
    others: float = 1e-4,
    seed: int = 0,
    progress: bool = True,
) -> Distillation:
    """Train the codes of a converted model, in place, to predict what the original predicts.

    The loss is KL(original || model) of the next token. Layers compute with rounded weights and
    inputs, as they will, and rounding counts as the identity in the backward. The state that has
    the least KL on held-out batches is kept, and that of the start, bit by bit, if none has less.
    Activation checkpointing works as the model has it enabled.

    Args:
        model: converted or loaded, in eval mode.
        original: the float model that was converted, in eval mode; it may be on another device.
        batches: data as for `calibrate`: text, token windows [n, window], or batches; shuffled anew
            each time all were read. By default up to 8192 windows of `calibration.mixture`.
        tokenizer: of the original, for text.
        held_out: as batches; by default one in twelve of these, at most 64, which are not trained
            on.
        steps: of AdamW.
        batch_size: windows of a step.
        rate: the peak rate of latent weights, in units of their block's step, from which it falls
            to 0. At 0.02 so many codes change at once that a model is ruined.
        others: that of parameters in floating point that require gradients, as a part of their root
            mean square; 0 leaves them.
        seed: of the order of the batches, and of text that the original writes.
        progress: as for `convert`.

    Returns:
        The record, which fp4pass.json has too, under "distilled". A call that is cut off leaves the
        model converted, with the best state so far.

    Raises:
        StateError: the model is not converted or cannot be trained, or one is in training mode.
        ShapeError: the original has other layers or another vocabulary.
        CalibrationError: there are too few batches.
        OptionError: an argument is out of range, or the original cannot write text.

    Example:
        >>> found = fp4pass.distill(model, original, windows, steps=4, progress=False)
        >>> found.best.kl <= found.history[0].kl
        True
    """
    for name, count in (("steps", steps), ("batch_size", batch_size)):
        require_number(name, "1, 2, ...", count, least=1)
    for name, peak in (("rate", rate), ("others", others)):
        require_number(name, "a number that is not negative", peak, float, 0)
    model, original = unwrap(model), unwrap(original)
    require_evaluating(model, original)
    # Training needs gradients, wherever it is called.
    with shown("distill", progress), torch.inference_mode(False), torch.enable_grad():
        own, apart = _read(original, batches, held_out, tokenizer, steps * batch_size, seed)
        # With the converted model, so that nothing is changed if the two do not fit.
        history = [Evaluated(0, None, _held_out_kl(model, original, apart))]
        trainable(model, original, others=bool(others))
        training = Training(model, rate, others)
        first = best = training.numbers()
        losses: list[Tensor] = []
        marks = {math.ceil(steps * (i + 1) / _EVALUATIONS) for i in range(_EVALUATIONS)}
        began, step = time.perf_counter(), 0
        try:
            with _checkpointing(model):
                done = training.train(original, draw(own, batch_size, seed), steps)
                for step, loss in enumerate(current().each(done, "steps", steps), 1):
                    losses.append(loss)
                    if step not in marks:
                        continue
                    kl = _held_out_kl(model, original, apart)
                    if kl < min(each.kl for each in history):
                        best = training.numbers()
                    history.append(Evaluated(step, torch.stack(losses).mean().item(), kl))
                    losses.clear()
        finally:
            training.restore(best)
            found = Distillation(
                history=tuple(history),
                best=min(history, key=lambda each: each.kl),
                codes_changed=training.changed(first),
                tokens=training.tokens,
                distinct_tokens=kls.token_count(own),
                held_out_tokens=kls.token_count(apart),
                seconds=round(time.perf_counter() - began, 3),
            )
            freeze(model, **found.to_dict())
    return found


def schedule(step: int, steps: int) -> float:
    """Return the part of the peak rate that a step has: a short warmup, then half a cosine."""
    warmup = max(1, round(0.05 * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def draw(windows: Sequence[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Yield the windows of each step, without end; each epoch has its own order."""
    order: list[int] = []
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(len(windows), generator=generator).tolist()
        while len(order) >= min(size, len(windows)):
            chosen, order = order[:size], order[size:]
            yield [windows[i] for i in chosen]


class Training:
    """AdamW on the float32 numbers of a student: latents, and copies of other parameters.

    A copy is in units of the root mean square of what it is a copy of, to a power of two, so one
    rate is for all of them; the student has it rounded to its dtype.

    Attributes:
        adam: takes the steps.
        latents: each once, with the element whose values it rounds to.
        tokens: that it has read.
    """

    def __init__(self, student: nn.Module, rate: float, others: float = 0.0, **adam: Any) -> None:
        """Begin.

        Args:
            student: as `trainable` returns it.
            rate: the peak rate of latents, in units of the steps of their blocks.
            others: that of other parameters, as a part of their root mean square; 0 leaves them.
            **adam: options of AdamW.
        """
        self.student, self.tokens = student, 0
        found = latents_of(student).values()
        self.latents = {each.latent: each.packed.config.format.element for each in found}
        self._copies: list[tuple[Tensor, Tensor, Tensor]] = []
        for each in student.parameters() if others else ():
            size = each.detach().float().square().mean().sqrt().log2().round().exp2()
            if each.requires_grad and each not in self.latents and size:
                self._copies.append((each, nn.Parameter(each.detach().float() / size), size))
        copies = [copy for _, copy, _ in self._copies]
        groups = [{"params": [*self.latents], "lr": rate}, {"params": copies, "lr": others}]
        is_on_gpu = all(each.is_cuda for each in self.latents)
        options: dict[str, Any] = {**_ADAM, "fused": is_on_gpu, **adam}
        self.adam = torch.optim.AdamW([each for each in groups if each["params"]], **options)
        # Windows that run at once: on a GPU all of a step, as far as there is memory.
        self._most, self._room = kls.TOGETHER, dict[str, int]()
        if is_on_gpu:
            self._most = 1 << 30
            device = next(iter(self.latents)).device
            self._room["largest"] = torch.cuda.mem_get_info(device)[0] // 16

    def train(
        self,
        teacher: nn.Module,
        batches: Iterator[list[Any]],
        steps: int,
        factor: Callable[[int, int], float] = schedule,
    ) -> Iterator[Tensor]:
        """Take the steps, and yield the loss after each.

        Args:
            teacher: predicts what the student learns.
            batches: the windows of each step.
            steps: how many.
            factor: the part of the peak rate that a step has.
        """
        peaks = [group["lr"] for group in self.adam.param_groups]
        for step in range(steps):
            loss = self._gradients(teacher, next(batches))
            if not loss.isfinite():
                raise NonFiniteError(f"The KL of step {step + 1} is NaN or infinite. {kls.NAN}")
            for group, peak in zip(self.adam.param_groups, peaks, strict=True):
                group["lr"] = peak * factor(step, steps)
            self._step()
            yield loss

    def _gradients(self, teacher: nn.Module, windows: list[Any]) -> Tensor:
        """Compute the gradients of the loss of a step, and return it."""
        parts = kls.together(self.student, windows, self._most, **self._room)
        loss, counts = torch.zeros(()), [kls.token_count([part]) for part in parts]
        try:
            for part, count in zip(parts, counts, strict=True):
                with torch.no_grad():
                    others, _ = kls.logits_of(teacher, part)
                own, visible = kls.logits_of(self.student, part)
                if visible is not None:
                    own, others = own[visible], others[visible.to(others.device)]
                found = kls.kl_loss(own, others) * (count / sum(counts))
                found.backward()
                loss = loss + found.detach().cpu()
        except torch.OutOfMemoryError:
            self.adam.zero_grad()
            self.student.zero_grad()
            most = min(self._most, len(windows))
            if most == 1:
                raise
        else:
            self.tokens += sum(counts)
            return loss
        # Outside of the handler, which holds what the failed call made.
        self._most = most // 2
        return self._gradients(teacher, windows)

    @torch.no_grad()
    def _step(self) -> None:
        for own, copy, size in self._copies:
            copy.grad = None if own.grad is None else own.grad.float() * size
            own.grad = None
        self.adam.step()
        self.adam.zero_grad()
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        """Have the student compute with the numbers."""
        for latent, element in self.latents.items():
            latent.clamp_(-last_latent(element), last_latent(element))
        for own, copy, size in self._copies:
            own.copy_(copy * size)

    def numbers(self) -> list[Tensor]:
        """Return copies of all that is trained, on the CPU."""
        groups = self.adam.param_groups
        return [each.detach().to("cpu", copy=True) for group in groups for each in group["params"]]

    @torch.no_grad()
    def restore(self, numbers: Sequence[Tensor]) -> None:
        """Go back to some numbers."""
        own = [each for group in self.adam.param_groups for each in group["params"]]
        for each, number in zip(own, numbers, strict=True):
            each.copy_(number)
        self._show()

    @torch.no_grad()
    def changed(self, first: Sequence[Tensor]) -> float:
        """Return the share of codes that are not those of other numbers."""
        differ = sum(
            int((rounded(latent, element) != rounded(old.to(latent.device), element)).sum())
            for (latent, element), old in zip(self.latents.items(), first, strict=False)
        )
        return differ / max(1, sum(latent.numel() for latent in self.latents))


def _read(
    original: nn.Module, batches: Any, held_out: Any, tokenizer: Any, windows: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Return the windows to train on, and batches to evaluate on."""
    written = min(windows, _WRITTEN)
    samples = written + min(written // (_HELD_OUT - 1) + 1, _MOST_HELD_OUT)
    own = kls.read_windows(original, batches, tokenizer, samples, seed=seed)
    if held_out is not None:
        apart = kls.read_windows(original, held_out, tokenizer, samples, seed=seed)
    else:
        count = min(max(1, len(own) // _HELD_OUT), _MOST_HELD_OUT) if len(own) > 1 else 0
        apart, own = kls.divided(own, count)
    if not own or not apart:
        raise CalibrationError(
            "batches, held_out: expected at least one window in each, got none. Without held_out "
            "give at least 2 windows or batches, one of them to hold out."
        )
    return own, kls.together(original, apart)


def _held_out_kl(model: nn.Module, original: nn.Module, batches: Sequence[Any]) -> float:
    return kls.mean_kl(kls.compare(model, kls.predicted(original, batches)))


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
