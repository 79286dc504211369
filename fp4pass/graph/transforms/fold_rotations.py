"""Rotations of inputs that linears of a graph module take over from those behind them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from ...quantization.plan import Site, by_weight
from ..match import LinearNode
from .rotation_folding import find_folds


def fold_rotations(model: nn.Module, sites: Sequence[Site]) -> int:
    """Have linears of a graph module give rotated outputs to those that would rotate them.

    Only a whole graph proves that nothing else reads them (graph/fold.py). Returns how many do.
    """
    if not isinstance(model, fx.GraphModule):
        return 0
    parameters = Counter(map(id, (p for _, p in model.named_parameters(remove_duplicate=False))))
    chosen = {members[0].module: members[0] for members in by_weight(sites) if len(members) == 1}

    def rotation(linear: LinearNode) -> int | None:
        site = chosen.get(linear.holder)
        own = linear.holder._parameters.values()
        if site is None or site.settings is None or any(parameters[id(p)] > 1 for p in own):
            return None
        return site.settings.rotation

    folds = find_folds(model.graph, rotation)
    for first, readers in folds:
        size = rotation(readers[0])
        _change(chosen[first.holder], output_rotation=size)
        for each in readers:
            _change(chosen[each.holder], folded=True)
    return len(folds)


def _change(site: Site, **facts: Any) -> None:
    assert site.settings is not None
    site.settings = dataclasses.replace(site.settings, **facts)
