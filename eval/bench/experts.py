"""The experts of a layer on a GPU, beside their floor and transformers' bfloat16.

    python -m eval.bench.experts [--json FILE] [--rows GLOB] [--tiny]

A layer is all that its experts compute: the first product, silu(gate) * up, the second, and the
weighted sum over the experts of each token. Ours is what torch.compile makes of the forward of a
converted module, for each number of tokens; those of bfloat16 are transformers' own functions,
grouped_mm as it is for any number of tokens, batched_mm where generation takes it. Routing is
uniform, or all tokens go to the same k experts. Times are those of eval/bench/kernels.py: one CUDA
graph of at least 24 calls, each with a routing of its own, so that few weights are in L2 already.
The output of every row is compared with a loop in float32 over the same weights.

Floors: packed weights of the experts that were chosen at 4.3 TB/s, or multiplications at 790
TFLOP/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import moe

from eval.bench.harness import (
    BYTES_PER_US,
    FLOPS_PER_US,
    Call,
    activations_like,
    device,
    heavy_tailed,
    parser_for,
)
from eval.bench.kernels import OURS, Bench, divisor_of
from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format
from fp4pass.graph.inductor import install_passes
from fp4pass.nn.experts import weighted_sum


@dataclass(frozen=True)
class Shape:
    """A mixture layer: a token takes k of `experts`, from `hidden` columns to `inner` and back."""

    name: str
    experts: int
    k: int
    hidden: int
    inner: int


LAYERS = [Shape("qwen3-30b-a3b", 128, 8, 2048, 768), Shape("gpt-oss-20b", 32, 4, 2880, 2880)]
SMALL = [Shape("small", 6, 2, 64, 32)]
TOKENS = [1, 16, 256, 2048]

# Tokens up to which batched_mm is measured: it copies the weights of each pair.
BATCHED = 16

# Of an output against the loop in float32, relative: roundings to bfloat16 between the products,
# and inputs of 4 bits, whose product is tested elsewhere.
ALLOWED, ALLOWED_W4A4 = 0.01, 0.4


def main() -> None:
    parser = parser_for(__doc__, "moe-h200.json")
    parser.add_argument("--rows", default="*", help="only rows whose name matches, as */T=1")
    bench = Bench(parser.parse_args())
    with torch.no_grad():
        bench.run(layers)


@dataclass
class Stack:
    """Packed weights of experts, and the dense ones that they stand for: [E, N, K]."""

    packed: Tensor
    scale: Tensor
    divisors: Tensor | None
    dense: Tensor
    fmt: Format

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None, None, str]:
        return self.packed, self.scale, self.divisors, None, self.fmt.key


def stack(shape: Shape, n: int, k: int, fmt: Format) -> Stack:
    parts, generator = [], torch.Generator(device()).manual_seed(0)
    for _ in range(shape.experts):
        weight = heavy_tailed((n, k), generator).bfloat16()
        g = fmt.global_scale_for(weight.abs().max().item())
        packed, scale = ops.search(weight, None, g, fmt.key, "naive")
        divisor = torch.tensor([1 / g], device=weight.device) if fmt.has_global_scale else None
        dense = ops.dequantize(packed, scale, divisor, fmt.key, torch.bfloat16)
        parts.append((packed, scale, divisor, dense))
    packed, scale, divisors, dense = zip(*parts, strict=True)
    stored = torch.cat(divisors) if fmt.has_global_scale else None
    return Stack(torch.stack(packed), torch.stack(scale), stored, torch.stack(dense), fmt)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def forward(x: Tensor, ids: Tensor, routed: Tensor, first: Any, second: Any) -> Tensor:
    """Compute the layer as a module of QuantizedExperts does."""
    h = gated(ops.experts_linear(x, ids, *first))
    return weighted_sum(ops.experts_linear(h, ids, *second), ids, routed, x.dtype)


def forward_quantized(
    x: Tensor, ids: Tensor, routed: Tensor, first: Any, second: Any, divisors: Any, fmt: str
) -> Tensor:
    """Compute it with inputs of 4 bits, by global scales known before."""
    codes = (*ops.quantize(x, divisors[0], fmt), divisors[0])
    h = gated(ops.experts_linear_quantized(x, *codes, ids, *first))
    codes = (*ops.quantize(h, divisors[1], fmt), divisors[1])
    y = ops.experts_linear_quantized(h, *codes, ids, *second)
    return weighted_sum(y, ids, routed, x.dtype)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if not torch.cuda.is_available():
        return function
    install_passes()
    return torch.compile(function, dynamic=False)


def layers(bench: Bench) -> None:
    for shape in SMALL if bench.args.tiny else LAYERS:
        for fmt in (FORMATS["nvfp4"], FORMATS["mxfp4"]):
            # A function is compiled for as many shapes as one format has here.
            torch.compiler.reset()
            first = stack(shape, 2 * shape.inner, shape.hidden, fmt)
            second = stack(shape, shape.hidden, shape.inner, fmt)
            for routing in ("uniform", "same"):
                for tokens in (1, 5) if bench.args.tiny else TOKENS:
                    layer(bench, shape, (first, second), routing, tokens)


def layer(
    bench: Bench, shape: Shape, weights: tuple[Stack, Stack], routing: str, tokens: int
) -> None:
    """Measure one number of tokens; bfloat16 with the weights of nvfp4."""
    fmt, x = weights[0].fmt, activations_like((tokens, shape.hidden))
    routings = [routed(shape, routing, tokens, i) for i in range(24 if tokens <= 16 else 4)]
    expected = loop(x, *routings[0], weights)
    products = 3 * shape.hidden * shape.inner
    flops = 2 * products * tokens * shape.k
    chosen = statistics.mean(len(ids.unique()) for ids, _ in routings)

    def measure(
        kind: str, by: str, bits: float, call: Callable[..., Tensor], allowed: float = ALLOWED
    ) -> None:
        def check(found: Tensor) -> str | None:
            error = ((found.float() - expected).norm() / expected.norm()).item()
            return None if error <= allowed else f"a relative error of {error:.4f}"

        def calls() -> list[Call]:
            return [partial(call, x, *each) for each in routings]

        floor = max(chosen * products * bits / 8 / BYTES_PER_US, flops / FLOPS_PER_US)
        bench.measure(f"{shape.name}/{kind}/{routing}/T={tokens}", by, floor, calls, check)

    bits, stored = fmt.bits_per_weight((1, fmt.block)), [each.stored for each in weights]
    measure(fmt.name, OURS, bits, lambda x, i, r: compiled(forward)(x, i, r, *stored))
    if fmt.name != "nvfp4":
        return
    h = gated(ops.experts_linear(x, routings[0][0], *stored[0]))
    given = (*stored, (divisor_of(x, fmt), divisor_of(h, fmt)), fmt.key)
    rounding = lambda x, i, r: compiled(forward_quantized)(x, i, r, *given)  # noqa: E731
    measure("nvfp4-w4a4", OURS, bits, rounding, ALLOWED_W4A4)
    dense = experts(shape, weights)
    measure("bf16", "grouped_mm", 16, partial(moe.grouped_mm_experts_forward, dense))
    if tokens <= BATCHED:
        measure("bf16", "batched_mm", 16, partial(moe.batched_mm_experts_forward, dense))


def routed(shape: Shape, routing: str, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each token [T, k] and their weights, which sum to 1."""
    where = device()
    if routing == "uniform":
        ids = torch.rand(tokens, shape.experts, device=where).topk(shape.k, -1).indices
    else:
        ids = (torch.arange(shape.k, device=where) + seed * shape.k) % shape.experts
        ids = ids.repeat(tokens, 1)
    return ids, torch.rand(tokens, shape.k, device=where).softmax(-1).bfloat16()


def experts(shape: Shape, weights: tuple[Stack, Stack]) -> Any:
    """Return what transformers' functions read of a module of experts."""
    return SimpleNamespace(
        num_experts=shape.experts, has_gate=True, has_bias=False, is_transposed=False,
        has_post_expert_norm=False, _is_expert_parallel=False,
        gate_up_proj=weights[0].dense, down_proj=weights[1].dense,
        _apply_gate=compiled(gated),
    )  # fmt: skip


def loop(x: Tensor, ids: Tensor, weights_of: Tensor, weights: tuple[Stack, Stack]) -> Tensor:
    """Return the output in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        first, second = (each.dense[expert].float() for each in weights)
        gate, up = (x[token].float() @ first.t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ second.t() * weights_of[token, place, None].float()
        out.index_add_(0, token, y)
    return out


if __name__ == "__main__":
    main()
