"""Bring layers to their device, each once, and the next one ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.accelerate import execution_device, held, hook_of, is_made_later, sources_of
from ..errors import OptionError
from ..nn.experts import QUANTIZED, ExpertStack, current_weight

_CPU = torch.device("cpu")

# Threads that read ahead, and that copy: more than one, for a disk and for the copies.
_THREADS = 4

# Bytes of pinned memory of a copy, without which it does not overlap kernels.
_STAGED = 1 << 26

# Bytes of a page of memory: one of each is read to have the file in the page cache.
_PAGE = 1 << 12

# The copies of the tensors of a layer that is on its way, and the event behind each.
_Copies = Mapping[Tensor, tuple[Tensor, "Future[torch.cuda.Event]"]]


class LayerDevice:
    """Bring layers to a device and back; `keeps`: packed tensors go to a store, and not back."""

    def __init__(self, device: torch.device | str | None, keeps: bool) -> None:
        self.device = None if device is None else torch.device(device)
        self.keeps = keeps
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="fp4pass-read")
        self._copiers = ThreadPoolExecutor(_THREADS, thread_name_prefix="fp4pass-copy")
        self._next: tuple[nn.Module, _Copies] | None = None
        # Of each tensor of the layer that is placed: that at home, and the version of the copy.
        self._before: dict[Tensor, tuple[Tensor, int]] = {}

    def close(self) -> None:
        """Stop reading ahead."""
        self._next = None
        for pool in (self._readers, self._copiers):
            pool.shutdown(cancel_futures=True)

    def start(self, layers: Sequence[nn.Module]) -> None:
        """Begin to read and to bring the first layers."""
        self._read(layers[:1])
        self.look_ahead(layers)

    def look_ahead(self, layers: Sequence[nn.Module]) -> None:
        """Begin to bring the first of the layers that come, and to read the second."""
        for layer in layers[:1]:
            place = self._place_of(layer)
            if _is_hooked(layer) or place.type != "cuda":
                continue
            copies = {x: torch.empty_like(x, device=place) for x in _tensors_at_home(layer)}
            # The memory may be that of something that is still computed with.
            event = torch.cuda.current_stream(place).record_event()
            coming = {
                x: (copy, self._copiers.submit(_copy_async, x, copy, event))
                for x, copy in copies.items()
            }
            self._next = (layer, coming)
        # The disk is not to wait for the copies of the one in between.
        self._read(layers[1:2])

    def _read(self, layers: Sequence[nn.Module]) -> None:
        """Begin to read layers from the disk into the page cache, whatever a GPU waits for."""
        for layer in layers:
            if not _is_hooked(layer):
                for tensor in (*sources_of(layer), *_tensors_at_home(layer)):
                    self._readers.submit(_touch, tensor)

    @contextmanager
    def placed(self, layer: nn.Module, name: str) -> Iterator[torch.device]:
        """Bring a layer to the yielded device, and back at the end; so with tensors of hooks."""
        place, is_hooked = self._place_of(layer), _is_hooked(layer)
        if is_hooked and self.device is not None and place != self.device:
            raise OptionError(
                f"device is {str(self.device)!r}, but accelerate runs {name} on {str(place)!r}. "
                "Leave device out, or load the model without accelerate's hooks."
            )
        home = _home_of(layer)
        with _held_layer(layer):
            if not is_hooked:
                self.bring(layer, place)
            try:
                yield place
            finally:
                if not is_hooked:
                    self._take_back(layer, home)
                self._before = {}

    def bring(self, layer: nn.Module, place: torch.device) -> None:
        """Bring the tensors of a layer that are elsewhere."""
        (coming, copies), self._next = self._next or (None, {}), None
        copies = copies if coming is layer else {}

        def brought(tensor: Tensor) -> Tensor:
            if tensor not in copies:
                return tensor.detach().to(place)
            copy, copied = copies[tensor]
            torch.cuda.current_stream(place).wait_event(copied.result())
            return copy

        found = self._before
        for parameter in layer.parameters():
            if parameter.device != place and parameter not in found:
                found[parameter] = parameter.data, 0
                parameter.data = brought(parameter)
        there: dict[Tensor, Tensor] = {}
        for buffers, name, tensor in _buffers(layer):
            if tensor.device != place and tensor not in found:
                # One for all modules that share it.
                copy = there[tensor] = there[tensor] if tensor in there else brought(tensor)
                buffers[name] = copy
                found[copy] = tensor, copy._version

    def _take_back(self, layer: nn.Module, home: torch.device) -> None:
        """Give a layer its tensors of before, which may be mapped, and move new ones home."""
        before = self._before
        parameters = dict.fromkeys(layer.parameters())
        for parameter in parameters | {x: None for x in before if isinstance(x, nn.Parameter)}:
            known = before.get(parameter)
            parameter.data = parameter.data.to(home) if known is None else known[0]
        kept = [m._buffers for m in layer.modules() if self.keeps and isinstance(m, QUANTIZED)]
        there: dict[Tensor, Tensor] = {}
        for buffers, name, tensor in _buffers(layer):
            known = before.get(tensor)
            if known is not None and known[1] == tensor._version:
                buffers[name] = known[0]
            elif tensor.device != home and not any(buffers is each for each in kept):
                buffers[name] = there[tensor] = there.get(tensor, tensor.to(home))

    def _place_of(self, layer: nn.Module) -> torch.device:
        if _is_hooked(layer):
            return execution_device(layer) or _home_of(layer)
        return _home_of(layer) if self.device is None else self.device


@contextmanager
def _held_layer(layer: nn.Module) -> Iterator[None]:
    """Keep the tensors that hooks bring of a layer until the end; stacks of experts know them."""

    def refresh() -> None:
        for module in layer.modules():
            if isinstance(module, ExpertStack):
                current_weight(module)

    try:
        with held(layer):
            refresh()
            yield
    finally:
        refresh()


def _is_hooked(layer: nn.Module) -> bool:
    """Return whether hooks bring a layer when it is called."""
    hooked = (module for module in layer.modules() if hook_of(module) is not None)
    return not all(map(is_made_later, hooked))


def _home_of(layer: nn.Module) -> torch.device:
    tensors = (*layer.parameters(), *layer.buffers())
    return next((x.device for x in tensors if x.device.type != "meta"), _CPU)


def _buffers(layer: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    return [
        (module._buffers, name, tensor)
        for module in layer.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _tensors_at_home(layer: nn.Module) -> list[Tensor]:
    """Return the tensors of a layer that are in memory, or mapped there."""
    buffers = (tensor for _, _, tensor in _buffers(layer))
    return [x for x in dict.fromkeys((*layer.parameters(), *buffers)) if x.device == _CPU]


def _touch(tensor: Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE].sum()


def _copy_async(source: Tensor, target: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
    """Copy a tensor to a GPU beside its kernels once an event is over, while this thread waits."""
    stream = torch.cuda.Stream(target.device)
    with torch.cuda.stream(stream), torch.no_grad():
        stream.wait_event(after)
        if not (source.is_contiguous() and target.is_contiguous() and source.numel()):
            target.copy_(source)
            return stream.record_event()
        staged = torch.empty(min(source.nbytes, _STAGED), dtype=torch.uint8, pin_memory=True)
        raw = (x.detach().reshape(-1).view(torch.uint8) for x in (source, target))
        for part, there in zip(*(each.split(len(staged)) for each in raw), strict=True):
            between = staged[: len(part)]
            between.copy_(part)
            there.copy_(between, non_blocking=True)
            stream.synchronize()
        return stream.record_event()
