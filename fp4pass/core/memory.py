"""The memory that a process may still take: of the machine, and of its control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")

# The groups of this process, and where what they may take is written.
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

# By the version of cgroups: the folder, the files of the limit and of what is taken, and the lines
# of memory.stat that count copies of files, which make room by themselves.
_V1 = (
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = ("", "memory.max", "memory.current", ("inactive_file", "active_file"))


class Memory(NamedTuple):
    """Bytes that there are, and that are still to be had."""

    total: int
    available: int


def memory_limits() -> list[Memory]:
    """Return all limits on what this process may take: each of them holds.

    They are the machine's and those of the cgroup that it is in, as in a container, and of all
    groups around it. A system with neither /proc/meminfo nor os.sysconf (Windows) has none.
    """
    found = [_of_machine(), *_of_groups()]
    return [each for each in found if each is not None]


def _of_machine() -> Memory | None:
    try:
        kilobytes = _numbers(_MEMINFO)
        return Memory(1024 * kilobytes["MemTotal:"], 1024 * kilobytes["MemAvailable:"])
    except (OSError, LookupError, ValueError):
        pass
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    if "SC_AVPHYS_PAGES" in names:
        return Memory(total, page * os.sysconf("SC_AVPHYS_PAGES"))
    # macOS does not say what is free: all but the most that this process had.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Memory(total, total - peak * (1 if sys.platform == "darwin" else 1024))


def _of_groups() -> Iterator[Memory]:
    """Yield the limits of the groups of this process, and of those around them."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        root = _GROUPS / version[0]
        own = root / path.strip("/")
        # In a container the path may be that of the host, and only its end exists.
        for folder in (own, *own.parents):
            if (found := _of_group(folder, *version[1:])) is not None:
                yield found
            if folder == root:
                break


def _of_group(folder: Path, limit: str, taken: str, files: tuple[str, ...]) -> Memory | None:
    """Return the limit of a group, None without one."""
    try:
        total = int((folder / limit).read_text())
        stat = _numbers(folder / "memory.stat")
        used = int((folder / taken).read_text()) - sum(stat.get(name, 0) for name in files)
    except (OSError, ValueError):
        # The root has none, and "max" is none.
        return None
    return Memory(total, total - used)


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file by its first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
