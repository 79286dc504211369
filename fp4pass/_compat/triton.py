"""What Triton's Gluon, which is experimental, calls by other names in other versions."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_init

# A barrier of all threads of a program, and a tile copied by the tensor memory accelerator.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

__all__ = ["barrier", "load_tile", "warpgroup_mma_init"]
