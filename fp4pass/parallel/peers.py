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

_log = logging.getLogger(__name__)


def reach_peers(mesh: DeviceMesh) -> bool:
    """Prepare reductions over a mesh of one dimension; return whether its GPUs reach each other.

    Every process makes the call. Without such memory reductions go through NCCL, and a log says so.
    """
    group = mesh.get_group()
    name = group.group_name
    if mesh.device_type != "cuda" or mesh.size() == 1:
        return False
    # Triton is imported where there is a GPU.
    from ..kernels.reduce.triton import MEMORIES

    known = MEMORIES.get(name)
    if known is not None and known.group is group:
        return True
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), group)
    memory: Any = None
    problems = ranks.gather(_far_peer(ranks))
    if not any(problems):
        problem = ""
        try:
            memory = _memory(ranks)
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        problems = ranks.gather(problem)
    if not any(problems) and memory is not None:
        MEMORIES[name] = memory
        return True
    if ranks.rank == 0:
        problem = next(filter(None, problems))
        _log.info("Reductions of a few rows go through NCCL: %s.", problem)
    return False


def _far_peer(ranks: Ranks) -> str:
    """Return why this GPU does not reach that of another process, "" if that is not known."""
    own = torch.cuda.current_device()
    seen = (socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for rank, (place, device) in enumerate(ranks.gather((seen, own))):
        if place != seen:
            return f"rank {rank} is on another host, or sees other GPUs"
        if device != own and not torch.cuda.can_device_access_peer(own, device):
            return f"GPU {own} does not reach the memory of GPU {device}"
    return ""


def _memory(ranks: Ranks) -> Any:
    """Return the memory of all processes. Raises RuntimeError where there is none."""
    from ..kernels.reduce.triton import Memory, count_of_words, reduce

    words, addresses = shared_words(count_of_words(ranks.size), ranks.group)
    words.zero_()
    found = Memory.of(words, addresses, ranks.rank, ranks.group)
    # All is zero, and the kernel is loaded, before the first process sends anything.
    nothing = words.new_empty((0, SQUARES), dtype=torch.bfloat16)
    for maximum in (False, True):
        reduce(nothing, found, maximum)
    reduce(nothing, found, False, nothing)
    torch.cuda.synchronize()
    return found
