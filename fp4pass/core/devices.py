"""Devices that a caller names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError

# Compute capability from which NVIDIA GPUs have tensor cores for FP4: Blackwell.
FP4_CAPABILITY = (10, 0)

# Bytes of pinned memory of a copy, without which it does not overlap kernels.
_STAGED = 1 << 26


def has_fp4_tensor_cores(index: int | None = None) -> bool:
    """Return whether a GPU has FP4 tensor cores; without an index, whether one of them has."""
    if torch.version.cuda is None:
        return False
    gpus = range(torch.cuda.device_count()) if index is None else (index,)
    return any(torch.cuda.get_device_capability(each) >= FP4_CAPABILITY for each in gpus)


def require_device(name: torch.device | str, what: str) -> None:
    """Raise OptionError for a device that is not there; `what` says where it was named."""
    try:
        torch.device(name)
    except (RuntimeError, TypeError) as error:
        # It lists every type of device that torch was ever built for.
        raise OptionError(
            f"{what}{name} cannot be used: there is none. Try cuda or cpu."
        ) from error
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        problem = str(error).splitlines()[0]
        raise OptionError(f"{what}{name} cannot be used: {problem}. Try cpu.") from error


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. Raises OptionError if that is not there."""
    try:
        return tensor.to(device=device)
    except (RuntimeError, AssertionError, TypeError):
        require_device(device, "device=")
        raise


def copy_async(source: Tensor, target: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
    """Copy a tensor to or from a GPU beside its kernels, once an event is over.

    Returns the event of the end. The thread that calls it waits for the copy, so call it in one
    beside that which computes.
    """
    gpu = source.device if source.is_cuda else target.device
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream), torch.no_grad():
        stream.wait_event(after)
        if source.is_contiguous() and target.is_contiguous() and source.numel():
            _copy_staged(source, target, stream)
        else:
            target.copy_(source)
        return stream.record_event()


def _copy_staged(source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> None:
    staged = torch.empty(min(source.nbytes, _STAGED), dtype=torch.uint8, pin_memory=True)
    parts = (x.detach().reshape(-1).view(torch.uint8).split(len(staged)) for x in (source, target))
    for part, there in zip(*parts, strict=True):
        between = staged[: len(part)]
        between.copy_(part, non_blocking=True)
        if part.is_cuda:
            stream.synchronize()
        there.copy_(between, non_blocking=True)
        stream.synchronize()
