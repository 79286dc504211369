"""ModelOpt's two kernels of CUDA and Triton in PyTorch, so that it runs on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def on_a_cpu() -> None:
    """Give ModelOpt PyTorch in the place of its two kernels of CUDA and Triton."""
    from modelopt.torch.quantization import tensor_quant as tq

    def e4m3(scale: Tensor, amax: Tensor) -> Tensor:
        return tq.scaled_e4m3_impl(scale, amax)

    def cast(x: Tensor) -> Tensor:
        values = x.new_tensor(E2M1)
        near = (x.abs()[..., None] - values).abs()
        # Ties to the even code.
        best = near.amin(-1, keepdim=True)
        ties = (near == best) * (2.0 - torch.arange(8) % 2)
        return torch.copysign(values[ties.argmax(-1)], x)

    def of_blocks(x: Tensor, scale: Tensor) -> Tensor:
        blocks = x.float().reshape(scale.numel(), -1)
        scale = scale.reshape(-1, 1)
        scale = torch.where((scale == 0) | ~scale.isfinite(), torch.ones_like(scale), scale)
        parts = zip(blocks.split(65536), scale.split(65536), strict=True)
        return torch.cat([cast(b / s) * s for b, s in parts]).view_as(x).to(x.dtype)

    def static(
        ctx: Any,
        x: Tensor,
        amax: Tensor,
        total: Any = None,
        scaled: bool = True,
        most: float = 448.0,
        out: Any = None,
        through: bool = False,
    ) -> Tensor:
        scale = amax.float() / 6.0
        if scaled:
            total = amax.amax() if total is None else total
            scale = e4m3(scale, total.float() * (448.0 / most) / 6.0)
        return of_blocks(x, scale)

    def dynamic(
        x: Tensor, block: int, amax: Any, bits: int, exponents: int, scale_bits: int, scale_exp: int
    ) -> Tensor:
        blocks = x.float().reshape(-1, block)
        top = blocks.abs().amax(1)
        if scale_exp == 8:
            exponent = torch.ceil(torch.log2((top / 6.0).clamp(min=2.0**-126)))
            return of_blocks(x, torch.exp2(exponent))
        return of_blocks(x, e4m3(top / 6.0, amax.amax().float() / 6.0))

    tq.StaticBlockwiseFP4FakeQuantFunction.forward = staticmethod(static)
    tq._dynamic_block_quantize_impl = dynamic
    tq.dynamic_block_quantize_op = dynamic
