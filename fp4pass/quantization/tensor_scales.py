"""Choose one scale for the layers that serving engines fuse, of formats with a scale for a tensor.

Engines keep one scale for them, and round the codes of the others again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..core.names import FUSED
from ..distributed import Ranks
from ..kernels.common.float_scales import scale_of
from ..kernels.search.float_scales import candidate_scales
from ..methods import resolve_method
from .plan import LayerPlan, joined
from .search import errors_of_scales


def shared_tensor_scales(
    layers: Sequence[LayerPlan], largest: Mapping[str, Sequence[float]], group: Ranks
) -> dict[int, float]:
    """Return the scale of each weight that shares one, by its key.

    It is the best of those that a search tries for all of them as one matrix. Layers whose
    statistics are missing share none. The ranks must all make the call.

    Args:
        layers: those of a plan.
        largest: the largest magnitudes of each, by its name.
        group: the ranks.
    """
    fused = _fused(layers)
    candidates = [_candidates(members, largest) for members in fused]
    own: dict[int, list[float] | None] = {}
    with group.together():
        for members, known in zip(fused, candidates, strict=True):
            for layer in members if len(known) > 1 else ():
                if layer.owner == group.rank:
                    own[layer.weight_key] = errors_of_scales(layer, known)
    keys = {layer.weight_key: layer.name for members in fused for layer in members}
    by_name = {keys[key]: errors for key, errors in own.items()}
    errors = {name: each for part in group.gather(by_name) for name, each in part.items()}
    found: dict[int, float] = {}
    for members, known in zip(fused, candidates, strict=True):
        best = 0
        if len(known) > 1:
            each = [errors[keys[layer.weight_key]] for layer in members]
            if any(one is None for one in each):
                continue
            sums = [sum(one) for one in zip(*each, strict=True)]
            best = sums.index(min(sums))
        found |= {layer.weight_key: float(known[best]) for layer in members}
    return found


def _fused(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Return a layer of each weight that shares a scale, those with one scale together."""

    def keys(layer: LayerPlan) -> set[object]:
        last = layer.name.removeprefix(f"{layer.parent}.").partition(".")[0]
        readers = {
            (layer.parent, layer.columns, layer.config.format.key, i)
            for i, names in enumerate(FUSED)
            if last in names
        }
        return {("weight", layer.weight_key), *readers}

    able = [
        layer
        for layer in layers
        if layer.config.format.has_tensor_scale
        and layer.kept is None
        and not layer.stage
        and resolve_method(layer.config.method)[0].objective is not None
    ]
    groups = [
        list({layer.weight_key: layer for layer in reversed(members)}.values())[::-1]
        for members in joined(able, keys)
    ]
    return [members for members in groups if len(members) > 1]


def _candidates(
    members: Sequence[LayerPlan], largest: Mapping[str, Sequence[float]]
) -> torch.Tensor:
    """Return the scales to try, float32 [C]; one where a method of a member tries no others."""
    amax = max(largest[layer.name][0] for layer in members)
    naive = scale_of(torch.tensor([amax], device="cpu"), members[0].config.format)
    objectives = {resolve_method(layer.config.method)[0].objective for layer in members}
    # Errors of several kinds have no sum.
    alone = len(objectives) > 1 or objectives == {"naive"}
    return naive if alone else candidate_scales(naive)[:, 0]
