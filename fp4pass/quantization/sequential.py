"""Calibration of one layer at a time, on the outputs of those that are quantized already."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import ops
from ..config import Settings
from ..core.formats import get_format
from ..errors import CalibrationError, OptionError
from ..linear import Usage
from ..methods import Stats, weight_amax
from .layer_inputs import Call, Recording, Stack, hidden_state
from .observer import OBSERVERS, shared_observer
from .plan import Site, selected, share_global_scales, share_statistics

# The inputs of linears, in the order of their calls; one tensor for all that read the same.
_Inputs = dict[nn.Module, list[Tensor]]

# How inputs are quantized: as those of a linear that is used so, with a global scale.
_View = tuple[Usage, float]

_CPU = torch.device("cpu")


def layer_groups(
    recording: Recording, sites: Sequence[Site], device: torch.device | str | None
) -> Iterator[list[Site]]:
    """The sites of each layer in turn, with statistics and global scales; convert them before the
    next are asked for, whose inputs come from what is converted.

    If a site wants what the float model has there, a layer is several groups: linears that read
    the same go before those that read what they lead to.
    device: where layers run, each brought there and back; None: where they are.
    """
    chosen = selected(sites)
    paired = any(map(_is_paired, chosen))
    layers = [(stack, index) for stack in recording.stacks for index in range(len(stack.layers))]
    for stack, index in tqdm(layers, desc="convert", unit="layer", leave=False, disable=None):
        modules = set(stack.layers[index].modules())
        own = [site for site in chosen if site.module in modules]
        with _placed(stack, index, device) as place:
            runner = _Runner(stack, index, place)
            for group in runner.pair(own) if paired else [own]:
                runner.observe(group)
                share_global_scales(group)
                yield group
                for site in group:
                    site.stats = Stats()
            runner.advance(paired)


def require_plain(sites: Sequence[Site]) -> None:
    """Raise OptionError if a site, which no layer holds, wants what the float model has there."""
    for site in selected(sites):
        if _is_paired(site):
            raise OptionError(
                f"{site.name or 'the model'}: Gptq(target='cross') is for layers that are "
                "calibrated one after the other. Prepare the model with sequential=True; a linear "
                f"outside of its layers wants a rule, ({site.name!r}, {{'method': 'gptq'}})."
            )


class _Runner:
    """Runs one layer of a stack on all batches."""

    def __init__(self, stack: Stack, index: int, device: torch.device) -> None:
        self.stack, self.index, self.device = stack, index, device
        self.layer, self.name = stack.layers[index], f"{stack.name}.{index}"
        # What each batch gives the linears in the float model, on the CPU.
        self.wanted: list[_Inputs] = []

    def pair(self, sites: Sequence[Site]) -> list[list[Site]]:
        """Run the float model, keep what the sites see there, and group them by its order."""
        for call in self.stack.calls:
            watch = _Watch()
            call.reference = self._run(call, call.reference, sites, watch).to(_CPU)
            self.wanted.append(_moved(watch.inputs, _CPU))
        return _in_order(sites, self.wanted)

    def observe(self, sites: Sequence[Site]) -> None:
        """Give the sites the statistics of what they see in this layer as it is now."""
        kept: list[_Inputs] = []
        if any(
            view is not None and get_format(view[0].format_key).has_global_scale
            for view in map(_view, sites)
        ):
            # The scale of what they are to see is that of all batches.
            kept = [_moved(self._inputs(i, sites), _CPU) for i in range(len(self.stack.calls))]
        largest = [_largest(kept, site) for site in sites]
        views = [_view(site, amax) for site, amax in zip(sites, largest, strict=True)]
        for site in sites:
            site.module.__dict__[OBSERVERS] = []
        for i in range(len(self.stack.calls)):
            inputs = kept[i] if kept else self._inputs(i, sites)
            wanted = self.wanted[i] if self.wanted else None
            _add(_moved(inputs, self.device), wanted, sites, views)
        share_statistics(sites)
        for site, amax in zip(sites, largest, strict=True):
            del site.module.__dict__[OBSERVERS]
            if kept:
                site.stats = dataclasses.replace(site.stats, input_amax=amax)

    def advance(self, paired: bool) -> None:
        """Have the next layer see what this one returns with the weights that it has now."""
        if self.index + 1 == len(self.stack.layers):
            self.stack.calls.clear()
        for call in self.stack.calls:
            call.hidden = self._run(call, call.hidden, (), _Watch()).to(_CPU)
            if not paired:
                call.reference = call.hidden

    def _inputs(self, i: int, sites: Sequence[Site]) -> _Inputs:
        """What the layer as it is now calls its linears with for a batch."""
        call = self.stack.calls[i]
        calls = 0
        if self.wanted:
            # What is behind the last of them need not run.
            calls = sum(len(self.wanted[i].get(site.module, ())) for site in sites)
        watch = _Watch(calls)
        with suppress(_Enough):
            self._run(call, call.hidden, sites, watch)
        return watch.inputs

    def _run(self, call: Call, hidden: Tensor, sites: Sequence[Site], watch: _Watch) -> Tensor:
        """Run the layer and watch its linears; what it returns."""
        handles = [
            site.module.register_forward_pre_hook(watch.hook, with_kwargs=True) for site in sites
        ]
        try:
            args, kwargs = self.stack.arguments(call, self.index, hidden, self.device)
            return hidden_state(self.layer(*args, **kwargs), self.name)
        finally:
            for handle in handles:
                handle.remove()


class _Enough(Exception):
    """All that was to be seen of a layer was seen."""


class _Watch:
    """Keeps what modules are called with, in the order of their first calls.

    calls: so many are enough; 0: all there are.
    """

    def __init__(self, calls: int = 0) -> None:
        self.inputs: _Inputs = {}
        self._left = calls
        # Each with the copy that is kept, so that no other tensor gets its identity.
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook with keyword arguments, as nn.Module calls it."""
        x = args[0] if args else next(iter(kwargs.values()))
        key = (id(x), x._version)
        if key not in self._seen:
            # A layer may change it in place.
            self._seen[key] = (x, x.clone())
        self.inputs.setdefault(module, []).append(self._seen[key][1])
        self._left -= 1
        if not self._left:
            raise _Enough


def _add(
    inputs: _Inputs, wanted: _Inputs | None, sites: Sequence[Site], views: Sequence[_View | None]
) -> None:
    """Add a batch to the observers of the sites, one for all that see the same."""
    groups: dict[tuple[int, _View | None, bool, int], list[tuple[Site, int]]] = {}
    for site, view in zip(sites, views, strict=True):
        counts: Counter[int] = Counter()
        for i, x in enumerate(inputs.get(site.module, ())):
            # A weight used twice on one tensor has seen it twice.
            counts[id(x)] += 1
            key = (id(x), view, _is_paired(site), counts[id(x)])
            groups.setdefault(key, []).append((site, i))
    for (_, view, paired, _), members in groups.items():
        site, i = members[0]
        needs = {need for other, _ in members for need in _settings(other).needs}
        holders = [other.module for other, _ in members]
        observer = shared_observer(holders, tuple(sorted(needs)), site.columns)
        x = inputs[site.module][i]
        if paired:
            assert wanted is not None
            reference = _partner(site, inputs, wanted, i)
            observer.observe_pair(
                x if view is None else _quantized(x, view), reference.to(x.device)
            )
        else:
            observer(x)


def _partner(site: Site, inputs: _Inputs, wanted: _Inputs, i: int) -> Tensor:
    """What the float model gives a site in the place of its i-th input of a batch."""
    shapes = [[x.shape for x in each.get(site.module, ())] for each in (inputs, wanted)]
    if shapes[0] != shapes[1]:
        raise CalibrationError(
            f"{site.name}: other tokens reach it in the quantized model than in the float one, as "
            "where tokens choose their experts, so Gptq(target='cross') is not for it. Give it "
            f"another method with a rule, ({site.name!r}, {{'method': 'gptq'}})."
        )
    return wanted[site.module][i]


def _quantized(x: Tensor, view: _View) -> Tensor:
    """What a converted linear sees of its input: quantized, and back in float32."""
    usage, global_scale = view
    fmt = get_format(usage.format_key)
    rows = x.reshape(-1, x.shape[-1])
    divisor = torch.tensor([1.0 / global_scale], device=x.device) if fmt.has_global_scale else None
    how = (divisor, fmt.key, usage.activation_scales)
    if not usage.rotation:
        quantized = torch.ops.fp4pass.quantize(rows, *how)
        return ops.dequantize(*quantized, divisor, fmt.key, torch.float32).view(x.shape)
    quantized = torch.ops.fp4pass.rotate_quantize(rows, usage.rotation, *how)
    dense = ops.dequantize(*quantized, divisor, fmt.key, torch.float32)
    # The statistics are of inputs as the linear is called with them.
    return torch.ops.fp4pass.rotate(dense, usage.rotation).view(x.shape)


def _largest(batches: Sequence[_Inputs], site: Site) -> float:
    """The largest magnitude that a site is called with, 0.0 without tokens."""
    tensors = [x for inputs in batches for x in inputs.get(site.module, ()) if x.numel()]
    return max((weight_amax(x) for x in tensors), default=0.0)


def _in_order(sites: Sequence[Site], batches: Sequence[_Inputs]) -> list[list[Site]]:
    """The sites that read the same tensor together, as they are first called.

    Together are those of one weight, too, and those whose names differ by numbers: experts.
    """
    order = {module: i for i, module in enumerate(dict.fromkeys(m for b in batches for m in b))}
    groups: list[tuple[set[object], list[Site]]] = []
    for site in sorted(sites, key=lambda site: order.get(site.module, len(order))):
        kind = ".".join("*" if part.isdigit() else part for part in site.name.split("."))
        labels: set[object] = {kind, ("weight", site.weight_key)}
        for i, inputs in enumerate(batches):
            labels.update((i, id(x)) for x in inputs.get(site.module, ()))
        joined = [group for group in groups if not group[0].isdisjoint(labels)]
        if not joined:
            groups.append((labels, [site]))
            continue
        joined[0][1].append(site)
        joined[0][0].update(labels)
        for other in joined[1:]:
            joined[0][0].update(other[0])
            joined[0][1].extend(other[1])
        groups = [group for group in groups if all(group is not other for other in joined[1:])]
    return [members for _, members in groups]


def _settings(site: Site) -> Settings:
    assert site.settings is not None
    return site.settings


def _view(site: Site, amax: float = 0.0) -> _View | None:
    """How the converted linear quantizes inputs of this magnitude; None where that is not to be
    observed."""
    settings = _settings(site)
    if settings.weight_only or not _is_paired(site):
        return None
    if settings.rotation:
        amax = Stats(input_amax=amax).rotated(settings.rotation).input_amax
    return settings.usage, settings.format.global_scale_for(amax)


def _is_paired(site: Site) -> bool:
    """Whether a site wants what the float model has in place of its inputs."""
    return "cross" in _settings(site).method.needs


def _moved(inputs: _Inputs, device: torch.device) -> _Inputs:
    """The same elsewhere, still one tensor for all that read the same."""
    there: dict[int, Tensor] = {}
    for x in (x for tensors in inputs.values() for x in tensors):
        if id(x) not in there:
            there[id(x)] = x.to(device)
    return {module: [there[id(x)] for x in tensors] for module, tensors in inputs.items()}


@contextmanager
def _placed(stack: Stack, index: int, device: torch.device | str | None) -> Iterator[torch.device]:
    """Bring a layer to the device where it is to run, and back; what accelerate offloads comes
    by its hooks. Yields the device."""
    layer = stack.layers[index]
    tensors = (*layer.parameters(), *layer.buffers())
    home = next((x.device for x in tensors if x.device.type != "meta"), _CPU)
    place = home if device is None else torch.device(device)
    hooked = [hook for m in layer.modules() if (hook := getattr(m, "_hf_hook", None)) is not None]
    if not hooked:
        layer.to(place)
        try:
            yield place
        finally:
            layer.to(home)
        return
    each = [one for hook in hooked for one in getattr(hook, "hooks", (hook,))]
    found = [getattr(hook, "execution_device", None) for hook in each]
    runs_on = next((torch.device(one) for one in found if one is not None), home)
    if device is not None and runs_on != place:
        raise OptionError(
            f"device is {str(device)!r}, but accelerate runs {stack.name}.{index} on "
            f"{str(runs_on)!r}. Leave device out, or load the model without accelerate's hooks."
        )
    yield runs_on
