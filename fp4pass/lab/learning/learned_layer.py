"""A layer of a stack while it learns: its latents, norms and biases, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...core.names import without_numbers
from ...kernels.statistics.naive import HESSIAN_BLOCK
from ...methods import STATISTICS, Stats
from ...nn.experts import QUANTIZED
from ...nn.linear import PACKED, SCALE
from ...quantization.observers.visible_tokens import visible_rows
from .latent import lean
from .layers import TRAINABLE, Codes, Latents, TrainableExperts, freeze, make_trainable

# Buffers and parameters by the module that has them and their names.
Values = dict[tuple[nn.Module, str], Tensor]

# The fields of a packed weight that may change.
_LEARNED = (PACKED, SCALE)


def values_of(modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> Values:
    """Return what may change: the buffers of quantized layers, and copies of parameters.

    parameters: by their names below the first of the modules, which has them all.
    """
    first, *_ = modules = list(modules)
    found: Values = {
        (module, name): module.get_buffer(name)
        for module in modules
        if isinstance(module, QUANTIZED)
        for name in _LEARNED
    }
    for name, parameter in parameters.items():
        path, _, last = name.rpartition(".")
        found[first.get_submodule(path), last] = parameter.detach().clone()
    return found


def put(values: Values) -> None:
    """Put values into their modules; parameters stay where they are."""
    for (module, name), value in values.items():
        if name in module._parameters:
            module.get_parameter(name).detach().copy_(value)
        else:
            module._buffers[name] = value


class LearnedLayer:
    """A layer that learns.

    Attributes:
        latents: of its packed weights, each with the layers that share it; at first the float
            weights, as far as they lie in the cells of their codes.
        masters: float32 copies of its norms and biases, by these.
    """

    def __init__(
        self,
        layer: nn.Module,
        weights: Mapping[nn.Module, Tensor],
        small: Mapping[str, nn.Parameter],
    ) -> None:
        """Make a layer learn.

        Args:
            layer: of a stack.
            weights: the float weights of its quantized layers that learn.
            small: its norms and biases that learn, by their names.
        """
        self.layer, self._modules = layer, list(weights)
        self.small = list(small.values())
        self._start = values_of([layer, *weights], small)
        self._flags = [each.requires_grad for each in self.small]
        self.masters = [each.detach().float().clone() for each in self.small]
        self.latents: dict[nn.Parameter, list[Any]] = {}
        known: Latents = {}
        try:
            for module, weight in weights.items():
                trained = make_trainable(module, weight, share=1.0, latents=known)
                self.latents.setdefault(trained.latent, []).append(trained)
        except BaseException:
            self.restore()
            raise
        for parameter in self.small:
            parameter.requires_grad_()

    @property
    def learned(self) -> list[nn.Parameter]:
        """The parameters to take gradients of: latents, then norms and biases."""
        return [*self.latents, *self.small]

    @torch.no_grad()
    def show(self) -> None:
        """Have the layer compute with the masters, in the dtype that it has."""
        for parameter, master in zip(self.small, self.masters, strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def search_scales(
        self, hessians: Mapping[nn.Parameter, Tensor], error: Callable[[], float]
    ) -> None:
        """Search block scales again for the values of the latents, where that lowers an error.

        Those of layers whose names differ by numbers alone, as experts, are tried together.
        """
        names = {module: name for name, module in self.layer.named_modules()}
        groups: dict[str, list[nn.Parameter]] = {}
        for latent, (first, *_) in self.latents.items():
            groups.setdefault(without_numbers(names[first]), []).append(latent)
        least = error()
        for latents in groups.values():
            scales = [self.latents[latent][0]._buffers[SCALE] for latent in latents]
            values = [latent.clone() for latent in latents]
            for latent in latents:
                first, *others = self.latents[latent]
                first.search_scales(hessians.get(latent))
                for other in others:
                    other.share_scales(first)
            found = error()
            if found < least:
                least = found
                continue
            for latent, value, scale in zip(latents, values, scales, strict=True):
                latent.copy_(value)
                for module in self.latents[latent]:
                    module._buffers[SCALE] = scale

    def lean(self, share: float) -> None:
        """Leave the latents a share of the way from their codes."""
        for latent in self.latents:
            lean(latent.detach(), share)

    def freeze(self) -> None:
        """Pack what was learned: the layer is an ordinary converted one."""
        codes: Codes = {}
        for module in self._modules:
            if isinstance(module, TRAINABLE):
                freeze(module, codes=codes)
        for parameter, flag in zip(self.small, self._flags, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the layer."""
        self.freeze()
        put(self._start)


class Hessians:
    """The block Hessians of the inputs of layers that learn, by their latents: hooks add them."""

    def __init__(self, learned: LearnedLayer) -> None:
        self._sums: dict[nn.Parameter, tuple[Tensor, ...]] = {}
        self._handles = [
            module.register_forward_pre_hook(self._add)
            for modules in learned.latents.values()
            for module in modules
        ]

    def close(self) -> dict[nn.Parameter, Tensor]:
        """Take the hooks out, and return the sums: [J, 32, 32], or [E, J, 32, 32] of a stack.

        Those of an expert are blended with average tokens, as where it is quantized.
        """
        for handle in self._handles:
            handle.remove()
        found = {}
        for latent, (hessian, count, *_) in self._sums.items():
            if latent.ndim == 2:
                found[latent] = hessian
                continue
            stats = Stats(block_hessian=hessian, counts=count, tokens=int(count.sum()))
            own = [stats.matrix(i).block_hessian for i in range(len(latent))]
            found[latent] = torch.stack([each for each in own if each is not None])
        return found

    @torch.no_grad()
    def _add(self, module: Any, args: tuple[Any, ...]) -> None:
        x, latent = module.rotated_input(args[0]), module.latent
        sums = self._sums.get(latent) or self._zeros(latent)
        self._sums[latent] = sums
        hessian, count, amax, routing = sums
        if not isinstance(module, TrainableExperts):
            ops.observe(x, hessian, count, amax, visible_rows(args[0]).visible)
            return
        ids, visible = args[1], visible_rows(x if x.ndim == 2 else x[:, 0]).visible
        if visible is not None:
            x, ids = x[visible], ids[visible]
        ones = torch.ones_like(ids, dtype=torch.float32)
        ops.observe_experts(x, ids, ones, hessian, count, amax, routing)

    def _zeros(self, latent: Tensor) -> tuple[Tensor, ...]:
        experts = latent.shape[:-2]
        shape = (*experts, *STATISTICS["block_hessian"]["shape"](latent.shape[-1]))
        assert shape[-1] == HESSIAN_BLOCK
        device = latent.device
        count = torch.zeros(experts or (1,), dtype=torch.int64, device=device)
        return (
            torch.zeros(shape, device=device),
            count,
            torch.zeros(1, device=device),
            torch.zeros(experts or (1,), device=device),
        )
