"""What products of a quantized model are computed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, fx, nn

from ..config import LinearConfig
from ..errors import StateError
from ..experts import QuantizedExpertStack
from ..kernels.fp8.naive import is_exact
from ..linear import QuantizedLinear
from .report import Report
from .state import get_state, set_state, unwrap


def settled_compute(
    config: LinearConfig, weights: Sequence[tuple[Tensor, Tensor]], is_stack: bool
) -> tuple[LinearConfig, str]:
    """Return the config that packed weights can have, and why it is not the one that was asked for.

    Args:
        config: as it was asked for.
        weights: packed codes [N, P] and scale bits [N, K / block] of each.
        is_stack: whether they are those of experts.
    """
    if config.compute == "input":
        return config, ""
    why = ""
    if is_stack:
        why = "products of experts are computed in the dtype of their input"
    elif not config.format.scale.mantissa_bits and not all(
        is_exact(packed, scale, config.format) for packed, scale in weights
    ):
        why = "scales of a row are too far apart for E4M3, so its products are not FP8"
    return (config.override({"compute": "input"}), why) if why else (config, "")


def set_compute(model: nn.Module, compute: str) -> nn.Module:
    """Choose what products of many rows are computed in, in place, and return the model.

    Layers that cannot be computed so stay as they are; `report` says why.

    Args:
        model: converted or loaded.
        compute: "fp8" for FP8 tensor cores, or "input" for the dtype of the input.

    Raises:
        OptionError: there is no such choice.
        StateError: the model is not converted, or is a graph, whose nodes are made already.

    Example:
        >>> model = fp4pass.convert(model, "mxfp4a16", "sse")
        >>> fp4pass.set_compute(model, "fp8")[0].config.compute
        'fp8'
    """
    root = unwrap(model)
    LinearConfig(compute=compute)
    state = get_state(root)
    if state is None or state.status != "converted":
        raise StateError("set_compute: the model is not converted. Call convert or load first.")
    if isinstance(root, fx.GraphModule):
        raise StateError(
            "set_compute: the nodes of a converted graph say what they compute. Convert the graph "
            "with compute=, or the model itself."
        )
    rows = {row.name: row for row in state.report.rows}
    for name, module in root.named_modules():
        if not isinstance(module, QuantizedLinear | QuantizedExpertStack):
            continue
        weight = module.packed_weight
        module.config, why = settled_compute(
            module.config.override({"compute": compute}),
            [(weight.packed, weight.scale)],
            isinstance(module, QuantizedExpertStack),
        )
        if name in rows:
            rows[name] = dataclasses.replace(rows[name], config=module.config, note=why)
    report = Report(tuple(rows[row.name] for row in state.report.rows))
    set_state(root, dataclasses.replace(state, report=report))
    return model
