"""Observers: the statistics of a linear's input, and the pass that puts them into a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import ops
from ..errors import CalibrationError
from ..graph.match import LinearNode, find_linears
from ..graph.purity import unchanged_between
from ..kernels.statistics.reference import HESSIAN_BLOCK, diagonal_blocks, observe_cross_ref
from ..methods import Stats

# Where a prepared linear keeps its observers: its own first, then those it shares in regions.
OBSERVERS = "_fp4pass_observers"


class Observer(nn.Module):
    """Accumulates the statistics of what passes through it, and passes on nothing.

    It serves as a node of a graph and, through `hook`, before a linear that no graph holds. Its
    state goes to the device of its input at the first call; it is neither a buffer nor a
    parameter, so that it is not saved and `.to(bfloat16)` does not cast it. It is made before any
    call: torch.compile would merge what two observers make in one graph.
    """

    # For fx: not dead code, though it has no result, and no obstacle to merging what it reads.
    _is_impure = True
    only_reads = True

    def __init__(self, needs: tuple[str, ...], columns: int, sharers: int = 0) -> None:
        """needs: fields of Stats; columns: K; sharers: how many linears a graph feeds it for, 0
        as a hook."""
        super().__init__()
        self.needs = needs
        self.columns = columns
        self.sharers = sharers
        groups = math.ceil(columns / HESSIAN_BLOCK) if "block_hessian" in needs else 0
        # What inference mode makes could not be added to outside of it.
        with torch.inference_mode(False):
            blocks = (groups, HESSIAN_BLOCK, HESSIAN_BLOCK)
            # The whole Hessian has the blocks in it.
            shape = (columns, columns) if "hessian" in needs else blocks
            self.state = (
                torch.zeros(shape, dtype=torch.float32, device="cpu"),
                torch.zeros(1, dtype=torch.int64, device="cpu"),
                torch.zeros(1, dtype=torch.float32, device="cpu"),
            )
            whole = (columns, columns) if "cross" in needs else (0, 0)
            self.cross = torch.zeros(whole, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor) -> None:
        """x: [..., K] float, the input of the linears observed."""
        # An exported graph has no observer to write to, and its fake tensors must not stay here.
        # In torch 2.11 is_exporting is true in torch.compile as well, but there x is a Tensor.
        if torch.compiler.is_exporting() and type(x) is not Tensor:
            return
        if x.shape[-1:] != (self.columns,):
            # The linear raises for it.
            return
        hessian, count, amax = self.state
        if hessian.device != x.device:
            with torch.inference_mode(False):
                self.state = (hessian.to(x.device), count.to(x.device), amax.to(x.device))
        observe = ops.observe_full if "hessian" in self.needs else ops.observe
        observe(x.detach(), *self.state)

    def observe_pair(self, x: Tensor, reference: Tensor) -> None:
        """The same, and (a - x) x^T if it is needed: reference [..., K] has the a of each x."""
        self.forward(x)
        if len(self.cross):
            self.cross = self.cross.to(x.device)
            observe_cross_ref(x.detach(), reference.detach(), self.cross)

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook with keyword arguments, as nn.Module calls it."""
        # Not as a module, which would look for hooks of its own for every linear of every call.
        self.forward(args[0] if args else next(iter(kwargs.values())))


def is_observer_hook(hook: object) -> bool:
    """Whether a hook is `Observer.hook`."""
    return isinstance(getattr(hook, "__self__", None), Observer)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward and our own observing."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or type(module).__call__ is not nn.Module.__call__
        or not all(is_observer_hook(hook) for hook in module._forward_pre_hooks.values())
    )


def shared_observer(holders: Sequence[nn.Module], needs: tuple[str, ...], columns: int) -> Observer:
    """The observer that exactly these modules share: a new one, or that of an earlier trace."""
    lists: list[list[Observer]] = [holder.__dict__[OBSERVERS] for holder in holders]
    for observer in lists[0]:
        shared = all(any(observer is other for other in others) for others in lists)
        if observer.sharers == len(holders) and shared:
            return observer
    observer = Observer(needs, columns, sharers=len(holders))
    for observers in lists:
        observers.append(observer)
    return observer


def collect(observers: Sequence[Observer], name: str) -> Stats:
    """The sum of what several observers of one linear saw.

    Raises CalibrationError if a calibration input held NaN or infinity.
    """
    states = [o.state for o in observers if o.state[1]]
    if not states:
        return Stats()
    hessian, count, amax = states[0]
    for other_hessian, other_count, other_amax in states[1:]:
        hessian = hessian + other_hessian.to(hessian.device)
        count = count + other_count.to(count.device)
        amax = torch.maximum(amax, other_amax.to(amax.device))
    if not (amax.isfinite().all() and hessian.isfinite().all()):
        what = f"reached {float(amax):.3g}, whose square float32 cannot hold"
        if not amax.isfinite().all():
            what = "held NaN or infinity"
        raise CalibrationError(
            f"{name or 'the model'}: its inputs {what} during calibration. Find the batch or the "
            "layer they come from, then prepare and calibrate again."
        )
    if hessian.ndim == 2:
        crosses = [o.cross for o in observers if o.state[1] and len(o.cross)]
        # Some linear may see part of its inputs together with one that needs less.
        cross = sum(crosses[1:], crosses[0]) if len(crosses) == len(states) else None
        return Stats(diagonal_blocks(hessian), int(count), float(amax), hessian, cross)
    return Stats(hessian if len(hessian) else None, int(count), float(amax))


def insert_observers(
    graph: fx.Graph,
    wanted: Callable[[LinearNode], bool],
    make: Callable[[list[LinearNode]], Observer],
) -> int:
    """Put one observer before each group of linears that read the same tensor.

    wanted: whether a linear is to be observed here; make: the observer of a group. Returns how
    many observers were added. A linear that is observed already is left as it is.
    """
    module = graph.owning_module
    assert module is not None
    groups: list[list[LinearNode]] = []
    latest: dict[fx.Node, list[LinearNode]] = {}
    for linear in find_linears(graph):
        if _is_observed(linear) or not wanted(linear):
            continue
        group = latest.get(linear.source)
        if (
            group is None
            # A weight used twice on one tensor has seen it twice.
            or any(other.holder.weight is linear.holder.weight for other in group)
            or not unchanged_between(linear.source, group[0].node, linear.node)
        ):
            group = latest[linear.source] = []
            groups.append(group)
        group.append(linear)
    for group in groups:
        # A child may be in the graph more than once, and children() lists it once.
        count = sum(isinstance(m, Observer) for m in module._modules.values())
        target = f"fp4pass_observer_{count}"
        module.add_module(target, make(group))
        with graph.inserting_before(group[0].node):
            graph.call_module(target, (group[0].source,))
    return len(groups)


def _is_observed(linear: LinearNode) -> bool:
    """Whether an observer of the linear's holder reads its source."""
    module = linear.node.graph.owning_module
    assert module is not None
    own = linear.holder.__dict__.get(OBSERVERS, ())
    called = [user for user in linear.source.users if user.op == "call_module"]
    readers = [module.get_submodule(str(user.target)) for user in called]
    return any(reader is observer for reader in readers for observer in own)
