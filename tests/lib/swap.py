"""The plain reference of a conversion: every linear replaced by a small module, no graph at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import zoo
from expert_classes import class_of, stack_names
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
        return F.linear(self.rounded(input), self.weight, self.bias)

    def rounded(self, x: Tensor) -> Tensor:
        """An input as the product sees it."""
        if self.weight_only:
            return x
        divisor = None
        if self.fmt.has_global_scale:
            amax = float(x.detach().abs().amax()) if self.input_amax is None else self.input_amax
            divisor = torch.tensor([1.0 / self.fmt.global_scale_for(amax)])
        packed, scale = torch.ops.fp4pass.quantize(x.detach(), divisor, self.fmt.key)
        return torch.ops.fp4pass.dequantize(packed, scale, divisor, self.fmt.key, x.dtype)


class PlainExperts(nn.Module):
    """The experts of a mixture one by one, weights and inputs rounded as of a PlainLinear.

    fmt: None for none, to keep in `seen` the largest magnitude of the inputs of each stack.
    """

    def __init__(
        self,
        experts: nn.Module,
        fmt: Format | None,
        weight_only: bool,
        input_amax: Sequence[float] | None,
    ) -> None:
        super().__init__()
        self.experts, self.kind = experts, class_of(experts)
        names = stack_names(experts)
        # By the names of stacks: the experts, and the largest magnitude of their inputs.
        self.linears: dict[str, list[Any]] = {}
        self.seen = dict.fromkeys(names, 0.0)
        for i, name in enumerate(names):
            stack = self.kind.matrices(experts, name).detach()
            bias = getattr(experts, f"{name}_bias", None)
            seen = None if input_amax is None else input_amax[i]
            linears = []
            for e, weight in enumerate(stack):
                linear: nn.Module = nn.Linear(*reversed(weight.shape), bias=bias is not None)
                linear.weight = nn.Parameter(weight.contiguous())
                if bias is not None:
                    linear.bias = nn.Parameter(bias[e])
                if fmt is not None:
                    amax = float(weight.abs().amax())
                    linear = PlainLinear(linear, fmt, amax, weight_only, seen)
                linears.append(linear)
            self.linears[name] = linears

    def forward(self, *args: Any) -> Tensor:
        """The sums over the chosen experts, expert by expert, as transformers adds them."""
        owner, kind = self.experts, self.kind
        hidden, ids, weights = kind.called(owner, args)
        ids = kind.computed(owner, ids)
        count = len(next(iter(self.linears.values())))
        chosen = [torch.where((ids == e).t()) for e in range(count)]
        outputs: list[list[Tensor]] = []
        inputs = [hidden[token] for _, token in chosen]
        for stage in kind.stages(owner):
            if outputs:
                inputs = [kind.activated(owner, *each) for each in zip(*outputs, strict=True)]
            outputs = [self.products(name, inputs) for name in stage]
        total = torch.zeros(len(hidden), outputs[0][0].shape[1], dtype=hidden.dtype)
        for (place, token), out in zip(chosen, outputs[0], strict=True):
            total.index_add_(0, token, out * weights[token, place, None])
        kind.add_others(total, owner, hidden, ids, weights)
        return total.unflatten(0, args[0].shape[:-1])

    def products(self, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The products of each expert with its inputs, which have one scale for all experts."""
        x = torch.cat(list(inputs))
        self.seen[name] = max(self.seen[name], float(x.detach().abs().amax()))
        linears = self.linears[name]
        rows = linears[0].rounded(x) if hasattr(linears[0], "fmt") else x
        return [
            F.linear(x, linear.weight, linear.bias)
            for x, linear in zip(rows.split([len(x) for x in inputs]), linears, strict=True)
        ]


def float_experts(model: nn.Module) -> dict[str, PlainExperts]:
    """Put a PlainExperts that rounds nothing in the place of all experts, in place."""
    return swap_experts(model, None, True, None)


def swap_experts(
    model: nn.Module,
    fmt: Format | None,
    weight_only: bool,
    input_amax: Mapping[str, float] | None = None,
) -> dict[str, PlainExperts]:
    """Put a PlainExperts in the place of all experts, in place; return them by their names."""
    found = {}
    for owner in dict.fromkeys(zoo.stacks(model).values()):
        name = next(n for n, m in model.named_modules() if m is owner)
        names = [n for n, m in zoo.stacks(model).items() if m is owner]
        amax = None if input_amax is None else [input_amax[n] for n in names]
        parent, _, key = name.rpartition(".")
        plain = found[name] = PlainExperts(owner, fmt, weight_only, amax)
        setattr(model.get_submodule(parent), key, plain)
    return found


def swapped(
    model: nn.Module,
    fmt: str = "nvfp4",
    *,
    weight_only: bool,
    input_amax: Mapping[str, float] | None = None,
) -> nn.Module:
    """`model` with its linears and experts replaced by a PlainLinear and PlainExperts, in place."""
    linears = zoo.eligible_linears(model)
    swap_experts(model, get_format(fmt), weight_only, input_amax)
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
