"""Which implementation of an operator serves a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ..core.formats import Format

_log = logging.getLogger(__name__)


def launch(
    reference: Callable[..., Any], triton: str | None, record: object, args: list[Any]
) -> Any:
    """Run an operator on a GPU, under the device of its first argument."""
    device = args[0].device
    implementation = implementation_on(device, reference, triton, record)
    if device.index == torch.cuda.current_device():
        return implementation(*args)
    with torch.cuda.device(device):
        return implementation(*args)


@lru_cache(maxsize=256)
def implementation_on(
    device: torch.device, reference: Callable[..., Any], triton: str | None, record: object
) -> Callable[..., Any]:
    """Return the kernel of an operator, or its reference where the kernels cannot serve."""
    # A GPU that runs the reference of an operator with a kernel is logged, once for each operator,
    # device and format.
    if triton is None:
        return reference
    reason = unserved(device, record if isinstance(record, Format) else None)
    if reason is None:
        module, _, function = triton.partition(":")
        implementation: Callable[..., Any]
        implementation = getattr(import_module(f"..{module}", __package__), function)
        return implementation
    _log.warning("%s runs in plain PyTorch on %s: %s.", reference.__name__, device, reason)
    return reference


def unserved(device: torch.device, fmt: Format | None) -> str | None:
    """Return why the kernels cannot serve a GPU or a format, or None."""
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"expected compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    from ..kernels.common.tiles import supports

    if fmt is not None and not supports(fmt):
        return f"the kernels do not know {fmt.key}"
    return None
