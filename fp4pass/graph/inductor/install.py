"""What fp4pass asks of Inductor; the only file that touches it.

Import it when it is needed: Inductor takes a second. What the passes do is in docs/graphs.md.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ...errors import StateError
from ..match import target_name
from .eager import keep_whole, run_eager_kernels
from .fusions import fuse_activations, fuse_norms
from .merge import group_linears, share_calls

Change = Callable[[fx.Graph], int]

# What runs at each of Inductor's hooks, in this order.
PASSES: dict[str, tuple[Change, ...]] = {
    "pre_grad_custom_pass": (keep_whole,),
    "post_grad_custom_pre_pass": (share_calls, fuse_norms, fuse_activations, group_linears),
    "post_grad_custom_post_pass": (run_eager_kernels,),
}

# The hook whose graphs `compile_report` shows.
_REPORTED = "post_grad_custom_pre_pass"

# Every file that decides what a pass does.
SOURCES = tuple(
    str(path)
    for path in (
        *sorted(Path(__file__).parent.glob("*.py")),
        Path(__file__).parents[1] / "match.py",
    )
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that torch.compile made: its calls of fp4pass operators before and after the passes,
    and how much each pass changed."""

    before: dict[str, int]
    after: dict[str, int]
    changes: dict[str, int]


@dataclass(frozen=True)
class CompileReport:
    """The graphs with fp4pass operators that Inductor compiled in this process, oldest first."""

    graphs: tuple[CompiledGraph, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "No graph with fp4pass operators was compiled in this process. Code that comes "
                "from Inductor's cache is not listed; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has it "
                "compiled again."
            )
        lines = []
        for index, graph in enumerate(self.graphs):
            names = sorted(graph.before | graph.after)
            calls = ", ".join(
                f"{name} {graph.before.get(name, 0)} -> {graph.after.get(name, 0)}"
                for name in names
            )
            done = ", ".join(f"{name} {count}" for name, count in graph.changes.items() if count)
            lines.append(f"graph {index}: {calls} ({done or 'nothing to change'})")
        return "\n".join(lines)


_GRAPHS: deque[CompiledGraph] = deque(maxlen=1000)


class Pass(CustomGraphPass):
    """The passes of a hook, after those that a user had installed there."""

    def __init__(self, hook: str, before: tuple[Any, ...]) -> None:
        self.hook = hook
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        before = count_calls(graph)
        if not before:
            return
        changes = {change.__name__: change(graph) for change in PASSES[self.hook]}
        if self.hook == _REPORTED:
            _GRAPHS.append(CompiledGraph(before, count_calls(graph), changes))
            _log.info("graph %d", len(_GRAPHS) - 1)
        _log.info("%s: %s", self.hook, changes)

    def uuid(self) -> Any:
        """Key of the cache of compiled code: the source of all passes, which of them run, and the
        key of every pass before. None, so that nothing is cached, if one of those has none."""
        keys = [each.uuid() if hasattr(each, "uuid") else None for each in self.before]
        if None in keys:
            return None
        names = tuple(change.__name__ for change in PASSES[self.hook])
        return (self.hook, names, get_hash_for_files(SOURCES), *keys)


def count_calls(graph: fx.Graph) -> dict[str, int]:
    """How often a graph calls each fp4pass operator."""
    names = (target_name(node) for node in graph.nodes)
    return dict(Counter(name.split("::")[1] for name in names if name.startswith("fp4pass::")))


def report() -> CompileReport:
    """What the passes did so far."""
    return CompileReport(tuple(_GRAPHS))


# Inductor's setting before `install` changed it.
_casts: list[bool] = []


def install(quantizes_inputs: bool = True) -> None:
    """Have Inductor run the passes, after those that are installed, from now on in this process.

    quantizes_inputs: models have 4-bit inputs, so on a GPU what stays in registers is to be
    rounded to 16 bits, where eager rounds (emulate_precision_casts). Everything is still fused.
    Installing again adds nothing.
    """
    if quantizes_inputs and torch.cuda.is_available() and not _casts:
        _casts.append(config.emulate_precision_casts)
        config.emulate_precision_casts = True
    for hook in PASSES:
        before = _installed(hook)
        if not any(isinstance(each, Pass) for each in before):
            setattr(config, hook, Pass(hook, before))


def uninstall() -> None:
    """Take the passes out of Inductor again, and leave a user's. Models compile as any other then:
    right, but with more launches, and 4-bit inputs rounded elsewhere than in eager.

    Raises StateError if a pass that was installed later runs them, for that has to go first.
    """
    left: dict[str, Any] = {}
    for hook in PASSES:
        installed = _installed(hook)
        if any(_runs_ours(each) for each in installed if not isinstance(each, Pass)):
            raise StateError(
                f"torch._inductor.config.{hook} holds a pass that runs those of fp4pass. Take it "
                "out first."
            )
        kept: list[Any] = []
        for each in installed:
            kept += each.before if isinstance(each, Pass) else [each]
        left[hook] = kept[0] if len(kept) == 1 else tuple(kept) or None
    for hook, each in left.items():
        setattr(config, hook, each)
    while _casts:
        config.emulate_precision_casts = _casts.pop()


def _installed(hook: str) -> tuple[Any, ...]:
    """The passes at a hook."""
    installed = getattr(config, hook)
    if isinstance(installed, list | tuple):
        return tuple(installed)
    return () if installed is None else (installed,)


def _runs_ours(each: Any) -> bool:
    """Whether a pass of a user holds one of ours among its attributes."""
    return any(isinstance(value, Pass) for value in getattr(each, "__dict__", {}).values())
