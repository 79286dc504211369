"""Hidden states that wait for the next layer: in memory, or in files where that is short."""

from __future__ import annotations

import os
import tempfile
from typing import IO

import torch
from torch import Tensor

from ..core.memory import memory_limits
from ..errors import CalibrationError
from ..ops.registration import opaque

# Of all memory: so much is left for layers, and for others.
_LEFT = 1 / 4

# Bytes of zeros that are written at a time.
_WRITTEN = 1 << 24


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
            _make_room(file, state.nbytes)
            stored = torch.from_file(file.name, shared=True, size=state.numel(), dtype=state.dtype)
    except OSError as error:
        raise CalibrationError(
            f"Hidden states fit neither in memory nor in {tempfile.gettempdir()}: {error}. Name "
            "another folder in TMPDIR, or calibrate on less text."
        ) from error
    return stored.view(state.shape).copy_(state.detach())


def _fits(size: int) -> bool:
    """Return whether memory has room for so many bytes, of the machine and of each group."""
    return all(each.available - _LEFT * each.total >= size for each in memory_limits())


def _make_room(file: IO[bytes], size: int) -> None:
    """Have a file take its room on the disk, which is an error where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    # Not there on macOS; only what is written takes room.
    zeros = bytes(min(size, _WRITTEN))
    for start in range(0, size, _WRITTEN):
        file.write(zeros[: size - start])
    file.flush()
