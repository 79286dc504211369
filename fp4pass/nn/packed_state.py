"""The state of layers with packed buffers: moved, pickled, saved and loaded bit by bit."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import StateError, TraceError

# Shape and dtype of each packed buffer of a layer.
BufferLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]

# Context managers around the reading of a layer's state, given the layer, the state dict and the
# prefix of its names. Rooms that know other libraries add one (checkpoint/savers.py).
AROUND_STATE: list[Callable[[PackedState, dict[str, Any], str], AbstractContextManager[None]]] = []

# The ways to capture packed layers.
CAPTURE = (
    "Capture the model with fp4pass.trace or torch.export; for formats that know no packed weights "
    "save it and write dense ones with fp4pass transcode --to bf16."
)

# The key in a pickled layer of the dtypes of its packed buffers.
_DTYPES = "_packed_dtypes"

# On a tensor: its copy on the device that the layers with it moved to.
_MOVED_TO = "_fp4pass_moved_to"


class PackedState(nn.Module):
    """A module with packed buffers in place of its weight: they move with it and are never cast."""

    # The buffers that replace the weight, and the attributes that a dense linear does not have.
    packed_buffers: ClassVar[tuple[str, ...]] = ()
    packed_attributes: ClassVar[tuple[str, ...]] = ()
    # Those that are one tensor in several layers.
    shared_buffers: ClassVar[tuple[str, ...]] = ()

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype that a state dict must have for each packed buffer."""
        return {name: (tuple(t.shape), t.dtype) for name, t in self.packed().items()}

    def stored_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in a state dict of buffers that FSDP may have as other bytes."""
        return {}

    def packed(self) -> dict[str, Tensor]:
        """Return the packed buffers that the layer has."""
        # FSDP shards parameters alone (`fp4pass.parallel.fully_shard`).
        known = {**self._buffers, **self._parameters}
        found = ((name, known.get(name)) for name in self.packed_buffers)
        return {name: tensor for name, tensor in found if tensor is not None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.packed():
            raise StateError(
                f"{self}: its weight is packed and cannot be set. Set that of the float model and "
                "convert it again, or load packed buffers with load_state_dict."
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> None:
        # torch.jit.script asks each module for another to compile in its place.
        raise TraceError(
            f"{self}: torch.jit.script cannot compile a layer with a packed weight. {CAPTURE}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedState:
        """Move the packed buffers as bytes, so that no `fn` casts them; shared ones stay shared."""
        old = self.packed()
        # By identity; never without a buffer, for another thread may run the layer.
        moved = {id(tensor): _moved(tensor, fn) for tensor in old.values()}
        for name in self.shared_buffers:
            if name in old:
                moved[id(old[name])] = _as_sharers(old[name], moved[id(old[name])])

        def move(tensor: Tensor) -> Tensor:
            return moved[id(tensor)] if id(tensor) in moved else fn(tensor)

        super()._apply(move, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Unpickling a float8 tensor fails in torch 2.13, so these buffers are pickled as bytes. The
        # others stay as they are: layers may share them.
        found = [(n, t) for n, t in self.packed().items() if n in self._buffers]
        packed = {n: t for n, t in found if t.dtype.is_floating_point and t.dtype.itemsize == 1}
        buffers = {**self._buffers, **{n: t.view(torch.uint8) for n, t in packed.items()}}
        dtypes = {n: t.dtype for n, t in packed.items()}
        return {**self.__dict__, "_buffers": buffers, _DTYPES: dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, dtype in self.__dict__.pop(_DTYPES).items():
            self._buffers[name] = self.get_buffer(name).view(dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with ExitStack() as stack:
            for around in AROUND_STATE:
                stack.enter_context(around(self, destination, prefix))
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dtype in self.stored_dtypes().items():
            tensor = destination.get(prefix + name)
            if tensor is not None and tensor.dtype != dtype and tensor.itemsize == 1:
                destination[prefix + name] = tensor.view(dtype)
        for name in () if keep_vars else self.shared_buffers:
            if prefix + name in destination:
                # Writers of files refuse tensors that share memory.
                destination[prefix + name] = destination[prefix + name].clone()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load packed buffers; refuse others, which torch would cast, and dense weights."""
        given = {n: state_dict[prefix + n] for n in self.packed_buffers if prefix + n in state_dict}
        views: dict[str, Any] = {}
        for name, own in self.packed().items():
            new = given.get(name)
            if not isinstance(new, Tensor):
                continue
            if name in self._parameters and new.dtype != own.dtype and new.itemsize == own.itemsize:
                # FSDP2 of torch before 2.13 has them in another dtype than a state dict.
                given[name] = views[prefix + name] = new.view(own.dtype)
            if name in self.shared_buffers and name in self._buffers and not _equal(own, new):
                # A scale that is copied into is shared only while it stays the same for all.
                self._buffers[name] = own.clone()
        problem = self._load_problem(given)
        if prefix + "weight" in state_dict and not given and self.packed():
            problem = (
                "expected packed buffers, got a dense weight. Load it into the float model, and "
                "convert that"
            )
        if problem:
            where = prefix.removesuffix(".") or "the layer"
            error_msgs: list[str] = args[-1]
            error_msgs.append(f"{where} ({self.extra_repr()}): {problem}.")
            return
        if given:
            self._make_room()
        whole = ChainMap(views, state_dict) if views else state_dict  # type: ignore[arg-type]
        super()._load_from_state_dict(whole, prefix, *args)

    def _load_problem(self, given: Mapping[str, Tensor]) -> str:
        """Return why packed buffers cannot be loaded, or ""."""
        for name, (shape, dtype) in self.buffer_layout().items():
            tensor = given.get(name)
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                return f"expected {name} of {shape} {dtype}, got {found}"
        return ""

    def _make_room(self) -> None:
        """Prepare for packed buffers that are about to be loaded."""


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the same bits on the device where `fn` of Module._apply puts a tensor."""
    bits = tensor.view(torch.uint8)
    new = fn(bits)
    # `.type(dtype)` casts integers too.
    new = new if new.dtype == bits.dtype else bits.to(new.device)
    return tensor if new is bits else new.view(tensor.dtype)


def _as_sharers(old: Tensor, new: Tensor) -> Tensor:
    """Return the copy that a layer with the same tensor has moved already, or the new one."""
    if new is old:
        return new
    # The tensor that was shared says where it went, as long as a layer still has it.
    twin: Tensor | None = getattr(old, _MOVED_TO, None)
    if twin is not None and _equal(twin, new):
        return twin
    setattr(old, _MOVED_TO, new)
    return new


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are on one device, not meta, and equal."""
    return a.device == b.device and a.device.type != "meta" and torch.equal(a, b)
