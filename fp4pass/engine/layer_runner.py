"""Calibrate one layer at a time, on the outputs of the quantized layers before it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..distributed import ranks
from ..errors import CalibrationError, as_rules
from ..methods import Stats
from ..nn.experts import ExpertStack
from ..nn.linear import StoredWeight, quantize_input
from ..quantization.observers import observer as observing
from ..quantization.observers.observer import OBSERVERS, feed, new_observer, shared_observer
from ..quantization.observers.visible_tokens import visible_rows
from ..quantization.plan import LayerPlan, Plan, joined, with_statistics, with_unreached
from ..record.config import LinearConfig, input_scale_for
from .recording import Call, Recorded, Stack, hidden_state, offload_hidden_state

# The inputs of linears, in the order of their calls; one tensor for all that read the same.
_Inputs = dict[nn.Module, list[Tensor]]

# The quantization of inputs: the use of a linear, and its global scale.
_View = tuple[LinearConfig, float | None]

_CPU = torch.device("cpu")

# The share of a GPU's free memory for hidden states; layers and statistics need the rest.
_STATES = 1 / 8


class Runner:
    """Run one layer of a stack on all batches."""

    def __init__(
        self, stack: Stack, index: int, device: torch.device, states_on: torch.device
    ) -> None:
        """states_on: where hidden states wait for the next layer."""
        self.stack, self.index, self.device, self.states_on = stack, index, device, states_on
        self.layer, self.name = stack.layers[index], f"{stack.name}.{index}"
        # The inputs of the linears in the float model, of each batch, on the CPU.
        self.reference: list[_Inputs] = []
        stack.begin(index)

    def pair(self, layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
        """Run the float layer, keep the inputs of its linears, and group these by their order."""
        # A tuple: a hook that records would add to the list for ever.
        for call in tuple(self.stack.calls):
            watch = _Watch()
            if call.of(self.index) is not None:
                output = self._run(call, call.reference, layers, watch)
                if self.stack.passes_on(call, self.index):
                    call.reference = self._waiting(hidden_state(output, self.name))
            self.reference.append(_moved(watch.inputs, _CPU))
        # The order of the first process is that of all.
        order = [[layer.name for layer in group] for group in _in_order(layers, self.reference)]
        named = {layer.name: layer for layer in layers}
        return [[named[name] for name in names] for names in ranks().gather(order)[0]]

    def observe(self, layers: Sequence[LayerPlan]) -> Plan:
        """Return the layers with the statistics of their inputs in this layer as it is now."""
        kept: list[_Inputs] = []
        if any(_is_viewed(layer) and layer.config.has_input_scale for layer in layers):
            # Quantized inputs have the scale of all batches.
            kept = [_moved(self._inputs(i, layers), _CPU) for i in range(len(self.stack.calls))]
        stacks = [layer for layer in layers if layer.stage]
        linears = [layer for layer in layers if not layer.stage]
        ranges = _input_ranges(kept, linears)
        views = [_view(layer, ranges[layer.module]) for layer in linears]
        for layer in layers:
            module: Any = layer.module
            own = [new_observer(module, layer.config.needs, keep=True)] if layer.stage else []
            module.__dict__[OBSERVERS] = own
        try:
            for i in range(len(self.stack.calls)):
                inputs = kept[i] if kept else self._inputs(i, layers)
                if kept and stacks:
                    self._inputs(i, stacks)
                reference = self.reference[i] if self.reference else {}
                _add(_moved(inputs, self.device), reference, linears, views)
            plan = with_statistics(Plan(tuple(layers)))
        finally:
            for layer in layers:
                del layer.module.__dict__[OBSERVERS]

        def called(layer: LayerPlan) -> LayerPlan:
            own = ranges.get(layer.module, layer.stats)
            known: dict[str, Any] = {"input_amax": own.input_amax, "magnitudes": own.magnitudes}
            return dataclasses.replace(layer, stats=dataclasses.replace(layer.stats, **known))

        plan = with_unreached(plan)
        return plan.map(called) if kept else plan

    def advance(self, paired: bool) -> None:
        """Give the next layer the results of this one with the weights that it has now."""
        if self.index + 1 == len(self.stack.layers):
            self.stack.calls.clear()
        for call in tuple(self.stack.calls):
            if call.of(self.index) is not None and self.stack.passes_on(call, self.index):
                output = self._run(call, call.hidden, (), _Watch())
                call.hidden = self._waiting(hidden_state(output, self.name))
            if not paired:
                call.reference = call.hidden

    def _waiting(self, state: Tensor) -> Tensor:
        return offload_hidden_state(state) if self.states_on == _CPU else state.to(self.states_on)

    def _inputs(self, i: int, layers: Sequence[LayerPlan]) -> _Inputs:
        """Return the inputs of linears in the layer as it is now, for a batch."""
        call = self.stack.calls[i]
        if call.of(self.index) is None:
            return {}
        calls = 0
        if self.reference:
            # The layer need not run behind the last of them.
            calls = sum(len(self.reference[i].get(each.module, ())) for each in layers)
        watch = _Watch(calls)
        with suppress(Recorded):
            self._run(call, call.hidden, layers, watch)
        return watch.inputs

    def _run(self, call: Call, hidden: Tensor, layers: Sequence[LayerPlan], watch: _Watch) -> Any:
        """Run the layer, watch its linears, and return its result."""
        hooks: list[tuple[nn.Module, Any]] = []
        for each in layers:
            if isinstance(each.module, ExpertStack):
                hooks += [(each.module, o.hook) for o in each.module.__dict__.get(OBSERVERS, ())]
                hooks.append((each.module.owner, feed))
            else:
                hooks.append((each.module, watch.hook))
        # Once each, for stacks share their owner.
        handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in dict.fromkeys(hooks)
        ]
        try:
            args, kwargs = self.stack.arguments(call, self.index, hidden, self.device)
            with nullcontext() if call.tokens is None else call.tokens.again(args, kwargs):
                return self.layer(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()


def place_of_states(stack: Stack, device: torch.device, paired: bool) -> torch.device:
    """Return where the hidden states of a stack are kept: on the device if they fit, or the CPU."""
    if device.type != "cuda":
        return _CPU
    needed = sum(call.hidden.nbytes for call in stack.calls) * (2 if paired else 1)
    free = torch.cuda.mem_get_info(device)[0]
    return device if needed <= _STATES * free else _CPU


class _Watch:
    """Keep the inputs of modules, in the order of their first calls."""

    def __init__(self, calls: int = 0) -> None:
        self.inputs: _Inputs = {}
        # So many are enough; of 0, all there are.
        self._left = calls
        # Each with the copy that is kept, so that no other tensor gets its identity.
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep an input, as a forward pre-hook with keyword arguments."""
        x = args[0] if args else next(iter(kwargs.values()))
        key = (id(x), x._version)
        rows = visible_rows(x)
        if key not in self._seen:
            # A layer may change it in place.
            kept = x.clone() if rows is None else x.flatten(0, -2)[rows]
            self._seen[key] = (x, kept)
        self.inputs.setdefault(module, []).append(self._seen[key][1])
        self._left -= 1
        if not self._left:
            raise Recorded


def _add(
    inputs: _Inputs, reference: _Inputs, layers: Sequence[LayerPlan], views: Sequence[_View | None]
) -> None:
    """Add a batch to the observers of the layers, one for all that see the same."""
    groups: dict[tuple[int, _View | None, bool, int], list[tuple[LayerPlan, int]]] = {}
    for layer, view in zip(layers, views, strict=True):
        counts: Counter[int] = Counter()
        for i, x in enumerate(inputs.get(layer.module, ())):
            # A weight used twice on one tensor has seen it twice.
            counts[id(x)] += 1
            key = (id(x), view, is_paired(layer), counts[id(x)])
            groups.setdefault(key, []).append((layer, i))
    for (_, view, paired, _), members in groups.items():
        layer, i = members[0]
        needs = {need for other, _ in members for need in other.config.needs}
        holders = [other.module for other, _ in members]
        observer = shared_observer(holders, tuple(sorted(needs)), layer.columns)
        x = inputs[layer.module][i]
        if not paired:
            observer(x)
            continue
        original = _partner(layer, inputs, reference, i).to(x.device)
        observer(x if view is None else _quantized(x, view), original)


def _partner(layer: LayerPlan, inputs: _Inputs, reference: _Inputs, i: int) -> Tensor:
    """Return the input of the float model in place of the i-th one of a layer in a batch."""
    shapes = [[x.shape for x in each.get(layer.module, ())] for each in (inputs, reference)]
    if shapes[0] != shapes[1]:
        raise CalibrationError(
            f"{layer.name}: other tokens reach it in the quantized model than in the float one, "
            "as where tokens choose their experts, so Gptq(target='cross') is not for it. Give it "
            f"another method: {as_rules(layer.name, options={'method': 'gptq'})}."
        )
    return reference[layer.module][i]


def _quantized(x: Tensor, view: _View) -> Tensor:
    """Return an input as a converted layer multiplies it: quantized, and back in float32."""
    config, number = view
    assert config.input_format is not None, "its inputs are quantized"
    rows = x.reshape(-1, x.shape[-1])
    stored = None if number is None else torch.tensor([number], device=x.device)
    quantized = quantize_input(rows, StoredWeight(None, None, None, stored), config)
    dense = ops.dequantize(*quantized, config.input_format.key, torch.float32)
    # The statistics are of inputs as the layer is called with them.
    return (ops.rotate(dense, config.rotation) if config.rotation else dense).view(x.shape)


def _input_ranges(
    batches: Sequence[_Inputs], layers: Sequence[LayerPlan]
) -> dict[nn.Module, Stats]:
    """Return amax and magnitudes of the inputs that each layer is called with, in all processes."""
    found = []
    for layer in layers:
        needs = tuple({"magnitudes"} & set(layer.config.needs))
        found.append(observing.Observer(needs, layer.columns))
        for x in (x for inputs in batches for x in inputs.get(layer.module, ())):
            found[-1](x)
    everywhere = zip(*ranks().gather([each.stats() for each in found]), strict=True)
    merged = [functools.reduce(Stats.merged, each) for each in everywhere]
    return {layer.module: stats for layer, stats in zip(layers, merged, strict=True)}


def _in_order(layers: Sequence[LayerPlan], batches: Sequence[_Inputs]) -> list[list[LayerPlan]]:
    """Return layers that read the same tensor together, in the order of their first calls."""
    order = {module: i for i, module in enumerate(dict.fromkeys(m for b in batches for m in b))}

    def keys(layer: LayerPlan) -> set[object]:
        # Together are those of one weight, too, and those whose names differ by numbers: experts.
        pattern = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        seen = ((i, x) for i, inputs in enumerate(batches) for x in inputs.get(layer.module, ()))
        return {pattern, ("weight", layer.weight_key), *((i, id(x)) for i, x in seen)}

    return joined(sorted(layers, key=lambda layer: order.get(layer.module, len(order))), keys)


def is_paired(layer: LayerPlan) -> bool:
    """Return whether a method needs the inputs of the float model, too."""
    return "cross" in layer.config.needs


def _is_viewed(layer: LayerPlan) -> bool:
    """Return whether a layer observes its inputs as they are once quantized."""
    return is_paired(layer) and layer.config.input_format is not None


def _view(layer: LayerPlan, stats: Stats) -> _View | None:
    """Return how the converted layer quantizes inputs of this range; None if it does not."""
    return (layer.config, input_scale_for(layer.config, stats)) if _is_viewed(layer) else None


def _moved(inputs: _Inputs, device: torch.device) -> _Inputs:
    there: dict[int, Tensor] = {}
    for x in (x for tensors in inputs.values() for x in tensors):
        if id(x) not in there:
            there[id(x)] = x.to(device)
    return {module: [there[id(x)] for x in tensors] for module, tensors in inputs.items()}
