"""Passes that run inside torch.compile, on graphs with operators of fp4pass, and their report.

The matcher is in pattern.py, the table of fusions in fusions.py. docs/graphs.md explains them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from ..._compat import torch as compat
from .attention import fuse_attention, fuse_rotary
from .fusions import fuse_quantizers
from .merge import group_linears, join_counters, share_calls, share_observers, split_argmax
from .products import fuse_experts, fuse_gates, fuse_norms, fuse_residuals, round_rows

# The passes on every graph with operators of fp4pass, in their order.
PASSES: tuple[Callable[[fx.Graph], int], ...] = (
    share_calls,
    share_observers,
    fuse_quantizers,
    fuse_experts,
    fuse_gates,
    fuse_attention,
    fuse_rotary,
    round_rows,
    group_linears,
    fuse_residuals,
    fuse_norms,
    split_argmax,
    join_counters,
)

# Every file that decides what a pass does, or the code of a graph.
SOURCES = (
    *sorted(Path(__file__).parent.glob("*.py")),
    *sorted(Path(__file__).parents[2].glob("kernels/cpu/*.*")),
    Path(compat.__file__),
    Path(compat.__file__).with_name("inductor.py"),
)

_log = logging.getLogger(__name__)


def install_passes() -> None:
    """Have Inductor run the passes in this process, after those that are installed.

    `convert` and `load` do this. Call it for a converted model that arrives in another way, such as
    by pickle. The passes change only graphs with operators of fp4pass. Installing again changes
    nothing. A torch whose Inductor runs passes in another way gets none, and a logged warning.
    """
    compat.chain_post_grad_pass(run_passes, cache_key)


def run_passes(graph: fx.Graph) -> None:
    """Run all passes on a graph with operators of fp4pass, and record their changes."""
    before = count_calls(graph)
    if not before or not compat.passes_are_run.works():
        return
    # Late, for most processes compile nothing.
    from ..._compat.inductor import call_by_name
    from .cpu import lower_products

    lower_products()
    changes = {each.__name__: each(graph) for each in PASSES}
    called = (compat.operator_of(node) for node in graph.nodes)
    call_by_name(each for each in called if each is not None and each.namespace == "fp4pass")
    GRAPHS.append(CompiledGraph(before, count_calls(graph), changes))
    _log.info("graph %d: %s", len(GRAPHS) - 1, GRAPHS[-1])


def cache_key() -> tuple[str, ...]:
    """Return what stands for the passes in the key of Inductor's cache: their names and source."""
    return (*(each.__name__ for each in PASSES), _digest(SOURCES))


@functools.cache
def _digest(paths: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that torch.compile made.

    Attributes:
        before: the calls of each operator of fp4pass before the passes.
        after: the same after them.
        changes: the number of changes of each pass.
    """

    before: dict[str, int]
    after: dict[str, int]
    changes: dict[str, int]

    def __str__(self) -> str:
        calls = ", ".join(
            f"{name} {self.before.get(name, 0)} -> {self.after.get(name, 0)}"
            for name in sorted(self.before | self.after)
        )
        done = ", ".join(f"{name} {count}" for name, count in self.changes.items() if count)
        return f"{calls} ({done or 'nothing to change'})"


@dataclass(frozen=True)
class CompileReport:
    """The graphs with operators of fp4pass that Inductor compiled in this process, oldest first."""

    graphs: tuple[CompiledGraph, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "No graph with fp4pass operators was compiled in this process. Code of Inductor's "
                "cache is not listed; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has it compiled again."
            )
        return "\n".join(f"graph {index}: {graph}" for index, graph in enumerate(self.graphs))


# The latest graphs.
GRAPHS: deque[CompiledGraph] = deque(maxlen=1000)


def compile_report() -> CompileReport:
    """Return the changes of the passes to the graphs that torch.compile made in this process.

    It prints as one line for each graph. `TORCH_LOGS="fp4pass.graph.inductor"` logs the same while
    it happens.

    Returns:
        The latest 1000 graphs; not those whose code came from Inductor's cache.

    Example:
        >>> lines = [str(graph) for graph in fp4pass.compile_report().graphs]
    """
    return CompileReport(tuple(GRAPHS))


def count_calls(graph: fx.Graph) -> dict[str, int]:
    """Return how often a graph calls each operator of fp4pass."""
    names = (compat.operator_name(node) for node in graph.nodes)
    return dict(Counter(name.split("::")[1] for name in names if name.startswith("fp4pass::")))
