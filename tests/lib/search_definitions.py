"""Search by the definitions, for any format: slow, and what kernels/search is compared with.

The error of a block w with the metric H is r^T H r, r = w - q. `search_naive` tries every scale;
reference.py finds the same scales with fewer. `gptq_naive` is optimal brain surgery in blocks;
joint_reference.py gives the same targets without an inverse for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4pass.core.elements import element_table, scale_table
from fp4pass.core.formats import Format
from fp4pass.kernels.common.rounding import round_to_codes_


def search_naive(
    weight: Tensor, metric: Tensor | None, global_scale: float, fmt: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scale bytes and values of least error over all scales of the format."""
    # weight: [N, K]. metric: [K / block, n, n], None for the identity. Of equal errors the smaller
    # scale wins. Returned are uint8 [N, K], int64 [N, K / block] and float64 [N, K].
    x = weight.to(torch.float32).unflatten(1, (-1, 1, fmt.block))  # [N, J, 1, n]
    scale = scale_table(fmt.scale, x.device)[1 : fmt.scale.last + 1, None] * global_scale  # [S, 1]
    codes = round_to_codes_(x / scale, fmt.element)  # [N, J, S, n]
    values = element_table(fmt.element, x.device).double()[codes.int()] * scale.double()
    residual = x.double() - values
    weighted = residual if metric is None else residual @ metric.double()
    error = (weighted * residual).sum(-1)  # [N, J, S]
    best = (error == error.amin(-1, keepdim=True)).byte().argmax(-1)
    at = best[..., None, None].expand(-1, -1, 1, fmt.block)
    return codes.gather(2, at).flatten(1), best + 1, values.gather(2, at).flatten(1)


def gptq_naive(
    weight: Tensor,
    hessian: Tensor,
    global_scale: float,
    fmt: Format,
    damping: float,
    shrinkage: float = 0.0,
) -> Tensor:
    """Quantize a weight [N, K] block after block, the rest moved to compensate: float64 [N, K]."""
    # hessian: [K, K], of all inputs. With P the inverse of the part that is left, an error r of its
    # first block costs r^T P_bb^-1 r at best, when the rest moves by r P_bb^-1 P_b.
    x, n = weight.double().clone(), fmt.block
    # Blocks correlate less by the shrinkage, and damping is relative to the mean of the diagonal.
    full = hessian.double() / hessian.double().diagonal().mean()
    apart = torch.block_diag(*(full[i : i + n, i : i + n] for i in range(0, len(full), n)))
    full = (1 - shrinkage) * full + shrinkage * apart
    inverse = torch.linalg.inv(full + damping * torch.eye(len(full), dtype=full.dtype))
    found = []
    for start in range(0, x.shape[1], n):
        metric = torch.linalg.inv(inverse[:n, :n])
        block = x[:, start : start + n]
        found.append(search_naive(block, metric[None], global_scale, fmt)[2])
        spread = metric @ inverse[:n, n:]
        x[:, start + n :] -= (block - found[-1]) @ spread
        inverse = inverse[n:, n:] - inverse[n:, :n] @ spread
    return torch.cat(found, 1)
