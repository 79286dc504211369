"""The pass that has Inductor's kernels launched early, where that was measured to pay."""

from __future__ import annotations

from torch import fx

from ... import ops
from ..._compat import inductor

# Graphs with a call of one of these: steps of one row with few kernels of Inductor's between ours.
# In a step with norms and gates of Inductor's, early launches were measured to lose.
EARLY = (ops.linear_add, ops.all_reduce_add)


def launch_early(graph: fx.Graph) -> int:
    """Have Inductor's kernels in a step of one row launched early; return 1, or 0 if none are."""
    return inductor.launch_early(graph) if any(n.target in EARLY for n in graph.nodes) else 0
