"""The layers and 4-bit functions of bitsandbytes, by its names, and `swap` for a whole model.

Codes, absmax and values of "nf4" and "fp4" are those of bitsandbytes to the bit. Linears on 8-bit
integers round each row of both operands and sum the products exactly; columns of the input that
hold outliers are left out of that and multiplied as they are.
Source: Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.progress import track
from ..errors import NonFiniteError, OptionError, ShapeError, StateError, expected, unknown_name
from ..graph.rewrite import is_conv1d
from ..kernels.statistics.naive import weight_amax
from ..nn.linear import PACKED, SCALE
from ..nn.packed_linear import BufferLayout, PackedLinear, swap_class
from ..ops import gradients_of
from ..ops.checks import require_float
from ..ops.registration import operator
from ..quantization.functional import dequantize, quantize
from ..quantization.plan import LayerPlan, plan_layers
from ..quantization.replace import use_slow_paths
from ..quantization.scan import SkippedLayer
from ..record import LinearConfig, Rules, check_rules
from . import codebooks

__all__ = [
    "dequantize_4bit",
    "dequantize_fp4",
    "dequantize_nf4",
    "quantize_4bit",
    "quantize_fp4",
    "quantize_nf4",
]

# Buffers that a QuantizedLinear does not have.
ABSMAX, CODEBOOK, CODES = "weight_absmax", "weight_codebook", "weight_codes"

# The kind of Linear8bitLt; every other one is a quant_type of Linear4bit.
INT8 = "int8"

Layer = TypeVar("Layer", bound="PackedWeight")


def quantize_4bit(
    A: Tensor, *, blocksize: int = 64, quant_type: str = "fp4"
) -> tuple[Tensor, codebooks.CodebookState]:
    """Quantize a tensor to "fp4" or "nf4".

    It returns the packed codes, uint8 [ceil(n / 2), 1], and the record from which `dequantize_4bit`
    makes the tensor again.
    """
    state = quantize(A, _checked(quant_type), blocksize)
    assert isinstance(state, codebooks.CodebookState)
    return state.qdata.unsqueeze(1), state


def dequantize_4bit(A: Tensor, quant_state: codebooks.CodebookState) -> Tensor:
    """Return the tensor of what `quantize_4bit` returned, in its shape and dtype."""
    return dequantize(dataclasses.replace(quant_state, qdata=A.flatten()))


quantize_fp4 = partial(quantize_4bit, quant_type="fp4")
quantize_nf4 = partial(quantize_4bit, quant_type="nf4")
dequantize_fp4 = dequantize_nf4 = dequantize_4bit


def _checked(quant_type: str) -> str:
    if quant_type not in codebooks.CODEBOOKS:
        raise unknown_name("quant_type", quant_type, codebooks.CODEBOOKS)
    return quant_type


class PackedWeight(PackedLinear, nn.Linear, ABC):
    """An nn.Linear with packed buffers in place of its weight, which cannot be set."""

    # The dtype of `weight` when it is computed.
    weight_dtype: torch.dtype

    @abstractmethod
    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer."""

    @abstractmethod
    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the packed buffers of a weight [N, K]."""

    @abstractmethod
    def _decode(self, dtype: torch.dtype) -> Tensor:
        """Return the dense weight [N, K]."""

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] by the packed weight, transposed, and add the bias."""

    def _make_buffers(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.weight_dtype = torch.get_default_dtype() if dtype is None else dtype
        for name, (shape, kind) in self.buffer_layout().items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        zeros = torch.zeros(self.out_features, dtype=self.weight_dtype, device=device)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    @classmethod
    def made_of(cls: type[Layer], linear: nn.Module, **options: Any) -> Layer:
        """Return a layer with the weight of a linear layer quantized, and the same bias."""
        weight: Any = getattr(linear, "weight", None)
        known = isinstance(linear, nn.Linear | PackedLinear) or is_conv1d(linear)
        if not known or not isinstance(weight, Tensor) or weight.ndim != 2:
            raise OptionError(f"Expected an nn.Linear, got {type(linear).__name__}.")
        weight = weight.detach().t() if is_conv1d(linear) else weight.detach()
        rows, columns = weight.shape
        options |= {"device": "meta", "dtype": weight.dtype}
        layer = cls(columns, rows, linear.bias is not None, **options)
        if not weight.is_meta:
            # Inference tensors could neither be saved for a gradient nor be written to later.
            with torch.inference_mode(False), torch.no_grad():
                layer._buffers.update(layer._encode(weight))
        layer._parameters["bias"] = linear._parameters.get("bias")
        return layer.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight [N, K], computed from the packed buffers."""
        return self._decode(self.weight_dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias [..., N] of x [..., K], in the dtype of x or autocast's."""
        return self._multiply(self.checked_input(input))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move the buffers, and cast the dtype in which the weight is computed."""
        super()._apply(fn, recurse)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self


class Linear4bit(PackedWeight):
    """A linear layer with 4-bit weights: y = x W^T + bias, with W dequantized to x's dtype.

    `from_linear` makes one of a linear layer; a new one waits for the state dict of another. Its
    buffers are `weight_packed` uint8 [ceil(N K / 2)], `weight_absmax` float32 [blocks] and
    `weight_codebook` float32 [16], the values of the codes.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias.
        quant_type: "nf4" or "fp4", whose blocks run over the flattened weight.
        block_size: elements that share a scale; None for 64.
        compute_dtype: the dtype of the product; None for that of x.
        device: of the buffers.
        dtype: of the dense weight that is computed.

    Raises:
        OptionError: an option does not exist.

    Example:
        >>> layer = fp4pass.parity.Linear4bit.from_linear(model[0], "nf4")
        >>> layer(batches[0]).shape
        torch.Size([4, 64])
    """

    packed_buffers = (PACKED, ABSMAX, CODEBOOK)
    packed_attributes = ("codebook", "compute_dtype", "weight_dtype")

    codebook: codebooks.Codebook
    weight_packed: Tensor
    weight_absmax: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        block_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.codebook = codebooks.get_codebook(_checked(quant_type), block_size)
        self.compute_dtype = compute_dtype
        self._make_buffers(bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        quant_type: str = "nf4",
        block_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Linear4bit:
        """Make a layer from a linear layer; on the meta device it waits for a state dict.

        Args:
            linear: an nn.Linear, a packed linear layer or transformers' Conv1D.
            quant_type: as in Linear4bit.
            block_size: as in Linear4bit.
            compute_dtype: as in Linear4bit.

        Raises:
            NonFiniteError: the weight holds NaN or infinity.
        """
        options = {"quant_type": quant_type, "block_size": block_size}
        return cls.made_of(linear, compute_dtype=compute_dtype, **options)

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer."""
        size, blocks = self.codebook.sizes(self.out_features * self.in_features)
        return {
            PACKED: ((size,), torch.uint8),
            ABSMAX: ((blocks,), torch.float32),
            CODEBOOK: ((len(self.codebook.values),), torch.float32),
        }

    def _load_problem(self, given: Mapping[str, Tensor]) -> str:
        table = given.get(CODEBOOK)
        if problem := super()._load_problem(given):
            return problem
        if table is None or table.is_meta or table.equal(self._table(table.device)):
            return ""
        return f"expected {CODEBOOK} to be {self.codebook.name}, got another table"

    def _table(self, device: torch.device) -> Tensor:
        return codebooks.table_of(self.codebook, "values", device)

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        state = quantize(weight, self.codebook.key)
        assert isinstance(state, codebooks.CodebookState)
        table = self._table(weight.device).clone()
        return {PACKED: state.qdata, ABSMAX: state.absmax, CODEBOOK: table}

    def _decode(self, dtype: torch.dtype) -> Tensor:
        shape = (self.out_features, self.in_features)
        stored = (self.weight_packed, self.weight_absmax)
        weight: Tensor = codebooks.dequantize_codebook(*stored, self.codebook.key, shape, dtype)
        return weight

    def _multiply(self, x: Tensor) -> Tensor:
        stored = (self.weight_packed, self.weight_absmax, self.bias)
        wide = x.to(self.compute_dtype or x.dtype)
        return codebooks.linear_codebook(wide, *stored, self.out_features, self.codebook.key).to(
            x.dtype
        )

    def extra_repr(self) -> str:
        """Return the size and the options, for print(model)."""
        options = f"quant_type={self.codebook.name}, block_size={self.codebook.block}"
        return f"{super().extra_repr()}, {options}"


# ---- 8-bit integers -----------------------------------------------------------------------------

_LARGEST = 127

# As many products of two codes as int32 can sum, and as many as float32 can in any order.
MAX_COLUMNS = (2**31 - 1) // _LARGEST**2
_FLOAT_COLUMNS = 2**24 // _LARGEST**2


class Linear8bitLt(PackedWeight):
    """A linear layer in 8-bit integers: rows of x and W are rounded, their products summed exactly.

    `from_linear` makes one of a linear layer; a new one waits for the state dict of another. Its
    buffers are `weight_codes` int8 [N, K] and `weight_scale` float32 [N], the largest magnitude of
    a row divided by 127.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias.
        threshold: columns of x with a magnitude of at least this are outliers, multiplied in x's
            dtype by the dequantized columns of W; 0 for none. All rows of a call decide about a
            column, so the rows of a batch depend on each other.
        device: of the buffers.
        dtype: of the dense weight that is computed.

    Raises:
        OptionError: the threshold is negative.
        ShapeError: rows are so long that their sums may exceed int32.

    Example:
        >>> layer = fp4pass.parity.Linear8bitLt.from_linear(model[0])
        >>> layer(batches[0]).shape
        torch.Size([4, 64])
    """

    packed_buffers = (CODES, SCALE)
    packed_attributes = ("threshold", "weight_dtype")

    weight_codes: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        threshold: float = 6.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not threshold >= 0.0:
            raise OptionError(expected("threshold", "0 (no outliers) or more", repr(threshold)))
        if in_features > MAX_COLUMNS:
            raise ShapeError(
                f"in_features: expected at most {MAX_COLUMNS}, as many products of 8-bit codes as "
                f"int32 can sum, got {in_features}. Use Linear4bit for this layer."
            )
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.threshold = float(threshold)
        self._make_buffers(bias, device, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Module, threshold: float = 6.0) -> Linear8bitLt:
        """Make a layer from a linear layer; on the meta device it waits for a state dict.

        Args:
            linear: an nn.Linear, a packed linear layer or transformers' Conv1D.
            threshold: as in Linear8bitLt.

        Raises:
            NonFiniteError: the weight holds NaN or infinity.
        """
        return cls.made_of(linear, threshold=threshold)

    def buffer_layout(self) -> BufferLayout:
        """Return the shape and dtype of each packed buffer."""
        shape = (self.out_features, self.in_features)
        return {CODES: (shape, torch.int8), SCALE: (shape[:1], torch.float32)}

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        # Some rows at a time, because they are cast to float32.
        parts = [quantize_rows(rows) for rows in weight.split(4096)]
        codes, scale = (torch.cat(part) for part in zip(*parts, strict=True))
        if not scale.isfinite().all():
            raise NonFiniteError("The weight holds NaN or infinity. Repair it before the call.")
        return {CODES: codes, SCALE: scale}

    def _decode(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(self.weight_codes, self.weight_scale, dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        return linear_int8(x, self.weight_codes, self.weight_scale, self.bias, self.threshold)

    def extra_repr(self) -> str:
        """Return the size and the options, for print(model)."""
        return f"{super().extra_repr()}, threshold={self.threshold}"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [M, K] to integers times amax / 127: codes int8 [M, K] and scale float32 [M]."""
    # Ties go to even. The scale of a row with NaN or infinity is not finite, its code of NaN is 0.
    values = x.to(_wide(x.dtype))
    amax = values.abs().amax(-1)
    # By a number, CUDA would multiply with its reciprocal.
    scale = (amax / torch.full_like(amax, _LARGEST)).float()
    codes = (values / scale.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.nan_to_num_(0.0).to(torch.int8), scale


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes [N, K] times scale [N] in float32, or float64, rounded to `dtype`."""
    return (codes.to(_wide(dtype)) * scale.unsqueeze(-1)).to(dtype)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of codes a [M, K] and b [N, K], transposed: int32 [M, N]."""
    if a.is_cuda:
        left, right = padded(a, b)
        return torch._int_mm(left, right.t())[: len(a), : len(b)]
    # On a CPU without VNNI, torch's product of integers saturates.
    total = a.new_zeros((len(a), len(b)), dtype=torch.int32)
    for left, right in zip(a.split(_FLOAT_COLUMNS, 1), b.split(_FLOAT_COLUMNS, 1), strict=True):
        total += (left.float() @ right.float().t()).int()
    return total


def padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [N, K] with zeros up to what cuBLAS multiplies."""
    # That is M of at least 32, K of at least 16, and K and N in multiples of 8.
    columns = max(16, -(-a.shape[1] // 8) * 8) - a.shape[1]
    rows = (max(32, len(a)) - len(a), -len(b) % 8)
    left, right = (
        F.pad(each, (0, columns, 0, more)) for each, more in zip((a, b), rows, strict=True)
    )
    return left, right


def linear_int8_ref(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """Return x [..., K] times codes [N, K] and scale [N], with x rounded to int8 rows too."""
    # Columns of x with a magnitude of at least `threshold`, if it is not 0, are multiplied in x's
    # dtype. Sums are float32 (float64 for such x), rounded once. The gradient of x is that of the
    # dense product, as if rounding were the identity (straight-through).

    # Autocast would change the dtypes.
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        outliers = (rows.abs() >= threshold).any(0) if threshold else None
        kept = rows if outliers is None else rows.masked_fill(outliers, 0.0)
        x_codes, x_scale = quantize_rows(kept)
        y = int_mm(x_codes, codes).to(_wide(x.dtype))
        y.mul_(x_scale.unsqueeze(-1)).mul_(scale)
        if outliers is not None:
            if rows.is_cuda and torch.cuda.is_current_stream_capturing():
                # While a CUDA graph is captured nobody can ask how many there are.
                rows, taken = rows.masked_fill(~outliers, 0.0), codes
            else:
                columns = outliers.nonzero().squeeze(1)
                rows, taken = rows[:, columns], codes[:, columns]
            y += F.linear(rows, dequantize_rows(taken, scale, rows.dtype))
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], len(codes))


# Products of integers, which PyTorch has for GPUs too.
linear_int8 = operator(
    linear_int8_ref,
    shapes=lambda x, codes: x.new_empty((*x.shape[:-1], codes.shape[0])),
    checks=(require_float,),
    backward=gradients_of(
        3,
        lambda ctx, inputs: inputs[1:3],
        lambda ctx, stored, dtype: dequantize_rows(stored[0], stored[1], dtype),
    ),
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are divided and summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- a whole model ------------------------------------------------------------------------------


def swap(
    model: nn.Module,
    kind: str = "nf4",
    *,
    rules: Rules = (),
    block_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    threshold: float = 6.0,
) -> dict[str, str]:
    """Swap the linear layers of a model for Linear4bit or Linear8bitLt, in place.

    Output embeddings, weights that are an embedding's and routers are skipped unless a rule takes
    them. On the meta device nothing is quantized: the layers wait for a state dict of quantized
    ones. Everything is checked before the first layer is swapped.

    Args:
        model: the model; its modules stay the same objects.
        kind: a quant_type of Linear4bit, or "int8" for Linear8bitLt.
        rules: as for `convert`: (glob, None) skips layers, (glob, {}) takes them; the first match
            wins.
        block_size: as in Linear4bit.
        compute_dtype: as in Linear4bit.
        threshold: as in Linear8bitLt.

    Returns:
        For the name of each linear layer its kind, or the reason why it was skipped.

    Raises:
        OptionError: an option is unknown or does not fit the kind.
        RuleError: a rule matches nothing, or only some of the layers that share a weight.
        ShapeError: a rule has the whole name of a layer that cannot be swapped.
        NonFiniteError: a weight holds NaN or infinity.
        StateError: no layer is left to swap.

    Example:
        >>> fp4pass.parity.swap(model, "nf4", rules=[("2", None)])
        {'0': 'nf4', '2': "rule ('2', None)"}
    """
    if kind == INT8:
        if block_size is not None or compute_dtype is not None:
            raise OptionError(
                "block_size and compute_dtype: expected None for kind 'int8', as they are options "
                "of Linear4bit."
            )
        make: Any = partial(Linear8bitLt.from_linear, threshold=threshold)
    elif kind in codebooks.CODEBOOKS:
        codebooks.get_codebook(kind, block_size)
        options: dict[str, Any] = {"block_size": block_size, "compute_dtype": compute_dtype}
        make = partial(Linear4bit.from_linear, quant_type=kind, **options)
    else:
        raise unknown_name("kind", kind, [*codebooks.CODEBOOKS, INT8])
    given = check_rules(rules)
    if wrong := [glob for glob, each in given if each]:
        raise OptionError(f"rules: expected None or {{}} for {wrong[0]!r}, got options.")
    # Blocks of a codebook take any width, as those of this format do.
    plan = plan_layers(model, LinearConfig("fp8a16", "naive"), given)
    reasons = {layer.name: _problem(layer) for layer in plan.entries}
    chosen = [layer for layer in plan.layers if not reasons[layer.name]]
    if not chosen:
        why = "; ".join(f"{name or 'the model'}: {each}" for name, each in [*reasons.items()][:5])
        raise StateError(
            f"The model has no linear layer to swap. {why or 'It has no linear layer at all.'}"
        )
    for layer in chosen:
        weight = layer.module.get_parameter("weight")
        if not weight.is_meta and not math.isfinite(weight_amax(weight)):
            raise NonFiniteError(
                f"{layer.label}: its weight holds NaN or infinity. Repair the checkpoint, or skip "
                f"the layer with rules=[({layer.name!r}, None)]."
            )
    use_slow_paths(model)
    first: dict[int, PackedWeight] = {}
    for layer in track(chosen, "swap", unit="layers"):
        new = make(layer.module)
        # Layers that share a weight share its codes.
        buffers = first.setdefault(layer.weight_key, new)._buffers
        attributes = {name: each for name, each in vars(new).items() if not name.startswith("_")}
        swap_class(layer.module, type(new), buffers=buffers, attributes=attributes)
    return {name: reason or kind for name, reason in reasons.items()}


def _problem(layer: LayerPlan | SkippedLayer) -> str:
    """Return why a layer cannot be swapped, or ""."""
    module = layer.module
    if isinstance(module, PackedLinear):
        return f"is {module} already"
    if isinstance(layer, SkippedLayer):
        return layer.skip_reason
    if not isinstance(module, nn.Linear) and not is_conv1d(module):
        return "no layer calls it: fp4pass.convert rewrites graphs and stacks of experts"
    if "forward" in vars(module):
        return "its forward is not its class's (accelerate's hooks do that)"
    return ""
