"""Plan the layers that calibration never reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from .plan import LayerPlan, Plan
from .scan import SkippedLayer, skip

_READ = "its weight is read without calling the layer"
_UNREACHED = "calibration never reached it"

# Why layers are skipped that a recipe alone would quantize.
BY_CALIBRATION = (_READ, _UNREACHED)


def with_unreached(plan: Plan, read: Collection[str]) -> Plan:
    """Return the plan with layers skipped, or quantized by "sse", that calibration never reached.

    Those that are left are errors of `require_statistics`.
    """

    def settled(layer: LayerPlan) -> LayerPlan | SkippedLayer:
        config = layer.config
        if layer.stats.tokens:
            return layer
        lacking = not all(map(layer.stats.has, config.needs))
        if layer.name in read and (lacking or not config.weight_only):
            return skip(layer, _READ)
        if not lacking or config.unreached == "error":
            return layer
        if config.unreached == "skip":
            return skip(layer, _UNREACHED)
        config = config.override({"method": config.unreached, "weight_only": True})
        return dataclasses.replace(layer, config=config)

    return Plan(tuple(settled(e) if isinstance(e, LayerPlan) else e for e in plan.entries))
