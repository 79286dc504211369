"""Functions of Triton's Gluon, which is experimental, that versions name differently."""

from __future__ import annotations

from typing import Any

from . import part


@part(
    "triton",
    "kernels in Gluon",
    "Products of one row, and of many rows on Hopper, run in kernels that take longer.",
)
def gluon() -> None:
    """Raise unless all that the kernels import is there."""
    from triton.experimental.gluon import jit, language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _ = jit, language, TensorDescriptor, barrier_of_threads(), tile_loader()


def barrier_of_threads() -> Any:
    """Return the barrier of all threads of a program."""
    from triton.experimental.gluon import language

    return getattr(language, "barrier", None) or language.thread_barrier


def tile_loader() -> Any:
    """Return what copies a tile by the tensor memory accelerator."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
