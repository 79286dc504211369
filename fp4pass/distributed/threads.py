"""The threads of a process that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def share_of_threads() -> Iterator[None]:
    """Compute with this process's share of the processors where torchrun left it one thread.

    torchrun sets OMP_NUM_THREADS to 1 unless the caller sets it, and a caller's 1 looks the same. A
    layer of a large model then takes many times longer on a CPU. Elsewhere nothing changes.
    """
    before, share = torch.get_num_threads(), _share()
    torch.set_num_threads(max(before, share))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _share() -> int:
    """Return the processors for each process of this host, 1 where torchrun chose no number."""
    is_chosen = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if not is_chosen:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return int(count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
