"""Every operator on shapes that fill no tile, for a memory checker to watch.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python -m eval.bench.memcheck [--formats F...] [--dtypes D...]
        [--shapes I...] [--products]

Without the caching allocator every tensor is an allocation of its own, so that reading or writing
one element past its end is seen. Nearly all the time goes into compiling: a process for each format
(such as nvfp4:32), dtype and shape (0 to 8) shares it. Prints how many calls it made.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch

from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.kernels.norm.naive import SQUARES

DTYPES = ("bfloat16", "float16", "float32")

# Rows and blocks of the weight, and tokens. K of the last five has whole steps for all warps of
# the products with few rows, in one sum or in parts, by warps or by programs.
SHAPES = [
    (1, 1, 1),
    (33, 3, 5),
    (95, 5, 67),
    (19, 9, 600),
    (33, 128, 5),
    (33, 512, 13),
    (33, 128, 13),
    (1000, 128, 13),
    (8200, 64, 5),
]


def check(fmt: Format, dtype: torch.dtype, rows: int, count: int, tokens: int) -> int:
    """Call every operator once for a weight [rows, count * block]; returns how many calls."""
    columns = count * fmt.block
    weight = torch.randn(rows, columns, device="cuda").to(dtype)
    x = torch.randn(tokens, columns, device="cuda").to(dtype)
    groups = math.ceil(columns / 32)
    state = (
        torch.zeros(groups, 32, 32, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, device="cuda"),
    )
    ops.observe(x, *state)
    g = fmt.global_scale_for(weight.abs().max().item())
    divisor = torch.tensor([1 / g], device="cuda") if fmt.has_global_scale else None
    for objective in ("naive", "sse", "hessian"):
        packed, scale = ops.search(weight, state[0], g, fmt.key, objective)
    ops.dequantize(packed, scale, divisor, fmt.key, dtype)
    x_divisor = ops.dynamic_global_scale(x, fmt.key) if fmt.has_global_scale else None
    row = x[0].contiguous()
    for residual in (None, x):
        ops.norm_quantize(x, residual, row, None, "rms", 1e-6, x_divisor, fmt.key)
        ops.norm_quantize(x, residual, row, row, "layer", 1e-6, x_divisor, fmt.key)
        ops.norm_round(x, residual, row, 1e-6)
    both = torch.randn(tokens, 2 * columns, device="cuda").to(dtype)
    for activation in ("silu", "gelu", "gelu_tanh", "gelu_new"):
        ops.activate_quantize(x, None, activation, x_divisor, fmt.key)
        ops.activate_quantize(*both.chunk(2, -1), activation, x_divisor, fmt.key)
        ops.activate_round(*both.chunk(2, -1), activation)
    ops.quantize(x, x_divisor, fmt.key, "sse")
    ops.norm_quantize(x, None, row, None, "rms", 1e-6, x_divisor, fmt.key, "sse")
    ops.activate_quantize(x, x, "silu", x_divisor, fmt.key, "sse")
    return 27 + check_products(fmt, dtype, rows, count, tokens)


def check_products(fmt: Format, dtype: torch.dtype, rows: int, count: int, tokens: int) -> int:
    """Quantize and multiply; returns how many calls."""
    columns = count * fmt.block
    weight = torch.randn(rows, columns, device="cuda").to(dtype)
    x = torch.randn(tokens, columns, device="cuda").to(dtype)
    divisor = torch.ones(1, device="cuda") if fmt.has_global_scale else None
    packed, scale = ops.quantize(weight, divisor, fmt.key)
    x_packed, x_scale = ops.quantize(x, divisor, fmt.key)
    bias = torch.randn(rows, device="cuda").to(dtype)
    ops.linear(x, packed, scale, divisor, bias, fmt.key)
    ops.linear_quantized(x, x_packed, x_scale, divisor, packed, scale, divisor, bias, fmt.key)
    group = [packed, packed[:17]], [scale, scale[:17]], [divisor] * 2, [bias, bias[:17]], fmt.key
    ops.linear_group(x, *group)
    pair = [packed] * 2, [scale] * 2, [divisor] * 2, [bias] * 2
    ops.linear_group(x, *pair, fmt.key, "input", "silu")
    gain, residual = x[0].contiguous(), torch.randn(1, rows, device="cuda").to(dtype)
    alone = [packed], [scale], [divisor], [bias]
    ops.linear_group(x[:1], *alone, fmt.key, "input", None, residual)
    norm = (torch.ones(1, -(-columns // SQUARES), device="cuda"), gain, 1e-6)
    for gate in (None, "silu"):
        ops.linear_group(x[:1], *pair, fmt.key, "input", gate, None, *norm)
    ops.add_rms_norm(x, x, gain, 1e-6)
    ops.linear_quantized_group(x, x_packed, x_scale, divisor, *group)
    # Three experts, of which a token takes two, and ids of none.
    stack = [each.expand(3, *each.shape).contiguous() for each in (packed, scale)]
    stored = (*stack, None if divisor is None else divisor.expand(3), bias.expand(3, -1))
    ids = torch.randint(-1, 4, (tokens, 2), device="cuda")
    codes = (x_packed, x_scale, divisor)
    ops.experts_linear(x, ids, *stored, fmt.key)
    ops.experts_linear_quantized(x, *codes, ids, *stored, fmt.key)
    ops.experts_linear(x[:1], ids[:1], *stored, fmt.key)
    torch.cuda.synchronize()
    return 14


def main() -> None:
    known = [get_format(f.name, block).key for f in FORMATS.values() for block in f.blocks]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    every = range(len(SHAPES))
    parser.add_argument("--shapes", nargs="+", type=int, choices=every, default=every, metavar="I")
    parser.add_argument("--products", action="store_true", help="products alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    made = check_products if args.products else check
    calls = 0
    for key, dtype, i in itertools.product(args.formats, args.dtypes, args.shapes):
        calls += made(get_format(key), getattr(torch, dtype), *SHAPES[i])
    what = ", ".join((*args.formats, *args.dtypes))
    print(f"{calls} calls of {what} on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
