"""Devices that a caller names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError, require_type

# Compute capability from which NVIDIA GPUs have tensor cores for FP4: Blackwell.
FP4_CAPABILITY = (10, 0)


def has_fp4_tensor_cores(index: int | None = None) -> bool:
    """Return whether a GPU has FP4 tensor cores; without an index, whether one of them has."""
    if torch.version.cuda is None:
        return False
    gpus = range(torch.cuda.device_count()) if index is None else (index,)
    return any(torch.cuda.get_device_capability(each) >= FP4_CAPABILITY for each in gpus)


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
