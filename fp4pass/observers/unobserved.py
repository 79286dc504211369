"""Run a prepared model for a while without its observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])

# On hooks that add to what a prepared model has seen.
_OBSERVES = "_fp4pass_observes"


def observes(hook: Hook) -> Hook:
    """Mark a hook that adds to what a prepared model has seen."""
    setattr(hook, _OBSERVES, True)
    return hook


@contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Take the observers and the recording of a prepared model off; put them back at the end.

    What runs in between enters no statistic. Code that torch.compile made has its observers inside.
    """
    taken: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any(hasattr(hook, _OBSERVES) for hook in hooks.values()):
                taken.append((hooks, list(hooks.items())))
    try:
        for hooks, found in taken:
            for key, hook in found:
                if hasattr(hook, _OBSERVES):
                    del hooks[key]
        yield
    finally:
        # In the order in which they were: the hooks of others may stand between.
        for hooks, found in taken:
            since = [each for each in hooks.items() if each not in found]
            hooks.clear()
            hooks.update([*found, *since])
