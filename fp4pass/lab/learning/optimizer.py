"""The optimizer of a distillation: rates by how far a latent, or a norm, may go in all steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import is_sharded
from .student import last_latent, student_layers

# Steps of the warmup, as a part of all.
_WARMUP = 0.05

# Half of the decay of the usual second moment, for runs of some hundred steps.
_BETAS = (0.9, 0.99)

# Gradients of single codes of a large model are far below the usual 1e-8.
_EPS = 1e-14


def schedule(step: int, steps: int) -> float:
    """Return the part of the peak rate that a step has: a short warmup, then half a cosine."""
    warmup = max(1, round(steps * _WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def parameter_groups(
    student: nn.Module, steps: int, *, travel: float, others: float = 0.0
) -> list[dict[str, Any]]:
    """Return groups of the parameters to train, with their peak rates, as optimizers take them.

    Adam moves a number by about its rate at each step, so that the sum of the rates is how far it
    can go. The rates are those of a warmup of 5 % of the steps and half a cosine behind it.

    Args:
        student: what `trainable` returned; may be sharded.
        steps: of the optimizer.
        travel: how far a latent can go, in cells of its code.
        others: how far any other parameter can go, as a part of its root mean square.

    Example:
        >>> from fp4pass import learning
        >>> student = learning.trainable(model, original)
        >>> groups = learning.parameter_groups(student, 100, travel=1.0)
        >>> optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    """
    total = sum(schedule(step, steps) for step in range(steps))
    latents = {id(layer.latent) for _, layer in student_layers(student)}
    by_rate: dict[float, list[nn.Parameter]] = {}
    for each in student.parameters():
        if not each.requires_grad:
            continue
        rate = travel
        if id(each) not in latents:
            # To a power of two, so that few groups have all.
            size = _root_mean_square(each)
            rate = others * 2.0 ** round(math.log2(size)) if size else 0.0
        by_rate.setdefault(rate / total, []).append(each)
    return [{"params": own, "lr": rate} for rate, own in by_rate.items()]


def _root_mean_square(parameter: Tensor) -> float:
    # The norm of what is sharded is that of the whole.
    norm: Any = torch.linalg.vector_norm(parameter.detach().float())
    return float(norm.full_tensor() if is_sharded(norm) else norm) / math.sqrt(parameter.numel())


class Optimizer:
    """Adam in float32 on the parameters of a student, also on those that have fewer bits."""

    def __init__(self, student: nn.Module, steps: int, travel: float, others: float) -> None:
        groups = parameter_groups(student, steps, travel=travel, others=others)
        self.rates, self.steps = [group["lr"] for group in groups], steps
        latents = {id(layer.latent): layer for _, layer in student_layers(student)}
        # With the end of the last cell, behind which they would be lost for many steps.
        self.latents = [
            (local(layer.latent.detach()), last_latent(layer)) for layer in latents.values()
        ]
        self.own: list[nn.Parameter] = [each for group in groups for each in group["params"]]
        # Steps of a parameter in bfloat16 would round to nothing.
        self.float32 = [
            each if each.dtype == torch.float32 else nn.Parameter(each.detach().float())
            for each in self.own
        ]
        wide = dict(zip(map(id, self.own), self.float32, strict=True))
        groups = [{**g, "params": [wide[id(each)] for each in g["params"]]} for g in groups]
        self.is_fused = all(each.device.type == "cuda" for each in self.own)
        self.adam = torch.optim.Adam(groups, betas=_BETAS, eps=_EPS, fused=self.is_fused)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Take a step down the gradients that the parameters have, and drop these."""
        part = schedule(step, self.steps)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * part
        copies = [(a, b) for a, b in zip(self.own, self.float32, strict=True) if a is not b]
        for own, copy in copies:
            copy.grad = None if own.grad is None else own.grad.float()
            own.grad = None
        self.adam.step()
        self.adam.zero_grad()
        for own, copy in copies:
            own.copy_(copy)
        for each, last in self.latents:
            each.clamp_(-last, last)

    def state(self) -> list[dict[str, Tensor]]:
        """Return the state for `load`: the part of each parameter that this process has."""
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
            if self.is_fused and "step" in own:
                own["step"] = own["step"].to(each.device)


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor, sharded or whole, that this process has."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found
