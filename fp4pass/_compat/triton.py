"""Functions of Triton's Gluon, which is experimental, that versions name differently."""

from __future__ import annotations

from typing import Any


def barrier_of_threads() -> Any:
    """Return the barrier of all threads of a program."""
    from triton.experimental.gluon import language

    return getattr(language, "barrier", None) or language.thread_barrier


def tile_loader() -> Any:
    """Return what copies a tile by the tensor memory accelerator."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
