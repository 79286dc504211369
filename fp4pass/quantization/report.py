"""Rows of a report, made of a plan and of what the search found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import StateError
from ..methods import Certificate, MethodResult, Stats
from ..record.rows import Report, Row
from ..record.state import get_state
from .plan import LayerPlan
from .scan import SkippedLayer

# Tokens below which the own statistics of an expert say little.
_FEW = 32


def report(model: nn.Module) -> Report:
    """Return the report of a prepared or converted model.

    Raises:
        StateError: fp4pass has not touched the model.

    Example:
        >>> model = fp4pass.convert(model, method="sse", rules=[("2", None)])
        >>> [(row.name, row.skip_reason) for row in fp4pass.report(model).skipped]
        [('2', "rule ('2', None)")]
    """
    state = get_state(model)
    if state is None:
        raise StateError(
            "The model was neither prepared nor converted. Call fp4pass.convert(model) first."
        )
    return state.report


def planned_row(layer: LayerPlan | SkippedLayer) -> Row:
    """Return the row of a layer that is not converted."""
    reason = layer.skip_reason if isinstance(layer, SkippedLayer) else ""
    return Row(layer.name, layer.shape, skip_reason=reason)


def converted_row(
    layer: LayerPlan,
    results: Sequence[MethodResult],
    stats: Stats,
    weight_error: float,
    output_error: float | None,
    note: str,
) -> Row:
    """Return the row of a layer that is converted, from the results of each of its matrices."""
    certificate = Certificate.joined([result.certificate for result in results])
    return Row(
        name=layer.name,
        shape=layer.shape,
        config=layer.config,
        bits=layer.config.format.bits_per_weight(layer.shape),
        weight_error=weight_error,
        output_error=output_error,
        tokens=stats.tokens,
        **_expert_tokens(stats),
        proved=None if certificate is None else certificate.proved,
        gap=None if certificate is None else certificate.gap,
        note=note,
    )


def _expert_tokens(stats: Stats) -> dict[str, Any]:
    """Return the fields of a row that say how often experts were reached."""
    if stats.counts is None or stats.routing is None or not stats.tokens:
        return {}
    counts, routing = stats.counts.cpu(), stats.routing.cpu()
    spread = (counts.min(), counts.median(), counts.max())
    return {
        "unreached": tuple((counts == 0).nonzero().flatten().tolist()),
        "expert_tokens": tuple(map(int, spread)),
        "rare_routing": float(routing[counts < _FEW].sum() / routing.sum().clamp(min=1e-30)),
    }
