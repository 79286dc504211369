"""Tensors that go in and out of layers of which each process has a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def taken(x: Any, mesh: DeviceMesh, layout: Placement, wanted: Placement) -> Tensor:
    """Return what this process computes with, of an input that is placed as `layout` says."""
    if not isinstance(x, DTensor):
        if layout == wanted:
            return x
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    return x.redistribute(placements=[wanted]).to_local()


def with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all processes have, whose gradient is the sum of those of all."""
    # Not another tensor if there is no gradient: layers that read one input know it by identity.
    if not _has_gradient(x):
        return x
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def placed(y: Tensor, mesh: DeviceMesh, now: Placement, wanted: Placement) -> Tensor:
    """Return a local output that is placed as `now` says as `wanted` does, in place or not."""
    if now == wanted:
        return y
    if now == Partial() and wanted == Replicate() and not _has_gradient(y):
        # What a DTensor does, without its layers of Python.
        y = y.contiguous()
        dist.all_reduce(y, group=mesh.get_group())
        return y
    parts = DTensor.from_local(y, mesh, [now], run_check=False)
    return parts.redistribute(placements=[wanted]).to_local()


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def shared_amax(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the largest finite magnitude [1] of the tensors of all processes."""
    finite = x.detach().nan_to_num(0.0, 0.0, 0.0).abs()
    amax = finite.amax().view(1) if x.numel() else x.new_zeros(1)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return amax


def part_of(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return the part of a tensor that this process has, in memory of its own."""
    part = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return part.clone(memory_format=torch.contiguous_format)


def as_sharded(tensor: Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """Return the part of this process as the tensor of which it is a part."""
    return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
