"""The record of a distillation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluated:
    """The student after so many steps.

    Attributes:
        step: how many it had taken.
        loss: KL(original || student) on the batches since the evaluation before, None at the start.
        kl: the same on the held-out batches.

    Example:
        >>> fp4pass.distill(model, original, windows, steps=2, progress=False).history[0].step
        0
    """

    step: int
    loss: float | None
    kl: float


@dataclass(frozen=True)
class Distillation:
    """The record of a call of `distill`.

    Attributes:
        history: the start and every evaluation.
        best: the one whose weights the model has.
        codes_changed: share of the codes of trained layers that differ from those of the start.
        tokens: that it was trained on, each as often as it was read.
        distinct_tokens: in the batches.
        held_out_tokens: that it was evaluated on.
        seconds: of training and evaluations, also those of calls before that it resumed.

    Example:
        >>> found = fp4pass.distill(model, original, windows, steps=2, progress=False)
        >>> found.to_dict()["tokens"]
        256
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
