"""The flow from a model to packed weights: plan, statistics, scales, search, report."""

# ruff: noqa: F401

from . import scan as adapters
from .observers.batches import call_arguments, device_of, in_float32
from .observers.observer import collect
from .observers.visible_tokens import count_tokens
from .plan import (
    LayerPlan,
    Plan,
    joined,
    matching_rule,
    plan_layers,
    require_float,
    require_layers,
    scale_groups,
)
from .quantize import pack_layer, survey
from .recipe import Recipe
from .replace import attach_observers, quantizes_input, remove_observers, share_inputs
from .scan import LinearLayer, caller_of
