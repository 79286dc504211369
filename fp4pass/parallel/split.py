"""Modules of which each process has a part of some tensors, whole in a state dict as DTensors."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat.transformers import saving_model
from ..errors import StateError
from .placing import as_sharded


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
                destination[prefix + name] = as_sharded(part, dim, self.mesh)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load the parts of DTensors; whole tensors do not fit."""
        given = {prefix + name: state_dict.get(prefix + name) for name in self.split}
        parts: dict[str, Tensor] = {
            name: each.to_local() for name, each in given.items() if isinstance(each, DTensor)
        }
        super()._load_from_state_dict(ChainMap(parts, state_dict), prefix, *args)  # type: ignore[arg-type]
