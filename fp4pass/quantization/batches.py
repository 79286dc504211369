"""Batches as the arguments of a model's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, OptionError


def device_of(model: nn.Module) -> torch.device | None:
    """Where the weights of a model are, None for one without any that are loaded."""
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if t.device.type != "meta"), None)


def require_device(name: str, what: str) -> None:
    """Raise OptionError for a device that is not there; `what` says where it was named."""
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        raise OptionError(f"{what}{name} cannot be used: {problem}. Try cpu.") from error


def call_arguments(
    batch: Any, device: torch.device | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A calibration batch as the arguments of a call, its tensors moved to `device`."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and device is not None else value

    if isinstance(batch, Mapping):
        return (), {key: move(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(move(value) for value in batch), {}
    if isinstance(batch, Tensor):
        return (move(batch),), {}
    raise CalibrationError(
        f"A batch is a {type(batch).__name__}; a mapping, a tuple, a list or a tensor is wanted."
    )
