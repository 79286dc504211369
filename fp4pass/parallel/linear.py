"""Split quantized linear layers by rows (column-parallel) or columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..core.formats import WHOLE
from ..errors import ShapeError
from ..linear import PACKED, SCALE, QuantizedLinear, StoredWeight
from .split import (
    SplitModule,
    redistribute_output,
    split_module,
    summed,
    to_local_input,
    with_shared_scale,
    with_summed_gradient,
    wrap_as_dtensor,
)


@dataclass(frozen=True)
class Layouts:
    """Placements of the input and the output of a layer, as the styles of torch say it."""

    input: Placement
    output: Placement
    local: bool  # give a plain tensor, not a DTensor


@dataclass(frozen=True)
class Moves:
    """The moves of tensors that are left to do between a layer and its neighbours.

    torch.compile checks at every call what a forward reads: of bools it takes a fraction of the
    time that placements take.
    """

    reads: bool  # local inputs are not placed as the layer reads them
    sums: bool  # products are summed over all processes
    writes: bool  # products are placed in another way

    @staticmethod
    def between(kind: type[SplitLinear], layouts: Layouts) -> Moves:
        """Return the moves of a kind of layer with such neighbours."""
        moved = kind.product != layouts.output
        sums = kind.product == Partial() and layouts.output == Replicate()
        return Moves(kind.wanted != layouts.input, sums, moved and not sums)


class SplitLinear(SplitModule, QuantizedLinear):
    """A quantized linear layer of which this process has whole blocks."""

    packed_attributes = (*QuantizedLinear.packed_attributes, "mesh", "split", "layouts", "moves")
    # Of the weight [N, K] and its sizes, the input that the layer reads, and its product.
    dim: ClassVar[int]
    divided: ClassVar[str]
    wanted: ClassVar[Placement]
    product: ClassVar[Placement]

    layouts: Layouts
    moves: Moves

    @property
    def weight(self) -> Tensor:
        """The dense weight, as a DTensor of which this process has a part."""
        dim = 1 - self.dim if self.transposed else self.dim
        return wrap_as_dtensor(super().weight.contiguous(), dim, self.mesh)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the whole layer, placed as the style says."""
        moves, mesh = self.moves, self.mesh
        if moves.reads or isinstance(input, DTensor):
            input = to_local_input(input, mesh, self.layouts.input, self.wanted)
        # Not super(): torch.compile checks the base classes of each layer at every call then.
        y = QuantizedLinear.forward(self, input)
        if moves.sums:
            y = summed(y, mesh)
        elif moves.writes:
            y = redistribute_output(y, mesh, self.product, self.layouts.output)
        if self.bias is not None and not self.adds_bias:
            # Once, to the sum.
            y = y + self.bias.to(y.dtype)
        layouts = self.layouts
        return y if layouts.local else DTensor.from_local(y, mesh, [layouts.output])

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized and split, for print(model)."""
        return f"{super().extra_repr()}, part {self.mesh.get_local_rank()} of {self.mesh.size()}"


class ColumnLinear(SplitLinear):
    """A layer of which each process has some of the outputs."""

    dim, divided = 0, "out_features"
    wanted = Replicate()
    product = Shard(-1)

    def checked_input(self, input: Tensor) -> Tensor:
        """Return an input that all processes read."""
        return with_summed_gradient(QuantizedLinear.checked_input(self, input), self.mesh)


class RowLinear(SplitLinear):
    """A layer of which each process reads some of the inputs."""

    dim, divided = 1, "in_features"
    wanted = Shard(-1)
    product = Partial()
    adds_bias = False

    def weight_for(self, x: Tensor) -> StoredWeight:
        """Return the buffers, with one scale for the columns of all processes."""
        return with_shared_scale(self.packed_weight, self.config, x, self.mesh)


def require_whole_blocks(name: str, layer: nn.Module, kind: type[SplitLinear], size: int) -> None:
    """Raise ShapeError unless a linear layer, packed or not, can be split with no block cut."""
    unit, why, count = 1, "", getattr(layer, kind.divided)
    if isinstance(layer, QuantizedLinear):
        config = layer.config
        # Tiles have one scale, which is in every process where all share it.
        fmt, is_column = config.format, kind is ColumnLinear
        rotation = (config.output_rotation if is_column else config.rotation) or 1
        tile = (fmt.rows if is_column else fmt.block) or 1
        unit = math.lcm(tile, rotation)
        rotated = f" rotated by {rotation}" if rotation > 1 else ""
        why = f"the block of {fmt.key}{rotated}" if tile > 1 else "the rotation"
    if count % (size * unit):
        each = f"{size} ranks x {unit} ({why})" if unit > 1 else f"{size} ranks"
        raise ShapeError(
            f"{name}: {kind.divided}={count} is not a multiple of {each}, so that it cannot be "
            "split. Use fewer ranks, or leave the layer out of the plan (each rank then has it "
            "whole)."
        )


def split_linear(
    name: str, layer: QuantizedLinear, kind: type[SplitLinear], mesh: DeviceMesh, layouts: Layouts
) -> None:
    """Keep only the part of a layer that this process computes with, in place."""
    require_whole_blocks(name, layer, kind, mesh.size())
    fmt, split = layer.config.format, {PACKED: kind.dim}
    if (fmt.rows, fmt.block)[kind.dim] != WHOLE:
        split[SCALE] = kind.dim
    if layer.bias is not None and kind.adds_bias:
        split["bias"] = 0
    sizes = {each: getattr(layer, each) for each in ("out_features", "in_features")}
    sizes[kind.divided] //= mesh.size()
    moves = Moves.between(kind, layouts)
    split_module(layer, kind, split, mesh, layouts=layouts, moves=moves, **sizes)
