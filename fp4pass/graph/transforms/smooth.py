"""The pass that moves scales of channels out of what makes a tensor, into its linears."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...kernels.statistics.reference import HESSIAN_BLOCK
from ...quantization.observer import Observer
from .channel_scaling import Fold, find_folds


def smooth_linears(
    graph: fx.Graph,
    own: Collection[int],
    choose: Callable[[Fold], Tensor | None],
) -> list[tuple[Fold, Tensor]]:
    """Fold scales into the parameters of a graph and the statistics of its observers.

    own: the addresses of parameters that nothing outside the graph has; choose: the exponents of
    the scales, integers [K], or None. Returns what was folded, and nothing when run again by a
    choice that is balanced then. A channel whose parameters would lose a bit keeps scale 1.
    """
    done = []
    # The last first: a linear's rows are divided before its columns are looked at.
    for fold in reversed(find_folds(graph, own)):
        exponents = choose(fold)
        if exponents is None:
            continue
        changes = [(each, -exponents) for each in fold.divided]
        changes += [(each, exponents) for each in fold.weights]
        for each, change in changes:
            exact = _is_exact(each.tensor, change).to(exponents.device)
            exponents = torch.where(exact, exponents, 0)
        if not exponents.any():
            continue
        with torch.no_grad():
            for each, change in changes:
                # Channels that keep scale 1 have no change by now.
                change = torch.where(exponents == 0, 0, change)
                each.tensor.mul_(_factors(change, each.tensor))
        for observer in fold.observers:
            rescale(observer, exponents)
        done.append((fold, exponents))
    return done[::-1]


def rescale(observer: Observer, exponents: Tensor) -> None:
    """Make the statistics of x those of x / 2^exponents: the Hessian exactly, amax as a bound.

    No magnitude of a channel is above the root of the sum of its squares, whose float32 sum is
    within 1e-3, nor above that of all channels.
    """
    hessian, count, amax = observer.state
    rows = exponents.to(hessian.device)
    if hessian.ndim == 3:
        columns = len(hessian) * HESSIAN_BLOCK
        rows = F.pad(rows, (0, columns - len(rows))).view(len(hessian), HESSIAN_BLOCK)
    inverse = torch.exp2(-rows.double())
    bound = hessian.diagonal(dim1=-2, dim2=-1).double().clamp(min=0).sqrt() * (1 + 1e-3)
    bound = torch.minimum(bound, amax.double()) * inverse
    scaled = hessian * inverse.unsqueeze(-1).float() * inverse.unsqueeze(-2).float()
    observer.state = (scaled, count, bound.max().float().view(1))


def _factors(exponents: Tensor, tensor: Tensor) -> Tensor:
    """2^exponents [K] beside a tensor [K, ...], in its dtype."""
    scales = torch.exp2(exponents.double()).to(tensor.device, tensor.dtype)
    return scales.view(-1, *[1] * (tensor.ndim - 1))


def _is_exact(tensor: Tensor, exponents: Tensor) -> Tensor:
    """Which channels of a tensor [K, ...] keep all bits when they are scaled: bool [K]."""
    factors = _factors(exponents, tensor)
    scaled = tensor * factors
    same = (scaled / factors == tensor) & scaled.isfinite()
    return same.reshape(len(tensor), -1).all(1)
