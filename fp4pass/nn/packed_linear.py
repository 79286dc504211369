"""Linear layers with packed buffers in place of their weight, moved and saved bit by bit."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from ..errors import DtypeError, ShapeError, StateError, TraceError, expected
from ..ops.checks import require_dense

# Shape and dtype of each packed buffer of a layer.
BufferLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]

# Context managers around the reading of a layer's state, given the layer, the state dict and the
# prefix of its names. Rooms that know other libraries add one (checkpoint/model_layers.py).
AROUND_STATE: list[Callable[[PackedLinear, dict[str, Any], str], AbstractContextManager[None]]] = []

# The key in a pickled layer of the dtypes of its packed buffers.
_DTYPES = "_packed_dtypes"

# On a tensor: its copy on the device that the layers with it moved to.
_MOVED_TO = "_fp4pass_moved_to"


class PackedLinear(nn.Module):
    """A linear layer in packed buffers, which nothing casts. A subclass computes `weight`."""

    # Whether this process has a part (`fp4pass.parallel`).
    is_split: ClassVar[bool] = False

    in_features: int  # K
    out_features: int  # N

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
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

    def checked_input(self, input: Tensor) -> Tensor:
        """Return a dense input [..., K] with values, cast by autocast as a linear layer's is."""
        kind = input.device.type if type(input) is Tensor else ""
        if kind in ("", "meta") or input.is_nested or input.layout is not torch.strided:
            kind = self._checked_kind(input)
        if not input.ndim or input.shape[-1] != self.in_features:
            wanted = f"shape [..., {self.in_features}]"
            raise ShapeError(expected(self._input_name, wanted, tuple(input.shape)))
        # Autocast leaves float64. Asking whether it is on for the meta device is an error.
        if kind == "meta" or input.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
            return input
        return input.to(torch.get_autocast_dtype(kind))

    @property
    def _input_name(self) -> str:
        return f"The input of {type(self).__name__}"

    def _checked_kind(self, input: object) -> str:
        """Return the type of the device of an unusual input, once it is known to be served."""
        if not isinstance(input, Tensor):
            raise DtypeError(expected(self._input_name, "a tensor", type(input).__name__))
        if is_sharded(input):
            raise StateError(
                f"{expected(self._input_name, 'a tensor', 'a DTensor')} Split a converted model by "
                "fp4pass.parallelize(model, mesh), or by the styles of fp4pass.parallel."
            )

        require_dense(self._input_name, input)
        if input.is_meta and not all(each.is_meta for each in self.packed().values()):
            wanted, got = "a tensor with values", "one on the meta device"
            ways_out = "Move it to the layer, or the layer by .to('meta')."
            raise DtypeError(f"{expected(self._input_name, wanted, got)} {ways_out}")
        return input.device.type


def code_bits(packed: Tensor) -> Tensor:
    """Return packed codes as uint8, a view. Raises StateError if FSDP has cast them."""
    if packed.dtype == torch.uint8:
        return packed
    if packed.itemsize > 1:
        raise StateError(
            "fully_shard of this torch casts packed codes by its MixedPrecisionPolicy. Leave "
            "param_dtype at None, or use torch 2.13."
        )
    return packed.view(torch.uint8)


def scale_bits(scale: Tensor, storage: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return scales that are stored in a dtype as operators take them: bytes as uint8, a view."""
    if scale.dtype == torch.uint8:
        return scale
    if storage == torch.float32:
        if scale.dtype != storage:
            raise StateError(
                "fully_shard casts float32 scales by its MixedPrecisionPolicy. Leave param_dtype "
                "at None."
            )
        return scale
    if scale.itemsize > 1:
        # FSDP casts parameters to the dtype of a MixedPrecisionPolicy, which has these exactly.
        scale = scale.to(torch.float8_e4m3fn)
    if torch.jit.is_tracing():
        raise TraceError(
            "torch.jit.trace and torch.onnx.export(dynamo=False) cannot record the bits of block "
            f"scales in {scale.dtype}, a view in another dtype. Capture the model with "
            "fp4pass.trace or torch.export; for formats that know no packed weights save it and "
            "write dense ones with fp4pass transcode --to bf16."
        )
    return scale.view(torch.uint8)


def swap_class(
    module: nn.Module,
    cls: type[nn.Module],
    *,
    weight: nn.Parameter | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Change the class of a module in place: of a linear layer from dense to packed, or back."""
    # With `weight` or `buffers` the dense weight, packed buffers and packed attributes that it had
    # are removed; it gets `weight`, in the shape in which `cls` stores it, or `buffers`, of which
    # None registers an absent one. All else stays: bias, hooks, mode.
    parameters, old = module._parameters, type(module)
    if weight is not None or buffers is not None:
        parameters.pop("weight", None)
        if issubclass(old, PackedLinear):
            for name in old.packed_buffers:
                module._buffers.pop(name, None)
                parameters.pop(name, None)
            for name in old.packed_attributes:
                module.__dict__.pop(name, None)
    module.__class__ = cls
    if weight is not None:
        # In front of the bias, as in nn.Linear.
        rest = dict(parameters)
        parameters.clear()
        parameters.update(weight=weight, **rest)
    for name, tensor in (buffers or {}).items():
        module.register_buffer(name, tensor)
    module.__dict__.update(attributes or {})


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
