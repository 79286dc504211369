"""Options of `refine`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import require_number, unknown_name

TOKEN_WEIGHTS = ("inverse", "none")


@dataclass(frozen=True)
class Refine:
    """Options of `refine`; docs/learning.md describes them.

    Attributes:
        steps: of each layer, one batch each.
        travel: how far a code can move in all steps together, in codes: the step sizes of Adam,
            which fall linearly to 0, add up to it. Half a code changes those that lie in the middle
            of their cell.
        share: how far weights begin on the way from their codes to the float weight, from 0 to 1.
        norm_lr: the first step size of norms and biases, in units of their root mean square; 0
            keeps them.
        scales: whether block scales of the float weights are searched again first, by the Hessians
            of the batches; they are taken where the layer comes nearer to the float model.
        token_weights: "inverse" weighs the error of each token by 1 / |t|^2 of its target t, so
            that all tokens count alike; "none" adds up squares.
        average: the share of the steps, the last ones, whose weights are averaged before they are
            rounded; 0 takes those of the last step.
        seed: of the order of the batches.

    Raises:
        OptionError: a value is out of range.

    Example:
        >>> fp4pass.Refine(steps=400).travel
        1.0
    """

    steps: int = 200
    travel: float = 1.0
    share: float = 0.5
    norm_lr: float = 1e-4
    scales: bool = True
    token_weights: str = "inverse"
    average: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0)):
            wanted = f"an integer from {least} on"
            value = getattr(self, name)
            require_number(f"Refine: {name}", wanted, value, least=least)
        for name, most in (
            ("travel", math.inf),
            ("norm_lr", math.inf),
            ("share", 1),
            ("average", 1),
        ):
            wanted = f"a number from 0 {'on' if most == math.inf else f'to {most}'}"
            require_number(f"Refine: {name}", wanted, getattr(self, name), float, 0, most)
        if self.token_weights not in TOKEN_WEIGHTS:
            raise unknown_name("Refine: token_weights", self.token_weights, TOKEN_WEIGHTS)

    @property
    def rates(self) -> tuple[float, ...]:
        """The step sizes of codes, as shares of their sum."""
        # Adam moves no number farther than its step size, for (1 - .9)^2 = 1 - .99.
        total = self.steps * (self.steps + 1)
        return tuple(2 * (self.steps - step) / total for step in range(self.steps))

    @property
    def averages_from(self) -> int:
        """The first step whose weights are averaged."""
        return min(self.steps - 1, self.steps - round(self.average * self.steps))
