"""--quality of quantize: the recipe of a name, and a line on how long it takes."""

from __future__ import annotations

import math

from torch import nn

from ..errors import OptionError
from ..quantization.plan import plan_layers
from ..quantization.quality import QUALITIES
from ..quantization.recipe import Recipe
from . import screen


def require_possible(
    name: str, calib: str | None, rules: object, stream: bool, device: str
) -> None:
    """Refuse what the recipe of a name cannot do, or what is a recipe beside it."""
    for flag, used in (("--rules", rules is not None), ("--stream", stream)):
        if used:
            raise OptionError(
                f"--quality {name} is a recipe itself. Leave out {flag} or --quality."
            )
    if not QUALITIES[name].sequential:
        return
    if calib is None:
        raise OptionError(
            f"--quality {name} needs text to calibrate on. Give --calib FILE, or choose --quality "
            "fast."
        )
    if device == "auto":
        raise OptionError(
            f"--quality {name} runs one layer after the other on one device. Give its name to "
            "--device, not auto, or choose --quality fast."
        )


def say(name: str, model: nn.Module, recipe: Recipe, tokens: int, device: str) -> None:
    """Print a line on what a recipe does, and how long that takes here."""
    layers = plan_layers(model, recipe.config, recipe.rules).layers
    weights = sum({layer.weight_key: math.prod(layer.shape) for layer in layers}.values())
    seconds = QUALITIES[name].seconds(weights, tokens, recipe.config, device)
    screen.note(
        f"quality {name}: {recipe.config.method_name}, {weights:,} weights, {tokens:,} tokens; "
        f"about {_duration(seconds)} by a sample"
    )


def _duration(seconds: float) -> str:
    """Return seconds with one digit, for more would be a promise."""
    unit, size = ("hours", 3600) if seconds > 5400 else ("minutes", 60)
    if seconds < 90:
        unit, size = "seconds", 1
    return f"{float(f'{max(seconds, 1) / size:.1g}'):g} {unit}"
