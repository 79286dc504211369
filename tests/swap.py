"""The plain reference of a conversion: every linear replaced by a small module, no graph at all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

from fp4pass.core.formats import Format, get_format
from fp4pass.methods import Stats, resolve_method


class PlainLinear(nn.Module):
    """x W^T + bias with W, and x unless `weight_only`, rounded to a format.

    input_amax: of calibration; None for the amax of each call.
    """

    def __init__(
        self,
        linear: nn.Module,
        fmt: Format,
        amax: float,
        weight_only: bool,
        input_amax: float | None,
    ) -> None:
        super().__init__()
        self.fmt, self.weight_only, self.input_amax = fmt, weight_only, input_amax
        weight = linear.weight.detach()
        self.transposed = not isinstance(linear, nn.Linear)
        if self.transposed:
            weight = weight.t()
        method, options = resolve_method("naive")
        global_scale = fmt.global_scale_for(amax)
        state = method.function(weight, Stats(), fmt, global_scale, options)
        divisor = torch.tensor([1.0 / global_scale])
        self.weight = torch.ops.fp4pass.dequantize(
            state.qdata, state.scale.view(torch.uint8), divisor, fmt.key, weight.dtype
        )
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if not self.weight_only:
            divisor = None
            if self.fmt.has_global_scale:
                amax = (
                    float(x.detach().abs().amax()) if self.input_amax is None else self.input_amax
                )
                divisor = torch.tensor([1.0 / self.fmt.global_scale_for(amax)])
            packed, scale = torch.ops.fp4pass.quantize(x.detach(), divisor, self.fmt.key)
            x = torch.ops.fp4pass.dequantize(packed, scale, divisor, self.fmt.key, x.dtype)
        return F.linear(x, self.weight, self.bias)


def swapped(
    model: nn.Module,
    fmt: str = "nvfp4",
    *,
    weight_only: bool,
    input_amax: Mapping[str, float] | None = None,
) -> nn.Module:
    """`model` with every eligible linear replaced by a PlainLinear, in place."""
    linears = zoo.eligible_linears(model)
    amax: dict[tuple[str, int], float] = {}
    for name, linear in linears.items():
        group = name.rpartition(".")[0], zoo.in_features(linear)
        amax[group] = max(amax.get(group, 0.0), float(linear.weight.detach().abs().amax()))
    for name, linear in linears.items():
        group = name.rpartition(".")[0], zoo.in_features(linear)
        seen = None if input_amax is None else input_amax[name]
        plain = PlainLinear(linear, get_format(fmt), amax[group], weight_only, seen)
        if not name:
            return plain
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, plain)
    return model
