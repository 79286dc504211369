"""Functions of Triton's Gluon, which is experimental, that versions name differently."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

# A barrier of all threads of a program, and a tile copied by the tensor memory accelerator. An
# import error tells of a version that has neither name.
try:
    from triton.experimental.gluon.language import barrier
except ImportError:
    from triton.experimental.gluon.language import thread_barrier as barrier
try:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load as load_tile
except ImportError:
    from triton.experimental.gluon.language.nvidia.hopper.tma import (
        async_copy_global_to_shared as load_tile,
    )

__all__ = ["barrier", "load_tile", "warpgroup_mma_init"]
