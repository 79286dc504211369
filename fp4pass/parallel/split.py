"""Split modules over processes, and place the tensors that go in and out of them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import ops
from .._compat.transformers import saving_model
from ..core.formats import WHOLE
from ..errors import StateError
from ..kernels.common.rounding import row_amax, scale_of
from ..kernels.reduce.naive import LARGEST
from ..nn.linear import StoredWeight, needs_dynamic_scale
from ..nn.packed_linear import swap_class
from ..record.config import LinearConfig


class SplitModule(nn.Module):
    """A module that computes with parts of tensors, as plain ones.

    A state dict has them as DTensors, which torch.distributed.checkpoint writes whole.
    """

    is_split: ClassVar[bool] = True
    mesh: DeviceMesh
    split: Mapping[str, int]  # the dimension of a parameter or buffer of which this is a part

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if saving_model() is not None:
            raise StateError(
                f"{prefix.removesuffix('.')}: save_pretrained cannot write a layer that is split "
                "over processes. Call fp4pass.save(model, directory) in every process."
            )
        for name, dim in self.split.items():
            if prefix + name in destination:
                part = destination[prefix + name].detach()
                destination[prefix + name] = as_dtensor(part, self.mesh, Shard(dim))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load the parts of DTensors; whole tensors do not fit."""
        given = {prefix + name: state_dict.get(prefix + name) for name in self.split}
        parts: dict[str, Tensor] = {
            name: each.to_local() for name, each in given.items() if isinstance(each, DTensor)
        }
        super()._load_from_state_dict(ChainMap(parts, state_dict), prefix, *args)  # type: ignore[arg-type]


def split_module(
    module: Any, kind: type[Any], split: Mapping[str, int], mesh: DeviceMesh, **attributes: Any
) -> None:
    """Swap the class of a packed module, and keep of its tensors the part of this process."""
    tensors = {name: getattr(module, name) for name in module.packed_buffers}
    for name, dim in split.items():
        if name in tensors:
            tensors[name] = local_shard(tensors[name], dim, mesh)
        else:
            parameter = module.get_parameter(name)
            parameter.data = local_shard(parameter.data, dim, mesh)
    attributes |= {name: getattr(module, name) for name in module.packed_attributes}
    attributes |= {"mesh": mesh, "split": split}
    swap_class(module, kind, buffers=tensors, attributes=attributes)


def as_dtensor(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return what this process has of a tensor, which is placed so, as a DTensor."""
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def moved(x: Any, mesh: DeviceMesh, now: Placement, wanted: Placement) -> Tensor:
    """Return a tensor, placed as `now` unless it is a DTensor, as `wanted`: a local part."""
    whole = x if isinstance(x, DTensor) else as_dtensor(x, mesh, now)
    return whole.redistribute(placements=[wanted]).to_local()


def with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all processes have, whose gradient is the sum of those of all."""
    # Not another tensor if there is no gradient: layers that read one input know it by identity.
    if not _has_gradient(x):
        return x
    return as_dtensor(x, mesh, Replicate()).to_local(grad_placements=[Partial()])


def summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the local outputs of all processes, perhaps in place."""
    if _has_gradient(y):
        return moved(y, mesh, Partial(), Replicate())
    if y.numel() * y.element_size() <= LARGEST:
        return ops.all_reduce(y, mesh.get_group().group_name, False)
    # As a DTensor does it, without its layers of Python.
    y = y.contiguous()
    dist.all_reduce(y, group=mesh.get_group())
    return y


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def with_shared_scale(
    weight: StoredWeight, config: LinearConfig, x: Tensor, mesh: DeviceMesh
) -> StoredWeight:
    """Return buffers with one scale for the inputs of all processes, where it is dynamic.

    It is a global scale, or that of each token where tokens have one float32 scale.
    """
    fmt = config.format
    of_tokens = fmt.has_float_scale and fmt.block == WHOLE and not config.weight_only
    is_of_tokens = of_tokens and weight.input_global_scale is None
    if not is_of_tokens and not needs_dynamic_scale(weight, config):
        return weight
    x = ops.rotate(x, config.input_rotation) if config.input_rotation else x
    finite = x.detach().nan_to_num(0.0, 0.0, 0.0)
    if is_of_tokens:
        amax = row_amax(finite.float(), fmt)
    else:
        amax = finite.abs().amax().view(1) if x.numel() else x.new_zeros(1)
        # A whole word of memory, which GPUs exchange.
        amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
    amax = ops.all_reduce(amax.contiguous(), mesh.get_group().group_name, True)
    scale = scale_of(amax, fmt) if is_of_tokens else ops.dynamic_global_scale(amax, fmt.key)
    return weight._replace(input_global_scale=scale)


def local_shard(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return the part of a tensor that this process has, in memory of its own."""
    part = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return part.clone(memory_format=torch.contiguous_format)
