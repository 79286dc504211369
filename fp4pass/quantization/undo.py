"""Undo `prepare`: take observers and recordings out of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .._compat.torch_hooks import recompile_hooked
from ..experts import finalize_stacks
from ..input_cache import share_nothing
from .kv_cache import unobserve_cache
from .replace import SLOW_PATHS, remove_observers
from .state import forget_state, is_interrupted


@contextmanager
def unprepared_on_error(root: nn.Module) -> Iterator[None]:
    """Have a float model be as it was after an error, unless its first weight was replaced."""
    paths = [
        (module, name, module.__dict__[name])
        for module in root.modules()
        for name in SLOW_PATHS
        if name in module.__dict__
    ]
    try:
        yield
    except BaseException:
        if not is_interrupted(root):
            remove_observers(root)
            unobserve_cache(root)
            forget_state(root)
            share_nothing(root)
            finalize_stacks(root)
            for module, name, value in paths:
                setattr(module, name, value)
            recompile_hooked(root)
        raise
