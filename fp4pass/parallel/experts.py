"""Divide packed experts among processes, each with all its rows and columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import OptionError, ShapeError, StateError
from ..nn.experts import (
    QuantizedExperts,
    QuantizedExpertStack,
    holder_of,
    packed_stacks,
    require_adapter,
)
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, StoredWeight
from ..nn.packed_linear import swap_class
from .split import (
    SplitModule,
    local_shard,
    split_module,
    summed,
    with_shared_scale,
    with_summed_gradient,
)


class SplitExpertStack(SplitModule, QuantizedExpertStack):
    """A stack of the experts of this process."""

    packed_attributes = (*QuantizedExpertStack.packed_attributes, "mesh", "split")

    @property
    def weight(self) -> Tensor:
        """The dense stack, which no process has."""
        raise StateError(
            f"The dense weight of {type(self).__name__} is split over processes. Read it before "
            "fp4pass.parallelize, or of a model that fp4pass.load returns."
        )

    def weight_for(self, x: Tensor) -> StoredWeight:
        """Return the buffers, with one global scale for the inputs of all processes."""
        # Tokens [T, K] are the same everywhere, what experts made of them [T, k, K] is not.
        weight = self.packed_weight
        return weight if x.ndim == 2 else with_shared_scale(weight, self.config, x, self.mesh)


class SplitExperts(SplitModule, QuantizedExperts):
    """The experts of a mixture, of which this process has some.

    Each process computes what its experts add to the tokens of all.
    """

    first: int  # the id of its first expert
    count: int
    adds_identities: bool  # what no expert computes is added by one process

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the whole mixture."""
        args = tuple(self._read(each) for each in args)
        kwargs = {name: self._read(each) for name, each in kwargs.items()}
        # By name, not super(): see linear.py.
        return summed(QuantizedExperts.forward(self, *args, **kwargs), self.mesh)

    def _read(self, value: Any) -> Any:
        return with_summed_gradient(value, self.mesh) if isinstance(value, Tensor) else value

    def held(self, ids: Tensor) -> Tensor:
        """Return where the experts ids [T, k] lie in the stacks; `count` for those elsewhere."""
        own = ids - self.first
        return torch.where((own >= 0) & (own < self.count), own, self.count)

    def extra_repr(self) -> str:
        """Return which experts these are, for print(model)."""
        return f"experts {self.first} to {self.first + self.count - 1}"


def require_whole_experts(name: str, owner: nn.Module, size: int) -> None:
    """Raise OptionError or ShapeError unless experts can be divided."""
    stacks = packed_stacks(owner) if isinstance(owner, QuantizedExperts) else {}
    if not stacks or set(stacks) != set(require_adapter(owner).names):
        raise OptionError(
            f"{name}: expected a mixture of which all stacks are packed, got "
            f"{type(owner).__name__}. Convert them all, or leave it out of the plan (each rank "
            "then has it whole)."
        )
    for stack in stacks.values():
        experts = len(stack.weight_packed)
        if experts % size:
            raise ShapeError(
                f"{name}: {experts} experts cannot be divided among {size} ranks. Use a number of "
                "ranks that divides them, or leave them out of the plan (each rank then has all)."
            )


def split_experts(name: str, owner: Any, mesh: DeviceMesh) -> None:
    """Keep only the experts that this process computes with, in place."""
    require_whole_experts(name, owner, mesh.size())
    count = 0
    biases: dict[str, int] = {}
    for path, stack in packed_stacks(owner).items():
        holder, last = holder_of(owner, path)
        split = {PACKED: 0, SCALE: 0}
        if stack.weight_global_scale is not None:
            split[GLOBAL] = 0
        if stack.input_global_scale is not None and len(stack.input_global_scale) > 1:
            split[INPUT_GLOBAL] = 0
        split_module(stack, SplitExpertStack, split, mesh)
        bias = holder._parameters.get(f"{last}_bias")
        if bias is not None:
            bias.data = local_shard(bias.data, 0, mesh)
            biases[f"{last}_bias"] = 0
        count = len(stack.weight_packed)
    rank = mesh.get_local_rank()
    facts = {"first": rank * count, "count": count, "adds_identities": rank == 0}
    swap_class(owner, SplitExperts, attributes=facts | {"mesh": mesh, "split": biases})
