"""The machine: devices that a caller names, copies beside kernels, and memory that is left."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError

# Compute capability from which NVIDIA GPUs have tensor cores for FP4: Blackwell.
FP4_CAPABILITY = (10, 0)

_MEMINFO = Path("/proc/meminfo")

# The control groups of this process (cgroup v2), and where what they may take is written.
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


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
        # It lists every type of device that torch was ever built for.
        problem = "there is none" if problem.startswith("Expected one of") else problem
        raise OptionError(f"{what}{name} cannot be used: {problem}. Try cpu.") from error


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. Raises OptionError if that is not there."""
    try:
        return tensor.to(device=device)
    except (RuntimeError, AssertionError, TypeError):
        require_device(device, "device=")
        raise


class Memory(NamedTuple):
    """Bytes that there are, and that are still to be had."""

    total: int
    available: int


def memory_limits() -> list[Memory]:
    """Return all limits on what this process may take: the machine's and its control groups'."""
    found = []
    if _MEMINFO.is_file():
        kilobytes = _numbers(_MEMINFO)
        found.append(Memory(1024 * kilobytes["MemTotal:"], 1024 * kilobytes["MemAvailable:"]))
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.is_file() else []
    for line in (each for each in lines if each.startswith("0::")):
        own = _GROUPS / line.removeprefix("0::").strip("/")
        # In a container the path may be that of the host, and only its end exists.
        for folder in (own, *own.parents):
            try:
                total = int((folder / "memory.max").read_text())
                stat = _numbers(folder / "memory.stat")
                used = int((folder / "memory.current").read_text())
            except (OSError, ValueError):
                # The root has no limit, and "max" is none.
                continue
            # Copies of files make room by themselves.
            files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            found.append(Memory(total, total - used + files))
    return found


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file by its first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
