"""Find the layers outside the text part of a model, which text does not reach."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.names import covering_globs
from ..quantization.observers.observer import OBSERVERS
from ..quantization.plan import Plan
from ..record.config import Rule
from ..record.state import get_state
from .recording import recording_of


def rules_beside_text(root: nn.Module, plan: Plan, needs: bool) -> tuple[list[Rule], list[str]]:
    """Return rules that skip layers outside the text part that text did not reach, and globs.

    Such layers are a vision tower, for example, in a model with a text config inside its own.

    Args:
        root: calibrated.
        plan: the layers and their configs.
        needs: whether the method of most layers needs data.
    """
    model: Any = root
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return [], []
    recording = recording_of(get_state(root))
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    passed, stacked = set[str](), set[nn.Module]()
    if recording is not None:
        passed = {each.name for each in recording.passed_by(plan).layers}
        stacked = {m for s in recording.stacks for layer in s.layers for m in layer.modules()}
    unreached: list[str] = []
    others: list[str] = []
    for layer in plan.layers:
        own, observers = layer.config, layer.module.__dict__.get(OBSERVERS, ())
        seen = any(each.has_seen for each in observers) or layer.module in inside
        seen = seen or (layer.module in stacked and layer.name not in passed)
        # Some need nothing of calibration, and for others the user has decided.
        kept = (own.weight_only and not own.needs) or own.unreached != "error"
        (others if seen or kept else unreached).append(layer.name)
    globs = covering_globs(unreached, others)
    # Recorded layers have no statistics before convert runs them.
    skipped = {"unreached": "skip"} if needs and recording is None else None
    return [(glob, skipped) for glob in globs], globs
