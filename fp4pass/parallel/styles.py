"""Parallel styles of torch.distributed.tensor.parallel for packed layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_parallel

from ..errors import OptionError
from ..nn.linear import QuantizedLinear
from .experts import require_whole_experts, split_experts
from .linear import (
    ColumnLinear,
    Layouts,
    RowLinear,
    SplitLinear,
    require_whole_blocks,
    split_linear,
)


class _LinearStyle:
    """A style of torch that knows packed layers too."""

    kind: type[SplitLinear]
    input_layouts: tuple[Any, ...]
    output_layouts: tuple[Any, ...]
    use_local_output: bool

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Raise ShapeError or OptionError unless a module can be split among so many ranks."""
        if isinstance(module, SplitLinear):
            raise OptionError(f"{name}: it is split already.")
        if not isinstance(module, QuantizedLinear | nn.Linear):
            raise OptionError(
                f"{name}: expected a linear layer, got {type(module).__name__}. Leave it out of "
                "the plan; adapters have to be merged or removed before."
            )
        require_whole_blocks(name, module, self.kind, size)
        if self.kind is RowLinear and self.output_layouts[0] == Shard(-1):
            raise OptionError(f"{name}: outputs of rows are replicated, or split along tokens.")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(module).__name__
        self.check(name, module, device_mesh.size())
        if not isinstance(module, QuantizedLinear):
            return super()._apply(module, device_mesh)  # type: ignore[misc]
        layouts = Layouts(self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        split_linear(name, module, self.kind, device_mesh, layouts)
        return module


class ColwiseParallel(_LinearStyle, torch_parallel.ColwiseParallel):
    """Split a linear layer by its outputs, packed or not.

    Takes the arguments of `torch.distributed.tensor.parallel.ColwiseParallel`.

    Raises:
        ShapeError: out_features is not a multiple of the number of ranks.
        OptionError: the module is no linear layer.

    Example:
        >>> styles = fp4pass.parallel
        >>> plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> model = fp4pass.parallelize(model, mesh, plan)
    """

    kind = ColumnLinear


class RowwiseParallel(_LinearStyle, torch_parallel.RowwiseParallel):
    """Split a linear layer by its inputs, packed or not; no block of a packed weight is cut.

    Takes the arguments of `torch.distributed.tensor.parallel.RowwiseParallel`. Inputs are
    quantized with one global scale for all ranks, and the bias is added once.

    Raises:
        ShapeError: in_features is not a multiple of ranks x block (and rotation).
        OptionError: the module is no linear layer.

    Example:
        >>> styles = fp4pass.parallel
        >>> plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> model = fp4pass.parallelize(model, mesh, plan)
    """

    kind = RowLinear


class ExpertParallel(torch_parallel.ParallelStyle):
    """Divide packed experts among the ranks, each with all its rows and columns.

    All ranks read all tokens; what their experts make of them is summed.

    Raises:
        ShapeError: the number of experts is not a multiple of the number of ranks.
        OptionError: the module is no mixture of which all stacks are packed.

    Example:
        >>> plan = {"model.layers.*.mlp.experts": fp4pass.parallel.ExpertParallel()}
        >>> mixture = fp4pass.parallelize(mixture, mesh, plan)
    """

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Raise ShapeError or OptionError unless experts can be divided among so many ranks."""
        require_whole_experts(name, module, size)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_experts(type(module).__name__, module, device_mesh)
        return module
