"""Processes that run what a script defines, and what each found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def start(script: Path, name: str, folder: Path, size: int = 2) -> list[Any]:
    """The processes of a scenario."""
    found = []
    # What tests share is found there, too.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for rank in range(size):
        env = os.environ | shared | {"RANK": str(rank), "WORLD_SIZE": str(size)}
        command = [sys.executable, str(script), name, str(folder)]
        found.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return found


def run(script: Path, name: str, folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What each process of a scenario found."""
    processes = start(script, name, folder, size)
    texts = [each.communicate(timeout=300)[0] for each in processes]
    files = [folder / f"{name}-{rank}.pt" for rank in range(size)]
    assert all(file.exists() for file in files), "\n".join(texts)
    return [torch.load(file, weights_only=False) for file in files]
