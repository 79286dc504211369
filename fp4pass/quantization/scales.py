"""Global scales that layers share, chosen before the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .._compat.accelerate import on_device
from ..errors import NonFiniteError, StateError
from ..methods import weight_amax
from .plan import LayerPlan, Plan, scale_groups


def with_shared_scales(plan: Plan) -> Plan:
    """Return the plan with the global scale of its group for each layer."""
    found: dict[int, float] = {}
    for group in scale_groups(plan.layers):
        largest = max(map(_stored_amax, group))
        for layer in group:
            found[layer.weight_key] = layer.config.format.global_scale_for(largest)
    return plan.map(lambda layer: dataclasses.replace(layer, global_scale=found[layer.weight_key]))


def _stored_amax(layer: LayerPlan) -> float:
    """Return the largest magnitude of a weight as it is stored. Raises for NaN, in its bias too."""
    with dense_weight(layer) as weight:
        if weight.is_meta:
            raise StateError(
                f"{layer.label}: its weight is on the meta device, without values. Load the "
                "weights before convert."
            )
        target = layer.config.target(weight, layer.stats)
        largest = weight_amax(target)
        if not largest < float("inf"):
            raise NonFiniteError(
                f"{layer.label}: its weight holds NaN or infinity. Repair the checkpoint, or skip "
                f"the layer with rules=[({layer.name!r}, None)]."
            )
        bias = layer.module._parameters.get("bias")
        if bias is not None and not bias.is_meta and bias.isnan().any():
            raise NonFiniteError(
                f"{layer.label}: its bias holds NaN. Repair the checkpoint, or skip the layer with "
                f"rules=[({layer.name!r}, None)]."
            )
        stored = layer.config.stored(target)
        return largest if stored is target else weight_amax(stored)


@contextmanager
def dense_weight(layer: LayerPlan) -> Iterator[Tensor]:
    """Yield the weight as [N, K], brought from where accelerate offloaded it."""
    with on_device(layer.module):
        weight = layer.module.get_parameter("weight").detach()
        yield weight.t() if layer.transposed else weight
