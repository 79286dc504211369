"""The base class of linear layers whose weight is kept as packed buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._compat.transformers import saves_adapters, saving_model, saving_owner
from ._compat.transformers_heads import is_pretrained
from .distributed import is_sharded
from .errors import DtypeError, ShapeError, StateError, TraceError, expected
from .ops.checks import require_dense

# Shape and dtype of each packed buffer of a layer.
BufferLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]

# Under which pickled layers keep the dtypes of their packed buffers.
_DTYPES = "_packed_dtypes"


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept as packed buffers.

    Packed buffers move with the module and are never cast. A subclass computes `weight` from them
    when it is read, and `forward` from `checked_input`.
    """

    # The buffers that replace the weight, and the attributes that a dense linear does not have.
    packed_buffers: ClassVar[tuple[str, ...]] = ()
    packed_attributes: ClassVar[tuple[str, ...]] = ()

    in_features: int  # K
    out_features: int  # N

    def checked_input(self, input: Tensor) -> Tensor:
        """Return an input [..., K], cast by autocast as a linear layer's is.

        Raises DtypeError for what is no dense tensor with values, and ShapeError for another K.
        """
        if type(input) is not Tensor:
            self._require_own_tensor(input)
        if input.is_nested or input.layout is not torch.strided:
            require_dense(self._input_name, input)
        if not input.ndim or input.shape[-1] != self.in_features:
            wanted = f"shape [..., {self.in_features}]"
            raise ShapeError(expected(self._input_name, wanted, tuple(input.shape)))
        # Autocast leaves float64. Asking whether it is on for the meta device is an error.
        kind = input.device.type
        if kind == "meta":
            self._require_meta()
        if kind == "meta" or input.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
            return input
        return input.to(torch.get_autocast_dtype(kind))

    @property
    def _input_name(self) -> str:
        return f"The input of {type(self).__name__}"

    def _require_own_tensor(self, input: object) -> None:
        if not isinstance(input, Tensor):
            raise DtypeError(expected(self._input_name, "a tensor", type(input).__name__))
        if is_sharded(input):
            raise StateError(
                f"{expected(self._input_name, 'a tensor', 'a DTensor')} Split a converted model by "
                "fp4pass.parallelize(model, mesh), or by the styles of fp4pass.parallel."
            )

    def _require_meta(self) -> None:
        if not all(each.is_meta for each in self._packed().values()):
            wanted, got = "a tensor with values", "one on the meta device"
            ways_out = "Move it to the layer, or the layer by .to('meta')."
            raise DtypeError(f"{expected(self._input_name, wanted, got)} {ways_out}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self._packed():
            raise StateError(
                f"{self}: its weight is packed and cannot be set. Set that of the float model and "
                "convert it again, or load packed buffers with load_state_dict."
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> None:
        # torch.jit.script asks each module for what stands for it.
        raise TraceError(
            f"{self}: torch.jit.script cannot compile a layer with a packed weight. {_CAPTURE}"
        )

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype that a state dict must have for each packed buffer."""
        return {name: (tuple(t.shape), t.dtype) for name, t in self._packed().items()}

    def _packed(self) -> dict[str, Tensor]:
        """Return the packed buffers that the layer has."""
        # FSDP shards parameters alone (`fp4pass.parallel.fully_shard`).
        known = {**self._buffers, **self._parameters}
        found = ((name, known.get(name)) for name in self.packed_buffers)
        return {name: tensor for name, tensor in found if tensor is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move the packed buffers as bytes, so that no `fn` casts them."""
        # By identity; never without a buffer, for another thread may run the layer.
        moved = {id(tensor): _moved(tensor, fn) for tensor in self._packed().values()}

        def move(tensor: Tensor) -> Tensor:
            return moved[id(tensor)] if id(tensor) in moved else fn(tensor)

        super()._apply(move, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Unpickling a float8 tensor fails in torch 2.13, so these buffers are pickled as bytes. The
        # others stay as they are: layers may share them.
        found = [(n, t) for n, t in self._packed().items() if n in self._buffers]
        packed = {n: t for n, t in found if t.dtype.is_floating_point and t.dtype.itemsize == 1}
        buffers = {**self._buffers, **{n: t.view(torch.uint8) for n, t in packed.items()}}
        dtypes = {n: t.dtype for n, t in packed.items()}
        return {**self.__dict__, "_buffers": buffers, _DTYPES: dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, dtype in self.__dict__.pop(_DTYPES).items():
            self._buffers[name] = self.get_buffer(name).view(dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Refuse `save_pretrained` of a model whose config does not say what is packed."""
        if self._packed():
            refuse_foreign(self, prefix)
        saving = saving_model() if self._packed() else None
        if saving is not None and saves_adapters(saving):
            saving = None
        if saving is not None and getattr(saving.config, "quantization_config", None) is None:
            raise part_error(prefix.removesuffix("."))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if saving is not None and any(is_sharded(destination[prefix + n]) for n in self._packed()):
            raise StateError(
                f"{prefix.removesuffix('.')}: save_pretrained cannot write a layer that is split "
                "over processes. Call fp4pass.save(model, directory) in every process."
            )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load packed buffers; refuse others, which torch would cast, and dense weights."""
        names = (name for name in self.packed_buffers if prefix + name in state_dict)
        given = {name: state_dict[prefix + name] for name in names}
        problem = self._load_problem(given)
        if prefix + "weight" in state_dict and not given and self._packed():
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
        super()._load_from_state_dict(state_dict, prefix, *args)

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


# What captures packed layers.
_CAPTURE = (
    "Capture the model with fp4pass.trace or torch.export; for formats that know no packed weights "
    "save it and write dense ones with fp4pass convert --to bf16."
)


# Set while `fp4pass.save` reads the state dict of a model, whose `save_pretrained` may call it.
ASKED: ContextVar[bool] = ContextVar("fp4pass_asked", default=False)


def refuse_foreign(layer: nn.Module, prefix: str) -> None:
    """Raise StateError where `save_pretrained` of another library is about to write packed buffers.

    It would not say how they are packed, and what it wrote would not load. What lies in a model of
    transformers that says it may be asked for by what wraps that.
    """
    owner = None if ASKED.get() else saving_owner()
    if owner is None:
        return
    parts = owner.modules() if isinstance(owner, nn.Module) else ()
    for part in parts:
        config = getattr(part, "config", None) if is_pretrained(part) else None
        if getattr(config, "quantization_config", None) is not None and layer in part.modules():
            return
    kind = type(owner).__name__
    raise StateError(
        f"{prefix.removesuffix('.') or 'The model'}: save_pretrained of {kind} would write its "
        "packed weight without a word of how it is packed. Save what was converted with "
        "fp4pass.save(model, dir), or keep its state_dict with torch.save."
    )


def part_error(name: str) -> StateError:
    """Return the error for saving a whole model of which only a part is converted."""
    return StateError(
        f"A part of the model is converted ({name}), the model is not, so its config would not say "
        "what is packed. Save that part, or convert the whole float model, with rules= for the "
        "layers to skip."
    )


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


def scale_bits(scale: Tensor) -> Tensor:
    """Return block scales as uint8, a view. Raises TraceError where that cannot be recorded."""
    if scale.dtype == torch.uint8:
        return scale
    if scale.itemsize > 1:
        # FSDP casts parameters to the dtype of a MixedPrecisionPolicy, which has these exactly.
        scale = scale.to(torch.float8_e4m3fn)
    if torch.jit.is_tracing():
        raise TraceError(
            "torch.jit.trace and torch.onnx.export(dynamo=False) cannot record the bits of block "
            f"scales in {scale.dtype}, a view in another dtype. {_CAPTURE}"
        )
    return scale.view(torch.uint8)


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the same bits on the device where `fn` of Module._apply puts a tensor."""
    bits = tensor.view(torch.uint8)
    new = fn(bits)
    # `.type(dtype)` casts integers too.
    new = new if new.dtype == bits.dtype else bits.to(new.device)
    return tensor if new is bits else new.view(tensor.dtype)


def become(
    module: nn.Module,
    cls: type[nn.Module],
    *,
    weight: nn.Parameter | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Change the class of a linear layer in place: from dense to packed, or back.

    The module stays the same object, with its bias, hooks, mode and other attributes. The weight,
    packed buffers and packed attributes that it had are removed; it gets the dense `weight`, in the
    shape in which `cls` stores it, or `buffers`, of which None registers an absent one.
    """
    parameters, old = module._parameters, type(module)
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
