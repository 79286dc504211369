"""Make nn.MultiheadAttention call its projections, so that they are quantized like any linear.

torch's own class reads the weights: q, k and v stacked in one parameter, `out_proj` beside it.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...errors import OptionError, expected
from ...nn.packed_linear import swap_class
from ...record.config import Rule, Rules, check_rules
from ...record.state import unwrap

P = ParamSpec("P")
R = TypeVar("R")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

# torch's own parameters: one stack of q, k and v, or one for each.
_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_STACKED = ("in_proj_weight", "in_proj_bias")

READ = (
    "nn.MultiheadAttention reads it without calling a layer; a rule that ends in q_proj, k_proj, "
    "v_proj or out_proj takes it"
)


class CalledAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention as a module of four linear layers, which it calls.

    It is the object that was an nn.MultiheadAttention, with its class swapped. Its numbers are
    those of torch's, but for the order of sums.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as nn.MultiheadAttention does: its arguments, shapes and results."""
        if is_causal and attn_mask is None:
            wanted = "the mask that is_causal=True is a hint for"
            raise OptionError(expected("nn.MultiheadAttention: attn_mask", wanted, "None"))
        # [B, H, T, D], and [B, H, S, D] twice.
        q = self._heads(self.q_proj(query), query)
        k = self._heads(self.k_proj(key), key)
        v = self._heads(self.v_proj(value), value)
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        mask = _additive(attn_mask, q)
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, q.shape[:2])
        padding = _additive(key_padding_mask, q)
        if padding is not None:
            padding = padding.unflatten(-1, (1, 1, -1))
            mask = padding if mask is None else mask + padding
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            found = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        found = found.transpose(1, 2).flatten(2)
        if query.ndim == 2:
            return self.out_proj(found[0]), None if weights is None else weights[0]
        return self.out_proj(found if self.batch_first else found.transpose(0, 1)), weights

    def _heads(self, x: Tensor, like: Tensor) -> Tensor:
        """Return a projection [B, T, E], [T, B, E] or [T, E], as `like` is, as [B, H, T, D]."""
        if like.ndim == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask as numbers to add to scores: -inf where a boolean one is True."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module is torch's own attention, with parameters of its own.

    Keys of its own (`add_bias_kv`, `add_zero_attn`) are not for layers.
    """
    # Hooks of accelerate replace forward, and parametrizations a parameter.
    names = _STACKED[:1] if getattr(module, "_qkv_same_embed_dim", False) else _WEIGHTS
    parameters = module._parameters
    return (
        type(module) is nn.MultiheadAttention
        and "forward" not in module.__dict__
        and module.bias_k is None
        and not module.add_zero_attn
        and type(module.out_proj) is NonDynamicallyQuantizableLinear
        and all(parameters.get(name) is not None for name in names)
    )


@contextmanager
def calling_projections(root: nn.Module, rules: Sequence[Rule]) -> Iterator[None]:
    """Make attention that a rule takes a CalledAttention, in place; undo that on an error."""
    changed = []
    for name, module in list(root.named_modules()):
        paths = [f"{name}.{each}" if name else each for each in PROJECTIONS]
        if can_be_called(module) and any(_takes(rules, path) for path in paths):
            changed.append((module, dict(module._parameters), dict(module._modules)))
            _split(module)
    try:
        yield
    except BaseException:
        for module, parameters, children in changed:
            if all(type(each) is nn.Linear for each in module.children()):
                swap_class(module, nn.MultiheadAttention)
                swap_class(children["out_proj"], NonDynamicallyQuantizableLinear)
                module._parameters.update(parameters)
                module._modules.clear()
                module._modules.update(children)
        raise


def convert_mha_projections(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of a model and `rules` with attention as its rules take it."""
    call: Any = function

    @functools.wraps(call)
    def wrapped(model: nn.Module, *args: Any, rules: Rules = (), **options: Any) -> Any:
        known = check_rules(rules, options.get("weight_only"))
        with calling_projections(unwrap(model, *args), known):
            return call(model, *args, rules=known, **options)

    return cast(Callable[P, R], wrapped)


def _takes(rules: Sequence[Rule], path: str) -> bool:
    """Return whether the first rule for a projection has options, and says more than *."""
    matching = (rule for rule in rules if fnmatch.fnmatchcase(path, rule[0]))
    pattern, options = next(matching, ("", None))
    return options is not None and bool(pattern.rpartition(".")[2].strip("*"))


def _split(module: nn.Module) -> None:
    """Give torch's attention a linear layer for each projection, and the class that calls them."""
    own, children = module._parameters, module._modules
    stacked, bias = (own[name] for name in _STACKED)
    weights: Any = [own[name] for name in _WEIGHTS] if stacked is None else stacked.chunk(3)
    biases: Any = [None] * 3 if bias is None else bias.chunk(3)
    out = children.pop("out_proj")
    assert out is not None
    for name, weight, part in zip(PROJECTIONS, weights, biases, strict=False):
        rows, columns = weight.shape
        layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
        for key, tensor, whole in (("weight", weight, stacked), ("bias", part, bias)):
            if tensor is not None:
                # A view: nothing is copied.
                trains = (tensor if whole is None else whole).requires_grad
                layer._parameters[key] = nn.Parameter(tensor.detach(), trains)
        children[name] = layer.train(module.training)
    swap_class(out, nn.Linear)
    children["out_proj"] = out
    for name in (*_STACKED, *_WEIGHTS):
        own[name] = None
    swap_class(module, CalledAttention)


def join_projections(module: Any) -> None:
    """Make a CalledAttention with dense projections torch's own again, in place."""
    own, children = module._parameters, module._modules
    layers: Any = [children.pop(name) for name in PROJECTIONS[:3]]
    weights = _STACKED[:1] if module._qkv_same_embed_dim else _WEIGHTS
    for names, kind in ((weights, "weight"), (_STACKED[1:], "bias")):
        parts = [layer._parameters[kind] for layer in layers]
        if parts[0] is None:
            continue
        trains = any(part.requires_grad for part in parts)
        joined = parts if len(names) == len(parts) else [torch.cat(parts)]
        for name, tensor in zip(names, joined, strict=True):
            own[name] = nn.Parameter(tensor.detach(), trains)
    swap_class(module.out_proj, NonDynamicallyQuantizableLinear)
    swap_class(module, nn.MultiheadAttention)
