"""FSDP2 with packed weights sharded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from .._compat.torch import shardable
from ..errors import StateError
from ..linear import PACKED, SCALE, PackedBlocks
from .split import SplitModule


def fully_shard(module: nn.Module, **options: Any) -> Any:
    """Apply `torch.distributed.fsdp.fully_shard`, with the packed weights sharded too.

    FSDP shards parameters; the packed codes and block scales of converted layers in the module
    become parameters without a gradient. Global scales stay buffers, which every process has.

    Args:
        module: of a converted model; as with torch's, first each decoder layer, then the model.
        **options: as torch's function takes them.

    Returns:
        The module.

    Raises:
        StateError: a layer is split over processes already.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> model = fp4pass.parallel.fully_shard(model, mesh=mesh)
        >>> model(batches[0]).shape
        torch.Size([4, 32])
    """
    for name, each in module.named_modules():
        if isinstance(each, SplitModule):
            raise StateError(
                f"{name}: expected a whole layer, got one that is split over processes. Call "
                "either fp4pass.parallelize or fully_shard."
            )
        if isinstance(each, PackedBlocks):
            for part in (PACKED, SCALE):
                tensor = each._buffers.pop(part, None)
                if tensor is not None:
                    data = shardable(tensor)
                    each.register_parameter(part, nn.Parameter(data, requires_grad=False))
    return torch_fully_shard(module, **options)
