"""Give the GPUs of a mesh memory that all of them reach, for reductions in one launch."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._compat.torch import shared_words
from ..distributed import Ranks
from ..kernels.norm.naive import SQUARES
from ..kernels.reduce.naive import MEMORIES, Memory, count_of_words

_log = logging.getLogger(__name__)


def reach_peers(mesh: DeviceMesh) -> bool:
    """Prepare reductions over a mesh of one dimension; return whether its GPUs reach each other.

    Every process makes the call. Without such memory reductions go through NCCL, and a log says so.
    """
    group = mesh.get_group()
    name = group.group_name
    known = MEMORIES.get(name)
    if known is not None and known.group is group:
        return True
    if mesh.device_type != "cuda" or mesh.size() == 1:
        return False
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), group)
    problem = _first(ranks.gather(_far_peer(ranks)))
    if problem is None:
        memory, error = _memory(ranks)
        problem = _first(ranks.gather(error))
    if problem is None and memory is not None:
        MEMORIES[name] = memory
        return True
    if ranks.rank == 0:
        _log.info("Reductions of a few rows go through NCCL: %s.", problem)
    return False


def _first(problems: list[str | None]) -> str | None:
    return next((each for each in problems if each is not None), None)


def _far_peer(ranks: Ranks) -> str | None:
    """Return why this GPU does not reach that of another process, as far as that is known."""
    own = torch.cuda.current_device()
    seen = (socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for rank, (place, device) in enumerate(ranks.gather((seen, own))):
        if place != seen:
            return f"rank {rank} is on another host, or sees other GPUs"
        if device != own and not torch.cuda.can_device_access_peer(own, device):
            return f"GPU {own} does not reach the memory of GPU {device}"
    return None


def _memory(ranks: Ranks) -> tuple[Memory | None, str | None]:
    """Return the memory of all processes, or why there is none."""
    try:
        words, addresses = shared_words(count_of_words(ranks.size), ranks.group)
    except RuntimeError as error:
        return None, str(error).strip().partition("\n")[0]
    words.zero_()
    found = Memory.of(words, addresses, ranks.rank, ranks.group)
    # All is zero, and the kernel is loaded, before the first process sends anything.
    _loaded(found)
    torch.cuda.synchronize()
    return found, None


def _loaded(memory: Memory) -> Any:
    from ..kernels.reduce.triton import all_reduce_add_triton, all_reduce_triton

    nothing = memory.words.new_empty((0, SQUARES), dtype=torch.bfloat16)
    for maximum in (False, True):
        all_reduce_triton(nothing, memory, maximum)
    all_reduce_add_triton(nothing, nothing, memory)
