"""Hidden states that wait for the next layer: in memory, or in files where that is short."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CalibrationError
from ..ops.registration import opaque

# Of all memory: so much is left for layers, and for others.
_LEFT = 1 / 4

_MEMORY = Path("/proc/meminfo")


@opaque
def waiting(state: Tensor, copy: bool = False) -> Tensor:
    """Return a hidden state on the CPU, in memory of its own if `copy`.

    Where less than a quarter of the memory would be left, it is in a file in the folder for
    temporary files, which goes with it. Raises CalibrationError if there is no room either.
    """
    if not state.numel() or _fits(state.nbytes):
        return state.detach().to("cpu", copy=copy)
    try:
        with tempfile.NamedTemporaryFile(prefix="fp4pass-") as file:
            # A disk that is full would end the process when the memory is written to.
            os.posix_fallocate(file.fileno(), 0, state.nbytes)
            stored = torch.from_file(file.name, shared=True, size=state.numel(), dtype=state.dtype)
    except OSError as error:
        raise CalibrationError(
            f"Hidden states fit neither in memory nor in {tempfile.gettempdir()}: {error}. Name "
            "another folder in TMPDIR, or calibrate on less text."
        ) from error
    return stored.view(state.shape).copy_(state.detach())


def _fits(size: int) -> bool:
    """Return whether memory has room for so many bytes; who does not say is taken to have it."""
    try:
        lines = _MEMORY.read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, rest in (x.split(":") for x in lines)}
        return 1024 * (kilobytes["MemAvailable"] - _LEFT * kilobytes["MemTotal"]) >= size
    except (OSError, LookupError, ValueError):
        return True
