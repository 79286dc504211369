"""The record of a merge: which layers changed, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Merged:
    """The record of a call of `fp4pass.merge`.

    KL is that of the next token from base + adapter, the mean over held-out tokens in nats; None
    where there were none, or for a model without logits.

    Attributes:
        model: the merged model, without PEFT's wrappers.
        adapters: the names of the adapters.
        layers: the method of each layer that was quantized again, by its name.
        rescaled: the factor of the global scale of each layer that shares a raised one: its own
            weight is as it was, and its block scales are divided by that.
        kept: the part of the change of the weights that is left after rounding: the product of what
            they moved by with B A, over the square of B A. It needs no data. The method of the base
            loses changes of less than half a step.
        tokens: that statistics were collected on.
        held_out_tokens: that the KL was measured on.
        kl_before: 0, the KL of the adapter beside the packed weights from itself.
        kl_after: that of the merged model.
        kl_naive: that of the same merge by rounding to nearest, the method "naive".
        kl_without: that of the packed layers without their adapters: what a merge that rounds the
            adapter away has.

    Example:
        >>> from fp4pass.lab.merging import Merged
        >>> Merged(model, ("default",), {"0": "sse"}).to_dict()["layers"]
        {'0': 'sse'}
    """

    model: nn.Module = field(compare=False, repr=False)
    adapters: tuple[str, ...]
    layers: Mapping[str, str]
    rescaled: Mapping[str, float] = field(default_factory=dict)
    kept: float = 1.0
    tokens: int = 0
    held_out_tokens: int = 0
    kl_before: float | None = None
    kl_after: float | None = None
    kl_naive: float | None = None
    kl_without: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as fp4pass.json has them in the list "merged"."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["model"]
        plain = {"adapters": list, "layers": dict, "rescaled": dict}
        return {name: plain.get(name, lambda x: x)(value) for name, value in found.items()}

    def __str__(self) -> str:
        counts = Counter(self.layers.values())
        methods = ", ".join(f'{count} by "{name}"' for name, count in counts.items())
        text = f"merged {', '.join(self.adapters)} into {len(self.layers)} layers ({methods})"
        if self.rescaled:
            text += f"; {len(self.rescaled)} more share a raised global scale"
        text += f"; {100 * self.kept:.0f} % of the change of the weights is left"
        if self.kl_after is None or self.kl_naive is None or self.kl_without is None:
            return f"{text}; the loss is not measured: give data= or held_out="
        return (
            f"{text}; KL to base + adapter on {self.held_out_tokens:,} held-out tokens: "
            f"{self.kl_before:g} before, {self.kl_after:.3g} after; {self.kl_naive:.3g} by "
            f"rounding to nearest, {self.kl_without:.3g} without the adapter"
        )
