"""What a process may still take: of the machine, of a container, and of what is around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp4pass.core import machine as limits
from fp4pass.core.machine import Memory, memory_limits

GB = 1 << 30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A machine of 1000 GB with 900 left, and no groups."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {1000 << 20} kB\nMemFree: 9 kB\nMemAvailable: {900 << 20} kB\nHugePages: 0\n"
    )
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "cgroup")
    return Memory(1000 * GB, 900 * GB)


def group(folder: Path, limit: int | str, used: int, files: int = 0) -> None:
    """What a kernel writes of a group, a fifth of whose copies of files are active."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    active = files // 5
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {files - active}\nactive_file {active}\n"
    )


def test_a_machine_without_groups(machine: Memory) -> None:
    assert memory_limits() == [machine]


def test_a_container(machine: Memory, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    # What a container sees as the root is its own group.
    group(tmp_path / "cgroup", 32 * GB, 20 * GB, files=5 * GB)
    assert memory_limits() == [machine, Memory(32 * GB, 17 * GB)]


def test_all_groups_around_one_count(machine: Memory, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user.slice/job/step\n")
    root = tmp_path / "cgroup"
    group(root / "user.slice" / "job" / "step", "max", GB)
    group(root / "user.slice" / "job", 16 * GB, 2 * GB)
    group(root / "user.slice", 64 * GB, 60 * GB)
    found = memory_limits()
    assert found == [machine, Memory(16 * GB, 14 * GB), Memory(64 * GB, 4 * GB)]


def test_a_machine_without_meminfo(tmp_path: Path) -> None:
    (tmp_path / "meminfo").unlink()
    assert memory_limits() == []
