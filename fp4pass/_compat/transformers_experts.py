"""Classes of experts of transformers: their weights, and their computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StackView(NamedTuple):
    """The layout of a parameter that is a stack [E, N, K], and may hold matrices of no expert."""

    experts: int
    transposed: bool  # the parameter has [K, N] for each expert
    shape: tuple[int, ...]  # of the parameter

    @property
    def spare(self) -> int:
        """The number of matrices of the parameter that belong to no expert."""
        return self.shape[0] - self.experts

    def of(self, parameter: Tensor) -> Tensor:
        """Return a parameter as [E, N, K]."""
        own = parameter[: self.experts]
        return own.mT if self.transposed else own

    def parameter(self, stack: Tensor) -> Tensor:
        """Return a stack [E, N, K] as the parameter, with zeros for matrices of no expert."""
        whole = stack.mT if self.transposed else stack
        if self.spare:
            whole = F.pad(whole, (0, 0, 0, 0, 0, self.spare))
        return whole.reshape(self.shape)


class Routed(NamedTuple):
    """The arguments of a call of a module of experts."""

    hidden: Tensor  # [T, K]
    ids: Tensor  # [T, k], the experts of each token; other numbers are no expert
    weights: Tensor | None  # [T, k]; None if the caller weights, and k is 1


@dataclass(frozen=True)
class ExpertsAdapter:
    """The stacks of a class of experts, and its computation; the methods are of most classes."""

    # The parameters that are stacks, those that read one input together: first the input of the
    # module, then its activations.
    stages: tuple[tuple[str, ...], ...] = (("gate_up_proj",), ("down_proj",))
    transposed: tuple[str, ...] = ()  # those that have [K, N] for each expert
    experts: str = ""  # the attribute with the number of experts, "" for all that it holds
    # The linear layers that others make of an expert, by the stack whose rows they share.
    pieces: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are stacks."""
        return tuple(name for stage in self.stages for name in stage)

    def view(self, owner: Any, name: str, parameter: Tensor) -> StackView:
        """Return how a parameter is a stack."""
        count = getattr(owner, self.experts) if self.experts else len(parameter)
        return StackView(count, name in self.transposed, tuple(parameter.shape))

    def routed(self, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Routed:
        """Return the arguments of a call."""
        hidden, ids, weights = (*args, *kwargs.values())[:3]
        return Routed(hidden.flatten(0, -2), ids, weights)

    def arbitrary(self, owner: Any, hidden: Tensor) -> Tensor:
        """Return tokens that any expert could have, of inputs [T, K]."""
        return hidden

    def copies(self, owner: Any) -> int:
        """Return how often the inputs hold all tokens."""
        return 1

    def computed(self, owner: Any, ids: Tensor) -> Tensor:
        """Return the experts to compute [T, k], of those that are chosen."""
        return ids

    def activated(self, owner: Any, *products: Tensor) -> Tensor:
        """Return the input [T, k, K] of the second stage, given products [T, k, N] of the first."""
        kind = getattr(owner, "kind", type(owner))
        if hasattr(kind, "_apply_gate"):
            return kind._apply_gate(owner, *products)
        gate, up = products if len(products) > 1 else products[0].chunk(2, dim=-1)
        return owner.act_fn(gate) * up

    def finished(self, owner: Any, y: Tensor, routed: Routed) -> Tensor:
        """Return the outputs of experts [T, k, H], given the products of the last stage."""
        return y


class _Decorated(ExpertsAdapter):
    """Modules whose class has `@use_experts_implementation`."""

    def activated(self, owner: Any, *products: Tensor) -> Tensor:
        return super().activated(owner, *products) if owner.has_gate else owner.act_fn(*products)

    def finished(self, owner: Any, y: Tensor, routed: Routed) -> Tensor:
        # Not in all tested versions.
        has_norm = getattr(owner, "has_post_expert_norm", False)
        return owner.post_expert_norm(y) if has_norm else y


class _LongcatFlash(ExpertsAdapter):
    """With experts that give their input back, behind the others."""

    def finished(self, owner: Any, y: Tensor, routed: Routed) -> Tensor:
        if not getattr(owner, "adds_identities", True):
            return y
        is_identity = (routed.ids >= owner.num_routed_experts).unsqueeze(-1)
        return torch.where(is_identity, routed.hidden.unsqueeze(1).to(y.dtype), y)


class _Llama4Text(ExpertsAdapter):
    """Called with E copies of all tokens, each times its score, zeros where it is not chosen."""

    def routed(self, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Routed:
        hidden: Tensor = next(iter((*args, *kwargs.values()))).flatten(0, -2)
        experts = torch.arange(owner.num_experts, device=hidden.device).unsqueeze(1)
        ids = experts.expand(-1, len(hidden) // owner.num_experts).reshape(-1, 1)
        is_chosen = hidden.any(-1, keepdim=True)
        return Routed(hidden, torch.where(is_chosen, ids, owner.num_experts), None)

    def copies(self, owner: Any) -> int:
        return owner.num_experts

    def arbitrary(self, owner: Any, hidden: Tensor) -> Tensor:
        # Most of the copies of a token are zeros.
        return hidden.unflatten(0, (owner.num_experts, -1)).sum(0)

    def computed(self, owner: Any, ids: Tensor) -> Tensor:
        if ids.device.type != "cpu":
            return ids
        # All tokens for an expert that has some, as the class computes them: on a CPU their number
        # tells how a product sums.
        rows = ids.unflatten(0, (owner.num_experts, -1))
        experts = torch.arange(owner.num_experts).view(-1, 1, 1)
        has_some = (rows == experts).any(1, keepdim=True)
        return torch.where(has_some, experts, owner.num_experts).expand_as(rows).flatten(0, 1)


# The pieces of most classes, by the names of quantizers and engines.
_PIECES = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("up_proj", ("up_proj",)),
    ("down_proj", ("down_proj",)),
)


def _decorated(has_gate: bool, is_transposed: bool) -> ExpertsAdapter:
    names = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    stages = tuple((name,) for name in names)
    if is_transposed:
        return _Decorated(stages, transposed=names)
    return _Decorated(stages, pieces=_PIECES)


# By `has_gate` and `is_transposed`.
_DECORATED = {(a, b): _decorated(a, b) for a in (False, True) for b in (False, True)}

# Classes without the decorator, by their names.
_ADAPTERS: dict[str, ExpertsAdapter] = {
    "llama4.modeling_llama4.Llama4TextExperts": _Llama4Text(
        transposed=("gate_up_proj", "down_proj"),
        # As quantizers of transformers have it, whose class for them computes expert by expert.
        pieces=_PIECES,
    ),
    "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": _LongcatFlash(
        experts="num_routed_experts"
    ),
    "step3p7.modeling_step3p7.Step3p7Experts": ExpertsAdapter(),
}


def adapter_of(module: nn.Module) -> ExpertsAdapter | None:
    """Return the adapter of a module of experts, None for any other module."""
    known = vars(module)
    if "has_gate" in known and "is_transposed" in known:
        return _DECORATED[known["has_gate"], known["is_transposed"]]
    # No subclass, which may compute in another way.
    kind = known.get("kind", type(module))
    path = f"{kind.__module__}.{kind.__qualname__}"
    return _ADAPTERS.get(path.removeprefix("transformers.models."))


def parts_of(module: Any, stack: str) -> tuple[str, ...]:
    """Return the linear layers of an expert whose rows a stack has, in order, () if it has none."""
    adapter = adapter_of(module)
    in_order = getattr(module, "is_concatenated", True) and not getattr(module, "has_bias", False)
    return dict(adapter.pieces).get(stack, ()) if adapter is not None and in_order else ()


def experts_problem(module: nn.Module) -> str:
    """Return why experts cannot be converted whatever their shape, or ""."""
    if getattr(module, "_is_expert_parallel", False):
        return "expert parallel: each process holds some of the experts"
    return ""
