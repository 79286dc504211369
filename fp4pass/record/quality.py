"""Recipes by name: what "fast", "good" and "best" stand for. Nothing else knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import unknown_name
from ..methods import Gptq, Hessian, Sse

# The key of fp4pass.json, and the keyword of `convert`.
QUALITY = "quality"
QualityName = Literal["fast", "good", "best"]

# Tokens that a model writes to calibrate the scales of its inputs alone, for the largest value.
INPUT_TOKENS = 1 << 12


@dataclass(frozen=True)
class Quality:
    """A recipe with a name.

    Attributes:
        options: the fields of `LinearConfig` that it decides.
        input_options: those that it decides where inputs are quantized.
        alone: in place of `options`, for layers that cannot be calibrated one after the other:
            stacks of experts, and layers outside of the model's stacks.
        sequential: calibrate one layer at a time.
        smoothing: the strength of `fp4pass.smooth` where inputs are quantized; 0 for none.
        tokens: how many a model writes itself where there is no data; 0 if the method needs none.
    """

    options: Mapping[str, Any]
    input_options: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    sequential: bool = False
    smoothing: float = 0.0
    tokens: int = 0

    @property
    def decides(self) -> tuple[str, ...]:
        """The fields of `LinearConfig` that nobody else may give."""
        return tuple({**self.options, **self.input_options})

    def options_for(self, weight_only: bool) -> dict[str, Any]:
        """Return the fields that it decides, for layers whose inputs are quantized or are not."""
        return {**self.options, **({} if weight_only else self.input_options)}


# As measured: docs/quality.md.
QUALITIES: dict[str, Quality] = {
    "fast": Quality({"method": Sse()}),
    "good": Quality({"method": Hessian()}, smoothing=0.5, tokens=1 << 15),
    "best": Quality(
        {"method": Gptq(target="cross")},
        # Part of the input error is the rounding of the layer's own inputs. A target that corrects
        # it too shrinks the weights.
        input_options={
            "method": Gptq(target="cross", target_damping=2.0),
            "activation_scales": "sse",
        },
        alone={"method": Gptq()},
        sequential=True,
        smoothing=0.5,
        tokens=1 << 15,
    ),
}


def get_quality(name: str) -> Quality:
    """Return the recipe of a name. Raises OptionError for any other."""
    if name not in QUALITIES:
        raise unknown_name("Quality", name, QUALITIES)
    return QUALITIES[name]
