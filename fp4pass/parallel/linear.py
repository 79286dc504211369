"""Quantized linear layers of which each process has rows (column-parallel) or columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import ops
from ..errors import ShapeError
from ..linear import PACKED, SCALE, QuantizedLinear, StoredWeight, needs_dynamic_scale
from ..packed_linear import become
from .placing import as_sharded, part_of, placed, shared_amax, taken, with_summed_gradient
from .split import SplitModule


@dataclass(frozen=True)
class Layouts:
    """How the input and the output of a layer are placed, as the styles of torch say it."""

    input: Placement
    output: Placement
    local: bool  # give a plain tensor, not a DTensor


class SplitLinear(SplitModule, QuantizedLinear):
    """A quantized linear layer of which this process has whole blocks."""

    packed_attributes = (*QuantizedLinear.packed_attributes, "mesh", "split", "layouts")
    # Of the weight [N, K], what the layer reads, and what its product is.
    dim: ClassVar[int]
    wanted: ClassVar[Placement]
    product: ClassVar[Placement]

    layouts: Layouts

    @property
    def weight(self) -> Tensor:
        """The dense weight, as a DTensor of which this process has a part."""
        dim = 1 - self.dim if self.transposed else self.dim
        return as_sharded(super().weight.contiguous(), dim, self.mesh)

    def forward(self, input: Tensor) -> Tensor:
        """Return what the whole layer does, placed as the style says."""
        layouts, mesh = self.layouts, self.mesh
        y = super().forward(taken(input, mesh, layouts.input, self.wanted))
        y = placed(y, mesh, self.product, layouts.output)
        if self.bias is not None and not self.adds_bias:
            # Once, to the sum.
            y = y + self.bias.to(y.dtype)
        return y if layouts.local else DTensor.from_local(y, mesh, [layouts.output])

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized and split, for print(model)."""
        return f"{super().extra_repr()}, part {self.mesh.get_local_rank()} of {self.mesh.size()}"


class ColumnLinear(SplitLinear):
    """A layer of which each process has some of the outputs."""

    dim = 0
    wanted = Replicate()
    product = Shard(-1)

    def checked_input(self, input: Tensor) -> Tensor:
        """Return an input that all processes read."""
        return with_summed_gradient(super().checked_input(input), self.mesh)


class RowLinear(SplitLinear):
    """A layer of which each process reads some of the inputs."""

    dim = 1
    wanted = Shard(-1)
    product = Partial()
    adds_bias = False

    def weight_for(self, x: Tensor) -> StoredWeight:
        """Return the buffers, with one global scale for the columns of all processes."""
        weight, config = self.packed_weight, self.config
        if not needs_dynamic_scale(weight, config):
            return weight
        rotation = config.input_rotation
        amax = shared_amax(ops.rotate(x, rotation) if rotation else x, self.mesh)
        scale = ops.dynamic_global_scale(amax, config.format.key)
        return weight._replace(input_global_scale=scale)


def require_whole_blocks(name: str, layer: QuantizedLinear, kind: type[Any], size: int) -> None:
    """Raise ShapeError unless a layer can be split with no block cut."""
    config = layer.config
    if kind is ColumnLinear:
        what, count, unit = "out_features", layer.out_features, config.output_rotation or 1
        each = f"{size} ranks" + (f" x {unit} (the rotation)" if unit > 1 else "")
    else:
        what, count = "in_features", layer.in_features
        block = config.format.block
        unit = math.lcm(block, config.rotation or 1)
        rotated = f" rotated by {config.rotation}" if config.rotation else ""
        each = f"{size} ranks x {unit} (the block of {config.format.key}{rotated})"
    if count % (size * unit):
        raise ShapeError(
            f"{name}: {what}={count} is not a multiple of {each}, so that it cannot be split. Use "
            "fewer ranks, or leave the layer out of the plan (each rank then has it whole)."
        )


def split_linear(
    name: str, layer: QuantizedLinear, kind: type[SplitLinear], mesh: DeviceMesh, layouts: Layouts
) -> None:
    """Keep only the part of a layer that this process computes with, in place."""
    require_whole_blocks(name, layer, kind, mesh.size())
    split = {PACKED: kind.dim, SCALE: kind.dim}
    if layer.bias is not None and kind.adds_bias:
        split["bias"] = 0
    tensors = {each: getattr(layer, each) for each in layer.packed_buffers}
    attributes = {each: getattr(layer, each) for each in QuantizedLinear.packed_attributes}
    for each, dim in split.items():
        if each in tensors:
            tensors[each] = part_of(tensors[each], dim, mesh)
        else:
            bias = layer.get_parameter(each)
            bias.data = part_of(bias.data, dim, mesh)
    sizes = {"out_features": tensors[PACKED].shape[0]}
    sizes["in_features"] = layer.config.format.columns(tensors[PACKED].shape[1])
    attributes |= {"mesh": mesh, "split": split, "layouts": layouts, **sizes}
    become(layer, kind, buffers=tensors, attributes=attributes)
