"""Layers whose inputs are not of the tokens that a mask hides: what they saw counts whole."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor, nn

from ..graph.rewrite import OBSERVERS

# Layers that are named in a warning.
_NAMED = 3


def unmapped_layers(root: nn.Module) -> dict[str, Tensor]:
    """Return the layers that saw what a mask could not be mapped to, each once, and that mask."""
    found = {}
    for name, module in root.named_modules():
        for observer in module.__dict__.get(OBSERVERS, ()):
            if observer.unmapped is not None and not observer.is_unmapped_said:
                found[name], observer.is_unmapped_said = observer.unmapped, True
    return found


def warn_of_unmapped(layers: Mapping[str, Tensor], stacklevel: int) -> None:
    """Warn of layers of these names, if there are any."""
    if not layers:
        return
    names = list(layers)
    named = ", ".join(name or "the model" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more layers" if len(names) > _NAMED else ""
    share = max(1 - float(mask.float().mean()) for mask in layers.values())
    warnings.warn(
        f"attention_mask hides {100 * share:.1f} % of the tokens of a batch, but the inputs of "
        f"{named}{more} are not of its [batch, tokens]: all of them entered the statistics. If "
        "padding is among them, calibrate on sequences of full length.",
        stacklevel=stacklevel + 1,
    )
