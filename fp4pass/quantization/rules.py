"""Rules: the first match for a layer, and the rules that are built in."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Sequence

from torch import fx, nn

from .._compat.transformers import HEADS, newly_initialized, output_embeddings, task_heads
from .._compat.transformers_loading import names_in_model
from ..errors import RuleError, nearest
from ..graph.match import weight_readers
from ..record.config import Rule
from ..record.source_folder import source_folder, tensor_files
from .scan import EMBEDDINGS, LinearLayer, SkippedLayer, caller_of, is_router, operator_of

# Why a layer is skipped that was not in the folder its model came from.
NEW = "its source has no weight for it, so it is new; add a rule to quantize it"


class BuiltInRules:
    """The layers that are skipped unless a rule takes them."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs = output_embeddings(model)
        self._heads = task_heads(model)
        # A graph has only the names.
        self._traced: dict[str, str] = getattr(model, "meta", {}).get(HEADS, {})
        self._new = _new_weights(model)
        self._tied = _embedding_weights(model)
        self._routers = _routers(model)

    def reason(self, layer: LinearLayer) -> str:
        """Return why a layer is skipped, or ""."""
        caller = caller_of(layer.module)
        traced = self._traced.get(layer.name)
        if caller in self._outputs or traced == "" or "lm_head" in layer.name.split("."):
            return "output embedding; add a rule to quantize it"
        if head := self._heads.get(caller) or traced:
            return f"a head that {head} adds to its base model; add a rule to quantize it"
        if layer.weight_key in self._new:
            return NEW
        if layer.weight_key in self._tied:
            return "its weight is an embedding's; add a rule to quantize it"
        if is_router(layer.name) or layer.module in self._routers:
            return "a router; add a rule to quantize it"
        return ""


def _new_weights(model: nn.Module) -> set[int]:
    """Return the identities of weights that `from_pretrained` made, for its folder lacks them."""
    unread = newly_initialized(model)
    folder = source_folder(model) if unread else None
    if folder is None:
        return set()
    files = tensor_files(folder)
    if not files:
        return set()
    # Of another size it may be pruned, which is not new.
    there = set(names_in_model(model, files, merged=True).values())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {id(parameters[name]) for name in unread - there}


def _routers(model: nn.Module) -> set[nn.Module]:
    """Return the layers beside experts that choose among them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        children = list(module.named_children())
        experts = [child for name, child in children if "expert" in name]
        counts = {count for each in experts if (count := _expert_count(each)) > 1}
        for name, child in children if counts else ():
            if child not in experts and _chooses(name, child, counts):
                found |= {each for each in child.modules() if isinstance(each, nn.Linear)}
    return found


def _chooses(name: str, module: nn.Module, counts: Container[int]) -> bool:
    """Return whether a module beside experts chooses among them, whatever it does before."""
    # Here a "gate" is no gated MLP.
    if is_router(name) or isinstance(vars(module).get("top_k"), int):
        return True
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return bool(linears) and linears[-1].out_features in counts


def _expert_count(experts: nn.Module) -> int:
    """Return how many experts are listed or stacked in a module, 0 if it does not say."""
    while isinstance(below := experts._modules.get("base_layer"), nn.Module):
        # The module that an adapter was put around.
        experts = below
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    stacked = (each.shape[0] for each in experts.parameters(recurse=False) if each.ndim == 3)
    return next(stacked, 0)


def _embedding_weights(model: nn.Module) -> set[int]:
    """Return the identities of all parameters that an embedding looks up."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    if isinstance(model, fx.GraphModule):
        for node in model.graph.find_nodes(op="get_attr"):
            if not EMBEDDINGS.isdisjoint(map(operator_of, weight_readers(node))):
                path, _, name = node.target.rpartition(".")
                found.add(id(model.get_submodule(path)._parameters.get(name)))
    return found


def matching_rule(name: str, rules: Iterable[Rule]) -> Rule | None:
    """Return the first rule that matches the name of a layer, None if none does."""
    return next((rule for rule in rules if fnmatch.fnmatchcase(name, rule[0])), None)


def require_matches(rules: Sequence[Rule], layers: Sequence[LinearLayer]) -> None:
    """Raise RuleError for a rule that matches nothing, or asks only for what is impossible."""
    names = [layer.name for layer in layers]
    for pattern, options in rules:
        matched = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if matched:
            first = matched[0]
            impossible = all(isinstance(layer, SkippedLayer) for layer in matched)
            if options is not None and impossible and isinstance(first, SkippedLayer):
                raise RuleError(
                    f"The rule for {pattern!r} matches only what cannot be quantized, as "
                    f"{first.label}: {first.skip_reason}. Leave the rule out, or skip them with "
                    f"({pattern!r}, None)."
                )
            continue
        raise RuleError(
            f"The rule for {pattern!r} matches no linear layer of the model, whose names look "
            f"like {names[0] if names else '(there are none)'!r}.{nearest(pattern, names)}"
        )
