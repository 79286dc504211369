"""Recipes with a name: how much work goes into the quality of a model, and how long it takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import LinearConfig
from ..errors import OptionError
from ..methods import Gptq, Sse, Stats, resolve_method
from .state import get_state, set_state

# The side of the sample of a weight that a method is timed on.
_SIDE = 512


@dataclass(frozen=True)
class Quality:
    """A recipe with a name.

    Attributes:
        options: those fields of `LinearConfig` that it decides.
        sequential: calibrate one layer after the other.
        passes: what calibration computes, in forwards of the linear layers.
    """

    options: Mapping[str, Any]
    sequential: bool
    passes: int

    def merged(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return given options with those of the recipe. Raises OptionError for both of one."""
        for key in self.options:
            if key in given:
                raise OptionError(
                    f"--quality {name} chooses --{key.replace('_', '-')} itself. Leave one of them "
                    "out."
                )
        return {**given, **self.options}

    def seconds(self, weights: int, tokens: int, config: LinearConfig, device: str) -> float:
        """Return about how long it takes, from a product and a search that are timed here.

        Args:
            weights: of all layers to quantize.
            tokens: to calibrate on.
            config: of the layers.
            device: where the work is done.
        """
        method, options = resolve_method(config.method)
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(_SIDE, _SIDE, generator=generator).to(device)
        hessian = sample.T @ sample
        blocks = torch.stack([hessian[i : i + 32, i : i + 32] for i in range(0, _SIDE, 32)])
        stats = Stats(tokens=_SIDE, hessian=hessian, block_hessian=blocks)
        scale = config.format.global_scale_for(float(sample.abs().max()))
        search = _timed(lambda: method.function(sample, stats, config.format, scale, options))
        product = _timed(lambda: sample @ sample)
        forwards = self.passes * tokens / _SIDE * product
        return weights / sample.numel() * (search + forwards)


QUALITIES = {
    "fast": Quality({"method": Sse()}, False, passes=1),
    "good": Quality({"method": Gptq()}, True, passes=3),
    "best": Quality(
        {"method": Gptq(target="cross", damping=0.5), "activation_scales": "sse"}, True, passes=8
    ),
}


def record_quality(model: nn.Module, name: str) -> None:
    """Have the recipe of a converted model say by which name it was chosen."""
    state = get_state(model)
    assert state is not None, "the model was converted"
    set_state(model, dataclasses.replace(state, recipe={**state.recipe, "quality": name}))


def _timed(work: Any) -> float:
    """Return the seconds of a call, the second of two."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found = time.perf_counter() - began
    return found
