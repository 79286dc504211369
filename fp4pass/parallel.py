"""Split converted models over processes by a plan of styles as those of torch, or by FSDP.

A split module computes with parts of tensors, as plain ones, and gives no gradients.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from . import ops
from ._compat.torch import shardable, shared_words
from ._compat.transformers import fit_caches
from .core.fingerprint import digest_of
from .core.formats import WHOLE
from .distributed import Ranks
from .errors import OptionError, ShapeError, StateError, expected
from .kernels.common.rounding import row_amax, scale_of
from .kernels.norm.naive import SQUARES
from .kernels.reduce.naive import LARGEST
from .nn import experts, linear
from .nn.experts import QuantizedExperts, QuantizedExpertStack, require_adapter
from .nn.linear import PACKED, SCALE, PackedBlocks, QuantizedLinear, StoredWeight
from .nn.packed_linear import PackedLinear, swap_class
from .record.config import LinearConfig
from .record.state import get_state, unwrap

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel", "fully_shard", "parallelize"]

_log = logging.getLogger(__name__)


class SplitModule(nn.Module):
    """The part of a module in this process; a state dict has its parts as DTensors."""

    is_split: ClassVar[bool] = True
    mesh: DeviceMesh
    split: Mapping[str, int]  # the dimension of a parameter or buffer of which this is a part

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
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


def moved(x: Tensor, mesh: DeviceMesh, now: Placement, wanted: Placement) -> Tensor:
    """Return what this process has of a tensor that is placed as `now`, placed as `wanted`."""
    return as_dtensor(x, mesh, now).redistribute(placements=[wanted]).to_local()


def require_no_gradient(x: Tensor) -> None:
    """Raise StateError where the gradient of an input would be that of one process."""
    if x.requires_grad and torch.is_grad_enabled():
        raise StateError(
            "A layer that is split over processes computes no gradients. Run it under "
            "torch.no_grad(), or train with fp4pass.parallel.fully_shard."
        )


def summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the local outputs of all processes, perhaps in place."""
    if y.numel() * y.element_size() <= LARGEST:
        return ops.all_reduce(y, mesh.get_group().group_name, False)
    # As a DTensor does it, without its layers of Python.
    y = y.contiguous()
    dist.all_reduce(y, group=mesh.get_group())
    return y


def with_shared_scale(
    weight: StoredWeight, config: LinearConfig, x: Tensor, mesh: DeviceMesh
) -> StoredWeight:
    """Return buffers with one dynamic scale, or one a token, for the inputs of all processes."""
    fmt = config.input_format
    if fmt is None:
        return weight
    of_tokens = fmt.has_float_scale and fmt.block == WHOLE
    is_of_tokens = of_tokens and weight.input_global_scale is None
    if not is_of_tokens and not linear.needs_dynamic_scale(weight, config):
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


class SplitLinear(SplitModule, QuantizedLinear):
    """A quantized linear layer of which this process has whole blocks."""

    packed_attributes = (*QuantizedLinear.packed_attributes, "mesh", "split", "is_whole")
    # Of the weight [N, K] and its sizes, and what a layer reads and gives where it has a part.
    dim: ClassVar[int]
    divided: ClassVar[str]
    layouts: ClassVar[tuple[Placement, Placement]]

    is_whole: bool  # the tensor of which it has a part is whole outside of it

    @property
    def weight(self) -> Tensor:
        """The dense weight, as a DTensor of which this process has a part."""
        dim = 1 - self.dim if self.transposed else self.dim
        return as_dtensor(super().weight.contiguous(), self.mesh, Shard(dim))

    def extra_repr(self) -> str:
        """Return the sizes and how the layer is quantized and split, for print(model)."""
        return f"{super().extra_repr()}, part {self.mesh.get_local_rank()} of {self.mesh.size()}"


class ColumnLinear(SplitLinear):
    """A layer of which each process has some of the outputs."""

    dim, divided = 0, "out_features"
    layouts = Replicate(), Shard(-1)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs of this process, or of all."""
        require_no_gradient(input)
        x = PackedLinear.checked_input(self, input)
        y = linear.output_of(self, input, x, linear.read_buffers(self), self.bias)
        return moved(y, self.mesh, Shard(-1), Replicate()) if self.is_whole else y


class RowLinear(SplitLinear):
    """A layer of which each process reads some of the inputs."""

    dim, divided = 1, "in_features"
    layouts = Shard(-1), Replicate()

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the whole layer."""
        require_no_gradient(input)
        if self.is_whole:
            input = moved(input, self.mesh, Replicate(), Shard(-1))
        x = PackedLinear.checked_input(self, input)
        # One scale for the columns of all processes.
        weight = with_shared_scale(linear.read_buffers(self), self.config, x, self.mesh)
        y = summed(linear.output_of(self, input, x, weight, None), self.mesh)
        # Once, to the sum.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def require_whole_blocks(name: str, layer: nn.Module, kind: type[SplitLinear], size: int) -> None:
    """Raise ShapeError unless a linear layer, packed or not, can be split with no block cut."""
    unit, why, count = 1, "", getattr(layer, kind.divided)
    if isinstance(layer, QuantizedLinear):
        config = layer.config
        # Tiles have one scale, which is in every process where all share it.
        fmt, is_column = config.format, kind is ColumnLinear
        rotation = (config.output_rotation if is_column else config.rotation) or 1
        of_inputs = (config.input_format or fmt).block or 1
        tile = (fmt.rows or 1) if is_column else math.lcm(fmt.block or 1, of_inputs)
        unit = math.lcm(tile, rotation)
        rotated = f" rotated by {rotation}" if rotation > 1 else ""
        why = f"the block of {config.scheme}{rotated}" if tile > 1 else "the rotation"
    if count % (size * unit):
        each = f"{size} ranks x {unit} ({why})" if unit > 1 else f"{size} ranks"
        raise ShapeError(
            f"{name}: {kind.divided}={count} is not a multiple of {each}, so that it cannot be "
            "split. Use fewer ranks, or leave the layer out of the plan (each rank then has it "
            "whole)."
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
        # Tokens [T, K] are the same everywhere, what experts made of them [T, k, K] is not; one
        # process has all columns of each, whatever its own scale.
        weight = self.packed_weight
        is_shared = x.ndim > 2 and linear.needs_dynamic_scale(weight, self.config)
        return weight if not is_shared else with_shared_scale(weight, self.config, x, self.mesh)


class SplitExperts(SplitModule, QuantizedExperts):
    """The experts of a mixture that this process has, and adds to the tokens of all."""

    first: int  # the id of its first expert
    count: int
    adds_identities: bool  # what no expert computes is added by one process

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the whole mixture."""
        require_no_gradient(next(iter((*args, *kwargs.values()))))
        # By name, not super(), as of layers.
        return summed(QuantizedExperts.forward(self, *args, **kwargs), self.mesh)

    def held(self, ids: Tensor) -> Tensor:
        """Return where the experts ids [T, k] lie in the stacks; `count` for those elsewhere."""
        own = ids - self.first
        return torch.where((own >= 0) & (own < self.count), own, self.count)

    def extra_repr(self) -> str:
        """Return which experts these are, for print(model)."""
        return f"experts {self.first} to {self.first + self.count - 1}"


def split_experts(owner: Any, mesh: DeviceMesh) -> None:
    """Keep only the experts that this process computes with, in place."""
    count = 0
    biases: dict[str, int] = {}
    for path, stack in experts.packed_stacks(owner).items():
        holder, last = experts.holder_of(owner, path)
        split = {linear.PACKED: 0, linear.SCALE: 0}
        if stack.weight_global_scale is not None:
            split[linear.GLOBAL] = 0
        if stack.input_global_scale is not None and len(stack.input_global_scale) > 1:
            split[linear.INPUT_GLOBAL] = 0
        split_module(stack, SplitExpertStack, split, mesh)
        bias = holder._parameters.get(f"{last}_bias")
        if bias is not None:
            bias.data = local_shard(bias.data, 0, mesh)
            biases[f"{last}_bias"] = 0
        count = len(stack.weight_packed)
    rank = mesh.get_local_rank()
    facts = {"first": rank * count, "count": count, "adds_identities": rank == 0}
    swap_class(owner, SplitExperts, attributes=facts | {"mesh": mesh, "split": biases})


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
        given = self.input_layouts[0], self.output_layouts[0]
        known = (self.kind.layouts, (Replicate(), Replicate()))
        if isinstance(module, QuantizedLinear) and not (given in known and self.use_local_output):
            wanted = f"layouts {known[0]} or {known[1]}, and a local output"
            raise OptionError(expected(name, wanted, f"{given}"))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        if not isinstance(module, QuantizedLinear):
            return super()._apply(module, device_mesh)  # type: ignore[misc]
        kind, fmt, split = self.kind, module.config.format, {linear.PACKED: self.kind.dim}
        if (fmt.rows, fmt.block)[kind.dim] != WHOLE:
            split[linear.SCALE] = kind.dim
        if module.bias is not None and kind is ColumnLinear:
            split["bias"] = 0
        sizes = {each: getattr(module, each) for each in ("out_features", "in_features")}
        sizes[kind.divided] //= device_mesh.size()
        is_whole = self.input_layouts[0] == self.output_layouts[0]
        split_module(module, kind, split, device_mesh, is_whole=is_whole, **sizes)
        return module


class ColwiseParallel(_LinearStyle, torch_parallel.ColwiseParallel):
    """Split a linear layer by its outputs, packed or not.

    Takes the arguments of `torch.distributed.tensor.parallel.ColwiseParallel`; a packed layer only
    whole inputs, and gives plain tensors, its part or with `output_layouts=Replicate()` the whole.

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

    Takes the arguments of `torch.distributed.tensor.parallel.RowwiseParallel`; a packed layer only
    inputs of which each rank has its part, or with `input_layouts=Replicate()` the whole, and gives
    the whole. Inputs are quantized with one global scale for all ranks.

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
        stacks = experts.packed_stacks(module) if isinstance(module, QuantizedExperts) else {}
        if not stacks or set(stacks) != set(experts.require_adapter(module).names):
            raise OptionError(
                f"{name}: expected a mixture of which all stacks are packed, got "
                f"{type(module).__name__}. Convert them all, or leave it out of the plan (each "
                "rank then has it whole)."
            )
        count = len(next(iter(stacks.values())).weight_packed)
        if count % size:
            raise ShapeError(
                f"{name}: {count} experts cannot be divided among {size} ranks. Use a number of "
                "ranks that divides them, or leave them out of the plan (each rank then has all)."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        split_experts(module, device_mesh)
        return module


# Styles by their names in transformers. "_rep" and the like read or give whole tensors.
_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "moe_tp_experts": ExpertParallel(),
}

# Those of modules that every rank has whole; some are for gradients, which there are none of.
_WHOLE = (
    *("embedding_rowwise", "embedding_colwise", "replicate", "replicated_with_grad_allreduce"),
    *("mla_kv_a_proj", "moe_identity_expert"),
)


def parallelize(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle] | None = None
) -> nn.Module:
    """Split a converted model over processes, for tensor-parallel inference.

    Every process calls it with the same model. Each keeps its part of the layers in the plan and
    all of the others, on its device of the mesh. Experts are divided, each whole. Parameters are
    frozen.

    Args:
        model: converted or loaded, in place; best on the CPU.
        mesh: of one dimension, as `torch.distributed.init_device_mesh` returns it.
        plan: styles by the names of modules, in which `*` is any number: of this package or of
            torch, or their names in plans of transformers. Default: the plan of a model of
            transformers.

    Returns:
        The model.

    Raises:
        StateError: the model is not converted, split already, offloaded, or not the same in all
            processes.
        ShapeError: a layer has too few inputs, outputs, heads or experts to be split.
        OptionError: there is no plan, or a module in it cannot be split.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> model = fp4pass.parallelize(model, mesh, {"0": "colwise", "2": "rowwise"})
        >>> model(batches[0]).shape
        torch.Size([4, 32])
    """
    root: Any = unwrap(model)
    state = get_state(root)
    if state is None or state.status != "converted":
        raise StateError("The model is not converted. Call fp4pass.convert(model) first.")
    for each in root.modules():
        if isinstance(each, SplitModule):
            raise StateError("The model is split already.")
        if isinstance(each, fx.GraphModule):
            raise OptionError(
                "A graph reads weights without calling their layers. Split the model of modules."
            )
    if mesh.ndim != 1:
        raise OptionError(expected("mesh", "a DeviceMesh of one dimension", mesh))
    given = getattr(root, "tp_plan", None) if plan is None else plan
    if not given:
        raise OptionError(
            f"{type(root).__name__} has no plan of its own. Give plan={{name: style}}, or call "
            "torch.distributed.tensor.parallel.parallelize_module with styles of fp4pass.parallel."
        )
    chosen = _chosen(root, given)
    # All, before the first is changed.
    for name, style in chosen.items():
        if hasattr(style, "check"):
            style.check(name, root.get_submodule(name), mesh.size())
            _require_whole_heads(root, name, style, mesh.size())
    _require_equal(root, chosen, mesh)
    for name, style in chosen.items():
        parallelize_module(root.get_submodule(name), mesh, style, src_data_rank=None)
    root.requires_grad_(False)
    kind = mesh.device_type
    root.to(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind)
    reach_peers(mesh)
    fit_caches(root)
    return model


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
                if (tensor := each._buffers.pop(part, None)) is not None:
                    parameter = nn.Parameter(shardable(tensor), requires_grad=False)
                    each.register_parameter(part, parameter)
    return torch_fully_shard(module, **options)


def _require_equal(root: nn.Module, chosen: Mapping[str, object], mesh: DeviceMesh) -> None:
    """Raise StateError for weights elsewhere, and for models of other first elements."""
    facts: list[Any] = [(name, type(style).__name__) for name, style in chosen.items()]
    state = root.state_dict().items()
    for name, tensor in ((n, each) for n, each in state if isinstance(each, Tensor)):
        if tensor.is_meta:
            raise StateError(
                f"{name}: it is on the meta device, without values. Load the model without a "
                "device_map that offloads."
            )
        facts += [name, tuple(tensor.shape), tensor.detach().reshape(-1)[:64]]
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    ranks.require_equal("The model to split", digest_of(*facts))


def _chosen(root: nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Return the style of each module that is to be split, by its name."""
    rule = _rule(plan)
    # The stacks of experts, and what lies in them.
    stacks = {
        f"{name}.{stack}"
        for name, module in root.named_modules()
        if isinstance(module, QuantizedExperts)
        for stack in require_adapter(module).names
    }
    found: dict[str, ParallelStyle] = {}
    unused = set(plan)
    for name, module in root.named_modules():
        key = rule(name)
        if key is None:
            continue
        unused.discard(key)
        style = plan[key]
        if name in stacks or style in _WHOLE:
            continue
        if style == "moe_tp_experts" and not isinstance(module, QuantizedExperts):
            _log.info("%s: not packed, so that each rank has all experts", name)
            continue
        chosen = _STYLES.get(style) if isinstance(style, str) else style
        if not isinstance(chosen, ParallelStyle):
            known = ", ".join([*_STYLES, *_WHOLE])
            raise OptionError(
                f"{expected(f'The style of {name}', f'a ParallelStyle or one of {known}', style)}. "
                "Give plan= without this part of the model."
            )
        if module is root.get_submodule(name):
            found[name] = chosen
    for name, parameter in root.named_parameters():
        key = rule(name)
        if key is None or plan[key] in _WHOLE:
            continue
        unused.discard(key)
        if parameter.ndim < 3 and name not in stacks:
            raise OptionError(
                f"{name}: only linear layers and experts can be split, got a parameter. Give plan= "
                "without this part of the model."
            )
    if plan is not getattr(root, "tp_plan", None) and unused:
        raise OptionError(f"plan: {', '.join(sorted(unused))} matches nothing in the model.")
    return found


def _rule(plan: Mapping[str, Any]) -> Callable[[str], str | None]:
    """Return a function that gives the key of a plan that a name matches, None without one."""
    patterns = {re.compile(re.escape(n).replace(r"\*", r"\d+")): n for n in plan}

    def rule(name: str) -> str | None:
        return next((key for regex, key in patterns.items() if regex.fullmatch(name)), None)

    return rule


def _require_whole_heads(root: nn.Module, name: str, style: Any, size: int) -> None:
    """Raise ShapeError if outputs of an attention would be split within a head."""
    if not isinstance(style, ColwiseParallel) or style.output_layouts == (Replicate(),):
        return
    count: Any = root.get_submodule(name).out_features
    head = getattr(root.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head, int) and count % head == 0 and count // head % size:
        raise ShapeError(
            f"{name}: {count // head} heads cannot be divided among {size} ranks. Use a number of "
            "ranks that divides them, or give plan= without this attention."
        )


def reach_peers(mesh: DeviceMesh) -> bool:
    """Prepare reductions over a mesh of one dimension; return whether its GPUs reach each other."""
    # Every process makes the call. Without such memory reductions go through NCCL, and a log says
    # so.
    group = mesh.get_group()
    name = group.group_name
    if mesh.device_type != "cuda" or mesh.size() == 1:
        return False
    # Triton is imported where there is a GPU.
    from .kernels.reduce.triton import MEMORIES

    known = MEMORIES.get(name)
    if known is not None and known.group is group:
        return True
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), group)
    memory: Any = None
    problems = ranks.gather(_far_peer(ranks))
    if not any(problems):
        problem = ""
        try:
            memory = _memory(ranks)
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        problems = ranks.gather(problem)
    if not any(problems) and memory is not None:
        MEMORIES[name] = memory
        return True
    if ranks.rank == 0:
        problem = next(filter(None, problems))
        _log.info("Reductions of a few rows go through NCCL: %s.", problem)
    return False


def _far_peer(ranks: Ranks) -> str:
    """Return why this GPU does not reach that of another process, "" if that is not known."""
    own = torch.cuda.current_device()
    seen = (socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for rank, (place, device) in enumerate(ranks.gather((seen, own))):
        if place != seen:
            return f"rank {rank} is on another host, or sees other GPUs"
        if device != own and not torch.cuda.can_device_access_peer(own, device):
            return f"GPU {own} does not reach the memory of GPU {device}"
    return ""


def _memory(ranks: Ranks) -> Any:
    """Return the memory of all processes. Raises RuntimeError where there is none."""
    from .kernels.reduce.triton import Memory, count_of_words, reduce

    words, addresses = shared_words(count_of_words(ranks.size), ranks.group)
    words.zero_()
    found = Memory.of(words, addresses, ranks.rank, ranks.group)
    # All is zero, and the kernel is loaded, before the first process sends anything.
    nothing = words.new_empty((0, SQUARES), dtype=torch.bfloat16)
    for maximum in (False, True):
        reduce(nothing, found, maximum)
    reduce(nothing, found, False, nothing)
    torch.cuda.synchronize()
    return found
