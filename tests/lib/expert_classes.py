"""What classes of experts compute, written down a second time: nothing here is of fp4pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Usual:
    """Those whose forward has `@use_experts_implementation`, and what others differ in."""

    def stages(self, owner: Any) -> list[list[str]]:
        """The names of stacks, those that read one input together."""
        return [["gate_up_proj" if owner.has_gate else "up_proj"], ["down_proj"]]

    def is_transposed(self, owner: Any) -> bool:
        transposed: bool = owner.is_transposed
        return transposed

    def matrices(self, owner: Any, key: str) -> Tensor:
        """A stack as [E, N, K]."""
        weight = owner.get_parameter(key)
        return weight.mT if self.is_transposed(owner) else weight

    def called(self, owner: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs [T, K], the experts [T, k] and their weights [T, k]."""
        hidden, ids, weights = args
        return hidden, ids, weights

    def shown(self, owner: Any, hidden: Tensor) -> Tensor:
        """The inputs that every expert may be shown."""
        return hidden

    def computed(self, owner: Any, ids: Tensor) -> Tensor:
        """The experts of each token that the class computes [T, k]."""
        return ids

    def activated(self, owner: Any, *products: Tensor) -> Tensor:
        if owner.has_gate:
            return type(owner)._apply_gate(owner, *products)
        return owner.act_fn(*products)

    def add_others(
        self, total: Tensor, owner: Any, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        """Add to the sums of the experts [T, K] what is of none."""


class Plain(Usual):
    """[gate; up], without a decorator."""

    def stages(self, owner: Any) -> list[list[str]]:
        return [["gate_up_proj"], ["down_proj"]]

    def is_transposed(self, owner: Any) -> bool:
        return False

    def activated(self, owner: Any, *products: Tensor) -> Tensor:
        gate, up = products[0].chunk(2, -1)
        return owner.act_fn(gate) * up


class Longcat(Plain):
    def matrices(self, owner: Any, key: str) -> Tensor:
        return owner.get_parameter(key)[: owner.num_routed_experts]

    def add_others(
        self, total: Tensor, owner: Any, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        for e in range(owner.num_routed_experts, owner.total_experts):
            place, token = torch.where((ids == e).t())
            total.index_add_(0, token, hidden[token] * weights[token, place, None])


class Step(Plain):
    def activated(self, owner: Any, *products: Tensor) -> Tensor:
        gate, up = products[0].chunk(2, -1)
        return owner.act_fn(gate).clamp(max=owner.limit) * up.clamp(-owner.limit, owner.limit)


class Llama4(Plain):
    """Called with a copy of all tokens for each expert, zeros where it was not chosen."""

    def is_transposed(self, owner: Any) -> bool:
        return True

    def called(self, owner: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        (hidden,) = args
        ids = torch.arange(owner.num_experts).repeat_interleave(len(hidden) // owner.num_experts)
        ids[hidden.abs().sum(1) == 0] = 99
        return hidden, ids[:, None], torch.ones(len(hidden), 1)

    def shown(self, owner: Any, hidden: Tensor) -> Tensor:
        return hidden.view(owner.num_experts, -1, hidden.shape[1]).sum(0)

    def computed(self, owner: Any, ids: Tensor) -> Tensor:
        return torch.arange(owner.num_experts).repeat_interleave(len(ids) // owner.num_experts)[
            :, None
        ]


CLASSES: Mapping[str, Usual] = {
    "LongcatFlashExperts": Longcat(),
    "Step3p7Experts": Step(),
    "Llama4TextExperts": Llama4(),
}


def class_of(module: nn.Module) -> Usual | None:
    """What the class of a module of experts computes, None for all else."""
    if hasattr(module, "is_transposed"):
        return Usual()
    return CLASSES.get(type(module).__name__)


def owners(model: nn.Module) -> dict[str, Any]:
    """The modules of experts of an unprepared model."""
    return {name: m for name, m in model.named_modules() if class_of(m) is not None}


def stack_names(owner: Any) -> list[str]:
    kind = class_of(owner)
    assert kind is not None
    return [name for stage in kind.stages(owner) for name in stage]
