"""Split a converted model over processes by a plan, or shard it with FSDP."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .._compat.torch import shardable
from .._compat.transformers import fit_caches
from ..core.fingerprint import digest_of
from ..distributed import Ranks
from ..errors import OptionError, ShapeError, StateError, expected
from ..nn.experts import QuantizedExperts, require_adapter
from ..nn.linear import PACKED, SCALE, PackedBlocks
from ..record.state import get_state, unwrap
from .peers import reach_peers
from .styles import ColwiseParallel, ExpertParallel, RowwiseParallel, SplitModule

_log = logging.getLogger(__name__)

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
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "moe_identity_expert",
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
    """Raise StateError for weights elsewhere, and for a model that another process does not have.

    Of each tensor the first elements are compared.
    """
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
