"""Measure a merge: KL of merged models from base + adapter, one batch after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.linear import QuantizedLinear
from ...quantization.adapters import silenced
from ...quantization.observers.batches import call_arguments, device_of
from ...record.config import LinearConfig
from ..learning.batches import logits_divergence, visible_logits

# Windows that are compared at once, whose logits are in memory twice.
_AT_ONCE = 2

# One of so many windows or batches is held out.
_HELD_OUT = 8


@dataclass(frozen=True, eq=False)
class Version:
    """The state of packed layers after a merge.

    Attributes:
        arounds: what PEFT has put around the merged layers, whose adapters are in their weights.
        buffers: the new buffers of layers.
        configs: their new configs.
        biases: their new biases, where these change.
    """

    arounds: Sequence[nn.Module] = ()
    buffers: Mapping[QuantizedLinear, Mapping[str, Tensor | None]] = field(default_factory=dict)
    configs: Mapping[QuantizedLinear, LinearConfig] = field(default_factory=dict)
    biases: Mapping[QuantizedLinear, Tensor] = field(default_factory=dict)

    def put(self) -> None:
        """Give the layers what they have after the merge."""
        for layer, tensors in self.buffers.items():
            layer._buffers.update(tensors)
        for layer, config in self.configs.items():
            layer.config = config
        for layer, bias in self.biases.items():
            old = layer.get_parameter("bias")
            layer.bias = nn.Parameter(bias.to(old.dtype), requires_grad=old.requires_grad)

    @contextmanager
    def applied(self, root: nn.Module) -> Iterator[None]:
        """Have a model compute as it does after the merge, and put back what it had."""
        before = [
            (each, dict(each._buffers), each.config, each._parameters.get("bias"))
            for each in {**self.buffers, **self.biases}
        ]
        with silenced(root, self.arounds):
            try:
                self.put()
                yield
            finally:
                for layer, buffers, config, bias in before:
                    layer._buffers.update(buffers)
                    layer.config = config
                    if layer in self.biases:
                        layer._parameters["bias"] = bias


@torch.no_grad()
def divergences(
    root: nn.Module, versions: Sequence[Version], batches: Sequence[Any]
) -> tuple[list[float] | None, int]:
    """Return the mean KL of each version of a model from the model as it is, and the tokens.

    None for a model without logits, or without a token that no mask hides.
    """
    totals, count = [0.0] * len(versions), 0
    for batch in batches:
        args, kwargs = call_arguments(batch, device_of(root))
        if not count and not hasattr(root(*args, **kwargs), "logits"):
            return None, 0
        expected = visible_logits(root, batch)
        tokens = expected.shape[:-1].numel()
        for i, version in enumerate(versions):
            with version.applied(root):
                found = float(logits_divergence(visible_logits(root, batch), expected))
            totals[i] += found * tokens if tokens else 0.0
        count += tokens
    if not count or not all(map(math.isfinite, totals)):
        return None, count
    return [total / count for total in totals], count


def split(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return batches to collect statistics on, and those that are held out: an eighth."""
    windows = _windows(batches)
    if windows is not None and len(windows) > 1:
        apart = torch.arange(len(windows)) % _HELD_OUT == min(_HELD_OUT, len(windows)) // 2
        size = max(len(each) for each in batches)
        return list(windows[~apart].split(size)), to_measure([windows[apart]])
    count = max(1, len(batches) // _HELD_OUT) if len(batches) > 1 else 0
    place = len(batches) - count
    return list(batches[:place]), list(batches[place:])


def to_measure(batches: Sequence[Any]) -> list[Any]:
    """Return batches with few windows each, where they are windows of tokens."""
    windows = _windows(batches)
    return list(batches) if windows is None else list(windows.split(_AT_ONCE))


def _windows(batches: Sequence[Any]) -> Tensor | None:
    """Return batches of windows of equal length as one tensor, None for others."""
    tensors = [each for each in batches if isinstance(each, Tensor) and each.ndim > 1]
    alike = len({each.shape[1:] for each in tensors}) == 1
    return torch.cat(tensors) if alike and len(tensors) == len(batches) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have all modules of a model in evaluation mode, and put their modes back."""
    with ExitStack() as stack:
        for module in model.modules():
            if module.training:
                stack.callback(setattr, module, "training", True)
        model.eval()
        yield
