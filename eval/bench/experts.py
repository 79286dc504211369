"""How long the experts of a layer take on a GPU, beside their floor and transformers' bfloat16.

    python -m eval.bench.experts [--output FILE] [--rows GLOB] [--smoke]

A layer is all that its experts compute: the first product, silu(gate) * up, the second, and the
weighted sum over the experts of each token. Ours is what torch.compile makes of the forward of a
converted module, for each number of tokens; those of bfloat16 are transformers' own functions,
grouped_mm as it is for any number of tokens, batched_mm where generation takes it. Routing is
uniform, or all tokens go to the same k experts. Times are those of eval/bench/kernels.py: one CUDA
graph of at least 24 calls, each with a routing of its own, or experts of its own, so that few
weights are in L2 already. The output of every row is compared with a loop in float32 over the same
weights.

Floors: packed weights of the experts that were chosen at 4.3 TB/s, or multiplications at 790
TFLOP/s. Searches are of all weights of a layer, as `convert` calls them: by one call for a stack
where the method takes it, else by one for each expert. --smoke is a rehearsal on small layers, on
any device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import moe

from eval.bench.kernels import (
    BYTES_PER_US,
    FLOPS_PER_US,
    OURS,
    Bench,
    Call,
    activations_like,
    divisor_of,
    heavy_tailed,
)
from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format
from fp4pass.experts import weighted_sum
from fp4pass.graph.inductor import install_passes
from fp4pass.methods import Stats
from fp4pass.methods.base import Method, resolve_method


@dataclass(frozen=True)
class Shape:
    """A layer of `experts`, k of which a token takes, from `hidden` columns to `inner` and back."""

    name: str
    experts: int
    k: int
    hidden: int
    inner: int


LAYERS = [
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880),
]
SMALL = [Shape("small", 6, 2, 64, 32)]
TOKENS = [1, 16, 256, 2048]
ROUTINGS = ["uniform", "same"]

# Tokens up to which batched_mm is measured: it copies the weights of each pair.
BATCHED = 16

# Microseconds to stay under and to aim at, from issue 22, in the order of TOKENS.
GOALS = {
    "qwen3-30b-a3b": [(16, 11), (85, 65), (170, 120), (450, 320)],
    "gpt-oss-20b": [(32, 22), (150, 115), (300, 200), (860, 650)],
}
SEARCH_GOALS_US = {"sse": (10_000, None), "hessian": (60_000, None)}

# Of an output against the loop in float32, relative: roundings to bfloat16 between the products.
ALLOWED = 0.01


def main() -> None:
    options = parse_args()
    bench = MoeBench(options)
    with torch.no_grad():
        bench.run(searches)
        bench.run(layers)
    failed = [row for row in bench.rows if row["error"]]
    print(f"{len(bench.rows)} rows, {len(failed)} without a time, {bench.seconds():.0f} s")


class MoeBench(Bench):
    """The rows of this page, and what they have to reach."""

    def goals(self, name: str) -> tuple[float | None, float | None]:
        layer, _, routing, *tokens = name.split("/")
        if layer == "search":
            return SEARCH_GOALS_US[routing]
        if routing != "uniform" or layer not in GOALS:
            return None, None
        return GOALS[layer][TOKENS.index(int(tokens[0].removeprefix("T=")))]


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


def stack(shape: Shape, n: int, k: int, fmt: Format, device: torch.device) -> Stack:
    parts = []
    for _ in range(shape.experts):
        weight = heavy_tailed((n, k), device)
        g = fmt.global_scale_for(weight.abs().max().item())
        packed, scale = ops.search(weight, None, g, fmt.key, "naive")
        divisor = torch.tensor([1 / g], device=device) if fmt.has_global_scale else None
        dense = ops.dequantize(packed, scale, divisor, fmt.key, torch.bfloat16)
        parts.append((packed, scale, divisor, dense))
    packed, scale, divisors, dense = zip(*parts, strict=True)
    stored = torch.cat(divisors) if fmt.has_global_scale else None
    return Stack(torch.stack(packed), torch.stack(scale), stored, torch.stack(dense), fmt)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def forward(x: Tensor, ids: Tensor, routed: Tensor, first: Any, second: Any) -> Tensor:
    """As a module of QuantizedExperts computes it."""
    h = gated(ops.experts_linear(x, ids, *first))
    return weighted_sum(ops.experts_linear(h, ids, *second), ids, routed, x.dtype)


def forward_quantized(
    x: Tensor, ids: Tensor, routed: Tensor, first: Any, second: Any, divisors: Any, fmt: str
) -> Tensor:
    """With inputs of 4 bits, each token quantized once, by global scales known before."""
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


def layers(bench: MoeBench) -> None:
    for shape in SMALL if bench.options.smoke else LAYERS:
        for fmt in (FORMATS["nvfp4"], FORMATS["mxfp4"]):
            # A function is compiled for as many shapes as one format has here.
            torch.compiler.reset()
            first = stack(shape, 2 * shape.inner, shape.hidden, fmt, bench.device)
            second = stack(shape, shape.hidden, shape.inner, fmt, bench.device)
            for routing in ROUTINGS:
                for tokens in (1, 5) if bench.options.smoke else TOKENS:
                    layer(bench, shape, (first, second), routing, tokens)
                    bench.write()


def layer(
    bench: MoeBench, shape: Shape, weights: tuple[Stack, Stack], routing: str, tokens: int
) -> None:
    """Rows of one number of tokens; those of bfloat16 with the weights of nvfp4."""
    fmt, device = weights[0].fmt, bench.device
    x = activations_like((tokens, shape.hidden), device)
    routings = [routed(shape, routing, tokens, i, device) for i in range(24 if tokens <= 16 else 4)]
    expected = loop(x, *routings[0], weights)

    def check(found: Tensor) -> str | None:
        error = ((found.float() - expected).norm() / expected.norm()).item()
        return None if error <= ALLOWED else f"a relative error of {error:.4f}"

    def check_rounded(found: Tensor) -> str | None:
        # Inputs of 4 bits: what the product in float32 is not is tested elsewhere.
        error = ((found.float() - expected).norm() / expected.norm()).item()
        return None if error <= 0.4 else f"a relative error of {error:.4f}"

    products = 3 * shape.hidden * shape.inner
    flops = 2 * products * tokens * shape.k
    chosen = statistics.mean(len(ids.unique()) for ids, _ in routings)
    name = f"{routing}/T={tokens}"

    def measure(kind: str, by: str, bits: float, call: Callable[..., Tensor], check: Any) -> None:
        floor = max(chosen * products * bits / 8 / BYTES_PER_US, flops / FLOPS_PER_US)

        def calls() -> list[Call]:
            return [partial(call, x, *each) for each in routings]

        bench.measure(f"{shape.name}/{kind}/{name}", by, floor, calls, check)

    bits = fmt.bits_per_weight
    measure(fmt.name, OURS, bits, partial(ours, weights=weights), check)
    if fmt.name != "nvfp4":
        return
    h = gated(ops.experts_linear(x, routings[0][0], *weights[0].stored))
    divisors = divisor_of(x, fmt), divisor_of(h, fmt)
    rounding = partial(ours_quantized, divisors, weights=weights)
    measure("nvfp4-w4a4", OURS, bits, rounding, check_rounded)
    dense = experts(shape, weights)
    measure("bf16", "grouped_mm", 16, partial(moe.grouped_mm_experts_forward, dense), check)
    if tokens <= BATCHED:
        measure("bf16", "batched_mm", 16, partial(moe.batched_mm_experts_forward, dense), check)


def routed(
    shape: Shape, routing: str, tokens: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The experts of each token [T, k] and their weights, which sum to 1."""
    if routing == "uniform":
        ids = torch.rand(tokens, shape.experts, device=device).topk(shape.k, -1).indices
    else:
        ids = (torch.arange(shape.k, device=device) + seed * shape.k) % shape.experts
        ids = ids.repeat(tokens, 1)
    return ids, torch.rand(tokens, shape.k, device=device).softmax(-1).bfloat16()


def ours(x: Tensor, ids: Tensor, routed: Tensor, *, weights: tuple[Stack, Stack]) -> Tensor:
    return compiled(forward)(x, ids, routed, *(each.stored for each in weights))


def ours_quantized(
    divisors: tuple[Tensor | None, Tensor | None],
    x: Tensor,
    ids: Tensor,
    routed: Tensor,
    *,
    weights: tuple[Stack, Stack],
) -> Tensor:
    stored = (each.stored for each in weights)
    return compiled(forward_quantized)(x, ids, routed, *stored, divisors, weights[0].fmt.key)


def experts(shape: Shape, weights: tuple[Stack, Stack]) -> Any:
    """What transformers' functions read of a module of experts."""
    return SimpleNamespace(
        num_experts=shape.experts, has_gate=True, has_bias=False, is_transposed=False,
        has_post_expert_norm=False, _is_expert_parallel=False,
        gate_up_proj=weights[0].dense, down_proj=weights[1].dense,
        _apply_gate=compiled(gated),
    )  # fmt: skip


def loop(x: Tensor, ids: Tensor, weights_of: Tensor, weights: tuple[Stack, Stack]) -> Tensor:
    """The output in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        first, second = (each.dense[expert].float() for each in weights)
        gate, up = (x[token].float() @ first.t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ second.t() * weights_of[token, place, None].float()
        out.index_add_(0, token, y)
    return out


def searches(bench: MoeBench) -> None:
    """All weights of a layer."""
    shape, fmt = (SMALL if bench.options.smoke else LAYERS)[0], FORMATS["nvfp4"]
    sizes = [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)]
    weights = [heavy_tailed(size, bench.device) for size in sizes]
    stacks = [w.expand(shape.experts, -1, -1).clone() for w in weights]
    for objective in ("sse", "hessian"):
        hessians = [None, None]
        if objective == "hessian":
            rows = [activations_like((1024, k), bench.device).float() for _, k in sizes]
            blocks = [x.view(len(x), -1, 32).transpose(0, 1) for x in rows]
            hessians = [x.mT @ x for x in blocks]

        found_by, chosen = resolve_method(objective)

        def call(method: Method = found_by, chosen: Any = chosen, hessians: Any = hessians) -> None:
            for stack, hessian in zip(stacks, hessians, strict=True):
                if method.stack is not None:
                    method.stack(stack, fmt, [2.0**-8] * len(stack), chosen)
                    continue
                for weight in stack:
                    method.function(weight, Stats(block_hessian=hessian), fmt, 2.0**-8, chosen)

        name = f"search/{shape.name}/{objective}"
        if not bench.wants(name):
            continue
        times = []
        for _ in range(4):
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            times.append(1e6 * (time.perf_counter() - began))
        bytes_moved = sum(2.6 * each.numel() for each in stacks)
        must, go_for = SEARCH_GOALS_US[objective]
        row = {"row": name, "by": OURS, "us": statistics.median(times[1:]), "how": "wall clock"}
        row |= {"floor_us": bytes_moved / BYTES_PER_US, "must_us": must, "go_for_us": go_for}
        bench.rows.append(row | {"error": None})
        print(f"{bench.seconds():6.1f} s  {name:36} {OURS:24} {row['us']:10.2f} us", flush=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[2]
    output = root / "eval" / "results" / "moe-h200.json"
    parser.add_argument("--output", type=Path, default=output, help="the JSON file")
    parser.add_argument("--rows", default="*", help="only rows whose name matches, as */T=1")
    parser.add_argument("--smoke", action="store_true", help="small layers; any device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
