"""Run a prepared model for a while without its observers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..observers.expert_calls import feed
from ..observers.observer import ExpertObserver, Observer
from .kv_cache import is_cache_observer
from .layer_inputs import Recording


def _observes(hook: object) -> bool:
    """Return whether a hook adds to what a prepared model has seen."""
    owner = getattr(hook, "__self__", None)
    is_own = isinstance(owner, Observer | ExpertObserver | Recording)
    return is_own or hook is feed or is_cache_observer(hook)


@contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Take the observers and the recording of a prepared model off; put them back at the end.

    What runs in between enters no statistic. Code that torch.compile made has its observers inside.
    """
    taken: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any(map(_observes, hooks.values())):
                taken.append((hooks, list(hooks.items())))
    try:
        for hooks, found in taken:
            for key, hook in found:
                if _observes(hook):
                    del hooks[key]
        yield
    finally:
        # In the order in which they were: the hooks of others may stand between.
        for hooks, found in taken:
            since = [each for each in hooks.items() if each not in found]
            hooks.clear()
            hooks.update([*found, *since])
