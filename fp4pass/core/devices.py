"""Devices that a caller names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError, require_type


def require_device(name: torch.device | str, what: str) -> None:
    """Raise OptionError for a device that is not there; `what` says where it was named."""
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        problem = str(error).splitlines()[0]
        raise OptionError(f"{what}{name} cannot be used: {problem}. Try cpu.") from error


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. Raises OptionError if that is not there."""
    require_type("device", "a device such as 'cuda:0'", device, torch.device, str, int)
    try:
        return tensor.to(device=device)
    except (RuntimeError, AssertionError, TypeError):
        require_device(device, "device=")
        raise
