"""Put plain adapters of PEFT on converted layers, once PEFT is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .._compat.peft_hooks import around_adapters
from ..experts import QUANTIZED


def register() -> None:
    """Have PEFT know converted layers; other models are left to it."""
    around_adapters(_around)


@contextmanager
def _around(tuner: Any, model: nn.Module, adapter: str) -> Iterator[None]:
    if any(isinstance(module, QUANTIZED) for module in model.modules()):
        # It imports PEFT, and refuses versions that were not tested.
        from .peft import fitted

        with fitted(tuner, model, adapter):
            yield
    else:
        yield
