"""The processes that torchrun starts of a command."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from ..distributed import Ranks, ranks


def join() -> Ranks:
    """Join the processes that torchrun started, each on a GPU of its own, if it did."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not dist.is_initialized():
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    return ranks()
