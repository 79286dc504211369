"""Run a float model again from any of its layers on, and compare its predictions.

The first run keeps what each layer of a stack returned, and the logits. Later runs have the layers
in front of a group return that again, so that only the rest is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import FAULTS
from ...engine.layer_calls import map_tensors, offload_hidden_state
from ...errors import NonFiniteError, StateError
from ...evaluation.measure import token_kl
from ...quantization.observers.batches import call_arguments, device_of
from ...quantization.observers.computing import fast_dtype, halves, in_float32

_log = logging.getLogger(__name__)

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24

# The shares of a GPU's free memory for the results of layers, and for float32 weights.
_STATES, _WEIGHTS = 1 / 8, 1 / 2

# Rounding alone moves the KL of one computation by less than this, in nats.
_SAME = 1e-6


@contextmanager
def finely(*models: nn.Module) -> Iterator[None]:
    """Have models compute in float32, if there is memory for it.

    Where bfloat16 rounds otherwise behind a group, that alone has a KL as large as 8 bits do.
    """
    found = [tensor for model in models for tensor in halves(model)]
    fits = True
    for device in {tensor.device for tensor in found if tensor.is_cuda}:
        needed = sum(2 * tensor.nbytes for tensor in found if tensor.device == device)
        fits = fits and needed < _WEIGHTS * torch.cuda.mem_get_info(device)[0]
    if not fits:
        _log.info("no memory for groups to be measured in float32: they are in the model's dtype")
    with in_float32(*models) if fits else fast_dtype(*models):
        yield


class Forwards:
    """The runs of a float model on some batches.

    Attributes:
        logits: of each batch, as they were recorded.
        inputs: the identities of the tensors that watched modules were called with.
    """

    def __init__(
        self, root: nn.Module, batches: Sequence[Any], layers: Sequence[nn.Module] = ()
    ) -> None:
        """layers: of stacks, in front of groups; without them each run is whole."""
        self.root, self.batches, self._layers = root, batches, list(layers)
        self.logits: list[Tensor] = []
        self.inputs: dict[nn.Module, set[object]] = {}
        # The results of each layer, for each batch.
        self._outputs: list[dict[nn.Module, Any]] = []
        # When modules were first called and layers last ended, in the order of calls.
        self._begins: dict[nn.Module, int] = {}
        self._ends: dict[nn.Module, int] = {}
        self._repeated: set[nn.Module] = set()

    def record(self, watched: Sequence[nn.Module] = ()) -> None:
        """Run the model; note the inputs of some modules, and when they are called."""
        for i in range(len(self.batches)):
            self._record_batch(i, watched)
        # Within the last layer: behind all of them none would be tried.
        inside = {module for layer in self._layers for module in layer.modules()}
        last = max((n for module, n in self._begins.items() if module in inside), default=0)
        if self._layers and not self._agrees(last):
            _log.info("%s cannot be run from a layer on: each run is whole", _name(self.root))
            self._outputs.clear()

    def compare(self, model: nn.Module, begins: Sequence[nn.Module] = ()) -> Tensor:
        """Return KL and tokens of each sequence [sequences, 2], float64.

        Args:
            model: the recorded one, in which modules may be others now, or one converted from it.
            begins: the modules that are others; None of the layers in front of them runs. Without
                them all layers run.
        """
        times = [self._begins[module] for module in begins if module in self._begins]
        passed = self._passed(min(times)) if times else []
        found = []
        for i in range(len(self.batches)):
            with self._passing(i, passed):
                logits = self._run(model, i)
            found.append(self._sums(i, logits))
        return torch.cat(found)

    def _passed(self, begin: int) -> list[nn.Module]:
        """Return the layers that are done before a module is called."""
        if not self._outputs:
            return []
        once = [layer for layer in self._layers if layer not in self._repeated]
        return [layer for layer in once if self._ends.get(layer, begin) < begin]

    def _record_batch(self, i: int, watched: Sequence[nn.Module]) -> None:
        outputs: dict[nn.Module, Any] = {}
        # Tensors that live as long as the run, so that no other one gets their identity.
        alive: list[Any] = []
        calls: Counter[nn.Module] = Counter()
        time = 0

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal time
            time += 1
            self._begins[module] = min(time, self._begins.get(module, time))
            x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if x is not None:
                alive.append(x)
                self.inputs.setdefault(module, set()).add((i, id(x), x._version))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal time
            time += 1
            calls[module] += 1
            self._ends[module] = max(time, self._ends.get(module, time))
            outputs[module] = map_tensors(output, self._kept)

        handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in watched]
        handles += [layer.register_forward_hook(leave) for layer in self._layers]
        try:
            self.logits.append(self._kept(self._run(self.root, i)))
        finally:
            for handle in handles:
                handle.remove()
        self._outputs.append(outputs)
        self._repeated.update(module for module, count in calls.items() if count > 1)
        # A layer that some batches do not come to has nothing to return for them.
        self._repeated.update(layer for layer in self._layers if layer not in outputs)

    def _kept(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor where there is room for it."""
        if x.device.type == "cuda":
            free = torch.cuda.mem_get_info(x.device)[0]
            if x.nbytes * (len(self._layers) + 1) * len(self.batches) <= _STATES * free:
                return x.detach().clone()
        return offload_hidden_state(x, copy=True)

    @contextmanager
    def _passing(self, i: int, passed: Sequence[nn.Module]) -> Iterator[None]:
        """Replay the recorded results of layers instead of running them."""

        def again(layer: nn.Module) -> Any:
            device = device_of(layer)

            # A layer behind may change its input in place.
            def forward(*args: Any, **kwargs: Any) -> Any:
                kept = self._outputs[i][layer]
                return map_tensors(kept, lambda x: x.to(device, copy=True))

            return forward

        # Hooks of others may have put a forward there.
        before = [layer.__dict__.get("forward") for layer in passed]
        for layer in passed:
            layer.__dict__["forward"] = again(layer)
        try:
            yield
        finally:
            for layer, forward in zip(passed, before, strict=True):
                del layer.__dict__["forward"]
                if forward is not None:
                    layer.__dict__["forward"] = forward

    def _agrees(self, begin: int) -> bool:
        """Return whether the unchanged model predicts the same with all layers passed over."""
        passed = self._passed(begin)
        try:
            with self._passing(0, passed):
                found = self._sums(0, self._run(self.root, 0))
        except FAULTS:
            return False
        return bool((found[:, 0] <= _SAME * found[:, 1]).all())

    def _run(self, model: nn.Module, i: int) -> Tensor:
        """Return the logits [B, T, vocabulary] of a batch. Raises StateError."""
        args, kwargs = call_arguments(self.batches[i], device_of(model))
        output = model(*args, **kwargs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise StateError(
                "The output of the model: expected logits [batch, tokens, vocabulary], got "
                f"{type(output).__name__} without them. Give a causal language model."
            )
        return logits

    def _sums(self, i: int, logits: Tensor) -> Tensor:
        """Return KL and tokens of each sequence of a batch [B, 2], float64."""
        batch, length, vocabulary = logits.shape
        flat, others = logits.flatten(0, 1), self.logits[i].flatten(0, 1)
        step = max(1, _CHUNK // vocabulary)
        parts = zip(flat.split(step), others.split(step), strict=True)
        kl = torch.cat([token_kl(ours, theirs.to(ours.device)).cpu() for ours, theirs in parts])
        _, kwargs = call_arguments(self.batches[i], None)
        mask = kwargs.get("attention_mask")
        seen = torch.ones(batch, length, dtype=torch.float64)
        if isinstance(mask, Tensor) and mask.shape == seen.shape:
            seen = (mask != 0).double().cpu()
        kl = torch.where(seen > 0, kl.view(batch, length), 0.0)
        return torch.stack([kl.sum(1), seen.sum(1)], 1)


def mean_kl(sums: Tensor) -> float:
    """Return nats per token of KL and tokens [sequences, 2]. Raises NonFiniteError for NaN."""
    found = float(sums[:, 0].sum() / sums[:, 1].sum())
    if found != found:
        raise NonFiniteError("The KL is NaN: a model returns logits that are NaN, or hides all.")
    return max(found, 0.0)


def _name(root: nn.Module) -> str:
    return type(root).__name__
