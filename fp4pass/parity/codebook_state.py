"""CodebookState: the record of a tensor in a codebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.quant_state import OTHER_RECORDS, OtherRecord
from ..errors import OptionError
from ..quantization.tensor import not_finite, without_statistics
from .codebooks import CODEBOOKS, Codebook, get_codebook
from .operators import dequantize_codebook, quantize_codebook


@dataclass(frozen=True, eq=False, repr=False)
class CodebookState(OtherRecord):
    """A tensor in a codebook: `value = values[code] * absmax`.

    Blocks run over the flattened tensor of n elements; the last one may be shorter.

    Attributes:
        qdata: packed codes, uint8 [ceil(n * bits / 8)].
        absmax: the largest magnitude of each block, float32 [ceil(n / block)].
        codebook: the table of values.
        shape: the shape of the dense tensor.
        dtype: the dtype of the dense tensor.

    Raises:
        ShapeError: the tensors do not fit each other.

    Example:
        >>> import fp4pass.parity
        >>> state = fp4pass.quantize(torch.randn(4, 64), "nf4")
        >>> state.save("weight.safetensors")
        >>> state = fp4pass.parity.CodebookState.load("weight.safetensors").to("cpu")
        >>> fp4pass.dequantize(state).shape
        torch.Size([4, 64])
    """

    qdata: Tensor
    absmax: Tensor
    codebook: Codebook
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    scale_field: ClassVar[str] = "absmax"
    scheme_field: ClassVar[str] = "codebook"

    def __post_init__(self) -> None:
        self._require_float()
        count = math.prod(self.shape)
        self._require_tensor("qdata", (self.codebook.packed_bytes(count),), torch.uint8)
        self._require_tensor("absmax", (self.codebook.blocks_of(count),), torch.float32)

    @property
    def packing(self) -> str:
        """The order of the codes in the bytes of `qdata`."""
        return "2 codes a byte, the first high" if self.codebook.bits == 4 else "1 code a byte"

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of absmax."""
        return self.qdata.nbytes + self.absmax.nbytes

    @classmethod
    def _read(cls, qdata: Tensor, scale: Tensor, facts: Mapping[str, Any]) -> CodebookState:
        """Return the record of tensors of a file, and of the facts beside them."""
        return cls(qdata, scale, get_codebook(facts["scheme"]), facts["shape"], facts["dtype"])

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        scheme: str,
        block: int | str = "default",
        method: object = "sse",
        global_scale: float | str = "auto",
    ) -> CodebookState:
        """Quantize a checked tensor, as `fp4pass.quantize` does."""
        codebook = get_codebook(scheme, block)
        if global_scale != "auto":
            raise OptionError(
                f"quantize: {codebook.key} is a codebook and has no global scale, got "
                f"global_scale={global_scale!r}. Leave it out."
            )
        without_statistics(method)
        qdata, absmax = quantize_codebook(x, codebook.key)
        if not absmax.isfinite().all():
            raise not_finite()
        return cls(qdata, absmax, codebook, tuple(x.shape), x.dtype)

    def dequantize(self) -> Tensor:
        """Return the dense tensor, as `fp4pass.dequantize` does."""
        rest = (self.codebook.key, self.shape, self.dtype)
        tensor: Tensor = dequantize_codebook(self.qdata, self.absmax, *rest)
        return tensor


OTHER_RECORDS.update(dict.fromkeys(CODEBOOKS, CodebookState))
