"""The optimizer of a distillation: a learning rate for each parameter by its size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded

# Steps of the warmup, as a part of all.
_WARMUP = 0.05


@torch.no_grad()
def parameter_groups(student: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return a group for each parameter to train, as optimizers of torch take them.

    AdamW moves each number by about its learning rate, so the rate of a parameter is `lr` times the
    root mean square of it, and one `lr` serves models of every size.

    Args:
        student: what `trainable` returned; may be sharded.
        lr: a part of the root mean square of a parameter.
    """
    return [
        {"params": [each], "lr": lr * _root_mean_square(each)}
        for each in student.parameters()
        if each.requires_grad
    ]


def _root_mean_square(parameter: Tensor) -> float:
    # The norm of what is sharded is that of the whole.
    norm: Any = torch.linalg.vector_norm(parameter.detach().float())
    return float(norm.full_tensor() if is_sharded(norm) else norm) / math.sqrt(parameter.numel())


def schedule(step: int, steps: int) -> float:
    """Return the part of the learning rate that a step has: a short warmup, then half a cosine."""
    warmup = max(1, round(steps * _WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Optimizer:
    """AdamW in float32 on the parameters of a student, also on those that have fewer bits."""

    def __init__(self, student: nn.Module, lr: float, steps: int) -> None:
        groups = parameter_groups(student, lr)
        self.rates, self.steps = [group["lr"] for group in groups], steps
        self.own: list[nn.Parameter] = [group["params"][0] for group in groups]
        # Steps of a parameter in bfloat16 would round to nothing.
        self.float32 = [
            each if each.dtype == torch.float32 else nn.Parameter(each.detach().float())
            for each in self.own
        ]
        for group, each in zip(groups, self.float32, strict=True):
            group["params"] = [each]
        self.is_fused = all(each.device.type == "cuda" for each in self.own)
        self.adam = torch.optim.AdamW(groups, weight_decay=0.0, fused=self.is_fused)

    def step(self, step: int) -> None:
        """Take a step down the gradients that the parameters have, and drop these."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * schedule(step, self.steps)
        copies = [(a, b) for a, b in zip(self.own, self.float32, strict=True) if a is not b]
        for own, copy in copies:
            copy.grad = None if own.grad is None else own.grad.float()
            own.grad = None
        self.adam.step()
        self.adam.zero_grad()
        with torch.no_grad():
            for own, copy in copies:
                own.copy_(copy)

    def state(self) -> list[dict[str, Tensor]]:
        """Return what `load` takes: of each parameter, what this process has of it."""
        return [
            {"float32": local(each.detach())}
            | {name: local(tensor) for name, tensor in self.adam.state[each].items()}
            for each in self.float32
        ]

    @torch.no_grad()
    def load(self, state: list[dict[str, Tensor]]) -> None:
        """Go on from where another one was."""
        for each, kept in zip(self.float32, state, strict=True):
            local(each.detach()).copy_(kept["float32"])
            own = self.adam.state[each]
            for name in kept.keys() - {"float32"}:
                is_count = not kept[name].ndim
                own[name] = kept[name].clone() if is_count else torch.zeros_like(each)
                local(own[name]).copy_(kept[name])
            if self.is_fused:
                own["step"] = own["step"].to(each.device)


def local(tensor: Any) -> Tensor:
    """Return what this process has of a tensor that may be sharded."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found
