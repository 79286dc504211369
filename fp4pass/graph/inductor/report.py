"""What the passes did to the graphs that torch.compile made."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torch import fx

from ..._compat.torch import operator_name


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that torch.compile made.

    Attributes:
        before: how often it called each operator of fp4pass before the passes.
        after: the same after them.
        changes: how many changes each pass made.
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
    """Return what the passes did to the graphs that torch.compile made in this process.

    It prints as one line for each graph. `TORCH_LOGS="fp4pass.graph.inductor"` logs the same while
    it happens.

    Returns:
        The latest 1000 graphs; not those whose code came from Inductor's cache.

    Example:
        >>> for graph in fp4pass.compile_report().graphs:  # doctest: +SKIP
        ...     print(graph)
    """
    return CompileReport(tuple(GRAPHS))


def count_calls(graph: fx.Graph) -> dict[str, int]:
    """Return how often a graph calls each operator of fp4pass."""
    names = (operator_name(node) for node in graph.nodes)
    return dict(Counter(name.split("::")[1] for name in names if name.startswith("fp4pass::")))
