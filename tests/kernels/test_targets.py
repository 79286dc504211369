"""Every kernel compiles for Ampere, Ada, Hopper and Blackwell, without a GPU.

A process of its own launches the kernels as the library does, on tensors without storage and under
a driver that claims to be the target. It records what Triton would compile, and compiles that to
machine code. Every kernel must have been launched. Triton's cache is kept between runs: what has
not changed is not compiled again.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kernel_cases import flat
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fp4pass.kernels
from fp4pass.core.formats import MXFP4, NVFP4, Format, get_format
from fp4pass.core.packing import PackedInput, PackedWeight
from fp4pass.kernels.attention.triton import attention_span_triton
from fp4pass.kernels.compute_fp8.operands_triton import (
    activate_round_triton,
    expanded,
    norm_round_triton,
)
from fp4pass.kernels.dequantize.triton import dequantize_triton
from fp4pass.kernels.experts.triton import experts_quantize_triton
from fp4pass.kernels.linear.fp8_weights_triton import linear_fp8_weights
from fp4pass.kernels.norm.naive import SQUARES, WIDEST
from fp4pass.kernels.norm.triton import add_rms_norm_triton
from fp4pass.kernels.quantize.naive import ACTIVATIONS
from fp4pass.kernels.quantize.triton import (
    activate_quantize_triton,
    dynamic_global_scale_triton,
    norm_quantize_triton,
    quantize_triton,
)
from fp4pass.kernels.reduce.naive import LARGEST
from fp4pass.kernels.reduce.triton import WORDS, Memory, count_of_words
from fp4pass.kernels.reduce.triton import reduce as reduce_triton
from fp4pass.kernels.rotate.triton import rotate_quantize_triton, rotate_triton
from fp4pass.kernels.search.joint_reference import Metric, Solution
from fp4pass.kernels.search.joint_triton import choose_blocks_triton, settle_triton
from fp4pass.kernels.search.reference import OBJECTIVES
from fp4pass.kernels.search.triton import search_triton
from fp4pass.kernels.statistics.triton import observe_triton
from fp4pass.parity.codebook_triton import dequantize_codebook_triton, quantize_codebook_triton
from fp4pass.parity.codebooks import CODEBOOKS, Codebook

linear_triton, linear_quantized_triton = flat("linear"), flat("linear_quantized")
linear_group_triton, experts_linear_triton = flat("linear_group"), flat("experts_linear")
experts_linear_quantized_triton = flat("experts_linear_quantized")
experts_mixture_triton = flat("experts_mixture")
attention_triton, rotary_attention_triton = flat("attention"), flat("rotary_attention")

ROOT = Path(__file__).parents[2]

# Of a target: the bytes of shared memory that a program may have. From 100 on they are those of
# B200, B300, Jetson Thor, RTX 50 and DGX Spark.
TARGETS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
TARGETS |= {100: 227 * 1024, 103: 227 * 1024, 110: 227 * 1024, 120: 99 * 1024, 121: 99 * 1024}


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_compile_for(arch: int, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache.mkdir("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "lib"), str(ROOT / "tests")))
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, __file__, str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout.splitlines()[-1])
    assert [v for v in variants if v["error"]] == []
    # sm_80 has no float8. From sm_89 on some products take it, and the scales of one row.
    float8 = {v["kernel"] for v in variants if v["float8"]}
    of_fp8 = {
        "_operands",
        "_round_rows_kernel",
        "_norm_round_kernel",
        "_expand_rows_kernel",
        "fp8_rows_kernel",
    }
    asking = (
        of_fp8
        | {"_e4m3_kernel", "one_row_kernel", "e4m3_tiles_kernel"}
        | ({"wide_kernel"} if arch in range(90, 100) else set())
    )
    assert float8 == (asking if arch >= 89 else set())


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


# What Triton would compile, by its cache key.
_RECORDED: dict[str, tuple[Any, ...]] = {}


def _record(
    function: Any,
    key: Any,
    signature: Any,
    device: int,
    constexprs: Any,
    options: Any,
    attrs: Any,
    warmup: bool,
) -> None:
    """Stand in for JITFunction._do_compile; without what it returns, nothing is launched."""
    # Functions in Gluon have sources of their own.
    source = function.ASTSource(function, signature, constexprs, attrs)
    _RECORDED[f"{function.__name__} {key}"] = (function, source, options)


def _launch_all(every: bool) -> None:
    """Call every wrapper, in nvfp4 and bf16, or also in each other format and dtype."""
    fmt, dtype = NVFP4, torch.bfloat16
    others = [*((get_format(key), dtype) for key in ("mxfp4", "nvfp4:32", "mxfp4:16"))]
    others += [(fmt, torch.float16), (fmt, torch.float32)]
    for case in ((fmt, dtype), *(others if every else ())):
        _launch_searches(*case)
        _launch_activations(*case, 8192, 4096)
        _launch_linears(*case, 4096, 4096, (1, 2, 64) if case == (fmt, dtype) else (1, 64))
    # One row for each expert, few and more.
    for tokens in (1, 16, 64, 256):
        _launch_experts(fmt, dtype, tokens)
    _launch_experts(MXFP4, dtype, 64)
    _launch_experts(fmt, torch.float32, 64)
    _launch_reductions((dtype,))
    _launch_choices(fmt)
    _launch_rotations(fmt, dtype, (32, 64))
    _launch_codebook(CODEBOOKS["nf4"], dtype, 4096, 11008)
    _launch_attention(dtype, 1, 128, 1024)
    _launch_attention(torch.float32, 16, 80, 300)


def _launch_searches(fmt: Format, dtype: torch.dtype) -> None:
    weight = _empty(96, 256, dtype=dtype)
    for objective in OBJECTIVES:
        hessian = _empty(8, 32, 32) if objective == "hessian" else None
        # Quotients by a scale that is no power of two are divided.
        for global_scale in (1.0, 0.75) if fmt == NVFP4 else (1.0,):
            search_triton(weight, hessian, global_scale, fmt, objective)


def _launch_choices(fmt: Format) -> None:
    """As gptq does, scales of all block columns and then column by column, and as joint_ref."""
    n, rows = fmt.block, 96
    metric, unit = Metric(*(_empty(6, n, n) for _ in range(3)), _empty(6, n)), _empty(1, rows)
    for joint in (False, True):
        choose_blocks_triton(_empty(6, n, rows), metric, unit, fmt, joint)
    flat, byte = (_empty(6 * n * rows) for _ in range(3)), _empty(6 * rows, dtype=torch.int64)
    solution = Solution(64, unit[0], *flat, byte)
    settle_triton(_empty(n * rows), solution, 1, metric, fmt, False)


def _launch_activations(fmt: Format, dtype: torch.dtype, rows: int, columns: int) -> None:
    divisor = _empty(1) if fmt.has_global_scale else None
    x = _empty(rows, columns, dtype=dtype)
    for scales in ("naive", "sse"):
        quantize_triton(x, divisor, fmt, scales)
    weight = _empty(columns, dtype=dtype)
    norm_quantize_triton(x, None, weight, None, "rms", 1e-6, divisor, fmt)
    norm_quantize_triton(x, x, weight, None, "rms", 1e-6, divisor, fmt)
    norm_quantize_triton(x, None, None, None, "layer", 1e-6, divisor, fmt)
    norm_quantize_triton(x, x, weight, weight, "layer", 1e-6, divisor, fmt)
    for activation in ACTIVATIONS if fmt == NVFP4 else ("silu",):
        activate_quantize_triton(x, None, activation, divisor, fmt)
    # Two halves of one tensor, which have gaps between their rows.
    both = _empty(rows, 2 * columns, dtype=dtype)
    activate_quantize_triton(*both.chunk(2, -1), "silu", divisor, fmt)
    dynamic_global_scale_triton(x, fmt)
    hessian = _empty(-(-columns // 32), 32, 32)
    observe_triton(x, hessian, _empty(1, dtype=torch.int64), _empty(1))


def _launch_rotations(fmt: Format, dtype: torch.dtype, rotations: Sequence[int]) -> None:
    divisor = _empty(1) if fmt.has_global_scale else None
    x = _empty(8192, 4096, dtype=dtype)
    for rotation in rotations:
        rotate_triton(x, rotation)
        rotate_quantize_triton(x, rotation, divisor, fmt, "sse" if rotation == 64 else "naive")


def _launch_linears(
    fmt: Format, dtype: torch.dtype, n: int, k: int, row_counts: Sequence[int]
) -> None:
    weight = _quantized(n, k, fmt)
    dequantize_triton(*weight, fmt, dtype)
    for m in row_counts:
        x = _empty(m, k, dtype=dtype)
        linear_triton(x, *weight, _empty(n, dtype=dtype), fmt)
        linear_quantized_triton(x, *_quantized(m, k, fmt), *weight, None, fmt)
    _launch_around(fmt, dtype, n, k, row_counts)
    group = [[each] * 3 for each in weight]
    for m in row_counts[:1]:
        linear_group_triton(_empty(m, k, dtype=dtype), *group, [None] * 3, fmt)


def _launch_around(
    fmt: Format, dtype: torch.dtype, n: int, k: int, row_counts: Sequence[int]
) -> None:
    """Launch what is around products: gates, residual sums and norms."""
    weight = _quantized(n, k, fmt)
    pair = ([each] * 2 for each in (*weight, None))
    gate, gain = tuple(pair), _empty(k, dtype=dtype)
    for m in row_counts:
        x, total = _empty(m, k, dtype=dtype), _empty(m, n, dtype=dtype)
        add_rms_norm_triton(x, x, gain, 1e-6)
        for activation in ACTIVATIONS if (fmt, n, k) == (NVFP4, 4096, 4096) else ("silu",):
            linear_group_triton(x, *gate, fmt, "input", activation)
        if m == 1 and k % SQUARES == 0:
            alone = [[each] for each in (*weight, None)]
            linear_group_triton(x, *alone, fmt, "input", None, total)
            norm = (_empty(m, k // SQUARES), gain, 1e-6)
            for activation in (None, "silu"):
                linear_group_triton(x, *gate, fmt, "input", activation, None, *norm)


def _launch_attention(dtype: torch.dtype, queries: int, width: int, size: int) -> None:
    q, k = _empty(1, 32, queries, width, dtype=dtype), _empty(1, 8, size, width, dtype=dtype)
    for mask in (_empty(1, 1, queries, size), _empty(1, 1, queries, size, dtype=torch.bool)):
        read = (mask, *attention_span_triton(mask), 0.1)
        attention_triton(q, k, k, *read)
    heads, new = (each.transpose(1, 2) for each in (q, k[:, :, :queries]))
    table, places = _empty(1, queries, width, dtype=dtype), _empty(queries, dtype=torch.int64)
    for weight in (None, _empty(width, dtype=dtype)):
        given = (weight, weight, 1e-6, table, table, places, k, k, *read)
        rotary_attention_triton(heads, new, new, *given)


def _launch_fp8() -> None:
    """Every tile, of numbers and of codes, and a weight that is expanded."""
    for fmt in (NVFP4, MXFP4):
        # Of 96 columns also on Hopper in Triton.
        for n, k in ((14336, 4096), (96, 96)):
            weight = _quantized(n, k, fmt)
            for m in (64, 128, 256, 512):
                x = _empty(m, k, dtype=torch.bfloat16)
                linear_triton(x, *weight, _empty(n, dtype=x.dtype), fmt, "fp8")
                codes = _quantized(m, k, fmt)
                linear_quantized_triton(x, *codes, *weight, None, fmt, compute="fp8")
            for inputs in ("fp8", "fp8_block") if fmt == MXFP4 else ():
                for m in (1, 24, 64):
                    x = _empty(m, k, dtype=torch.bfloat16)
                    rows = quantize_triton(x, None, get_format(inputs))
                    linear_quantized_triton(x, *rows, None, *weight, None, fmt, 0, "input", inputs)
            expanded(x, PackedWeight(*weight), fmt)
            expanded(PackedInput(*codes), PackedWeight(*weight), fmt)
    for k in (2560, WIDEST):
        x, row = _empty(64, k, dtype=torch.bfloat16), _empty(k, dtype=torch.bfloat16)
        norm_round_triton(x, x, row, 1e-6)
        norm_round_triton(x, None, row, 1e-6)
    x = _empty(64, 4096, dtype=torch.bfloat16)
    for activation in ACTIVATIONS:
        activate_round_triton(x, x, activation)


def _launch_e4m3() -> None:
    """Inputs alone and after what computes them; products of one row, of few and of many."""
    names = ("fp8", "fp8_block", "fp8_tensor", "mxfp8")
    for fmt in map(get_format, names):
        n, k, dtype = 4096, 14336, torch.bfloat16
        packed = _empty(n, k, dtype=torch.uint8)
        weight = PackedWeight(packed, _empty(*fmt.scale_shape(n, k), dtype=fmt.scale.dtype), None)
        static = _empty(1) if fmt.has_float_scale else None
        for m in (1, 8, 64, 2048):
            x, row = _empty(m, k, dtype=dtype), _empty(k, dtype=dtype)
            linear_fp8_weights(x, None, weight._replace(bias=_empty(n, dtype=dtype)), fmt)
            codes = PackedInput(*quantize_triton(x, static, fmt), None)
            linear_fp8_weights(x, codes, weight, fmt)
        norm_quantize_triton(x, x, row, None, "rms", 1e-6, None, fmt)
        norm_quantize_triton(x, None, row, row, "layer", 1e-6, None, fmt)
        activate_quantize_triton(x, x, "silu", None, fmt)
        # Columns that fill no tile.
        packed = _empty(96, 160, dtype=torch.uint8)
        scale = _empty(*fmt.scale_shape(96, 160), dtype=fmt.scale.dtype)
        x = _empty(64, 160, dtype=dtype)
        codes = PackedInput(*quantize_triton(x, static, fmt), None)
        linear_fp8_weights(x, codes, PackedWeight(packed, scale, None), fmt)


def _launch_reductions(dtypes: Sequence[torch.dtype]) -> None:
    for size in (2, 8):
        words = _empty(count_of_words(size), dtype=torch.int64)
        calls = _empty(LARGEST // 4 // WORDS, dtype=torch.int32)
        memory = Memory(words, _empty(size, dtype=torch.int64), calls, 1, None)
        for dtype in dtypes:
            for maximum in (False, True):
                reduce_triton(_empty(4, 4096, dtype=dtype), memory, maximum)
            x = _empty(1, 4096, dtype=dtype)
            reduce_triton(x, memory, False, x)


def _launch_experts(fmt: Format, dtype: torch.dtype, tokens: int) -> None:
    """Both products of a layer, of numbers and of codes; of the second no step divides K."""
    experts, k, hidden, inner = 128, 8, 2048, 736
    ids = _empty(tokens, k, dtype=torch.int64)
    stacks: list[Tensor | None] = []
    for shape, n in (((tokens, hidden), 2 * inner), ((tokens, k, inner), hidden)):
        x, columns = _empty(*shape, dtype=dtype), shape[-1]
        each = _quantized(experts * n, columns, fmt)[:2]
        stack = [part.view(experts, n, -1) for part in each]
        stored = _empty(experts) if fmt.has_global_scale else None
        experts_linear_triton(x, ids, *stack, stored, _empty(experts, n, dtype=dtype), fmt)
        codes, scale, x_stored = _quantized(x[..., 0].numel(), columns, fmt)
        rows = (codes.view(*shape[:-1], -1), scale.view(*shape[:-1], -1), x_stored)
        experts_linear_quantized_triton(x, *rows, ids, *stack, stored, None, fmt)
        if fmt.has_global_scale:
            experts_quantize_triton(x, ids, _empty(experts), fmt)
        stacks += [*stack, stored, None]
    x, weights = _empty(tokens, hidden, dtype=dtype), _empty(tokens, k, dtype=dtype)
    experts_mixture_triton(x, ids, weights, *stacks, "silu", False, 1.0, 0.0, None, fmt)
    experts_mixture_triton(x, ids, weights, *stacks, "silu", True, 1.702, 1.0, 7.0, fmt)


def _launch_codebook(codebook: Codebook, dtype: torch.dtype, rows: int, columns: int) -> None:
    quantized = quantize_codebook_triton(_empty(rows, columns, dtype=dtype), codebook)
    dequantize_codebook_triton(*quantized, codebook, (rows, columns), dtype)


def _quantized(rows: int, columns: int, fmt: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    packed = _empty(rows, columns // 2, dtype=torch.uint8)
    scale = _empty(rows, columns // fmt.block, dtype=torch.uint8)
    return packed, scale, _empty(1) if fmt.has_global_scale else None


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _defined() -> dict[str, Any]:
    """Every kernel of fp4pass/kernels/*_triton.py: the jit functions that no other one calls."""
    functions: dict[str, Any] = {}
    for module in pkgutil.walk_packages(fp4pass.kernels.__path__, "fp4pass.kernels."):
        if module.name.endswith("triton"):
            loaded = importlib.import_module(module.name)
            functions |= {
                f"{module.name}.{name}": value
                for name, value in vars(loaded).items()
                if isinstance(value, JITFunction) and value.fn.__module__ == loaded.__name__
            }
    bodies = [function.src.partition("):")[2] for function in functions.values()]
    return {
        name: function
        for name, function in functions.items()
        if not any(f"{function.__name__}(" in body for body in bodies)
    }


def _compile(key: str) -> dict[str, Any]:
    """Compile one recorded variant to machine code: what is wrong with it."""
    function, source, options = _RECORDED[key]
    found = {"kernel": function.__name__, "error": None, "float8": False}
    target = triton.runtime.driver.active.get_current_target()
    # An error of any compiler stage is the finding.
    try:
        compiled = triton.compile(source, target=target, options=options.__dict__)
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:2000]}
    assert compiled.asm["cubin"]
    if compiled.metadata.shared > TARGETS[target.arch]:
        return found | {"error": f"{compiled.metadata.shared} bytes of shared memory"}
    return found | {"float8": any(word in compiled.asm["ptx"] for word in (".e4m3", ".e5m2"))}


def _main(arch: int) -> None:
    JITFunction._do_compile = _record
    triton.runtime.driver.set_active(_Driver(arch))
    # What wrappers ask about the GPU they launch on.
    properties = SimpleNamespace(
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=132,
        shared_memory_per_block_optin=TARGETS[arch],
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    _launch_all(arch == 90)
    if arch >= 89:
        _launch_fp8()
    _launch_e4m3()
    launched = {function for function, *_ in _RECORDED.values()}
    # wide_kernel is of Hopper's own instructions.
    known = {"_fp8.": range(89, 1000), "one_row": range(89, 1000), "linear.wide": range(90, 100)}
    missed = [
        name
        for name, kernel in _defined().items()
        if kernel not in launched
        and not any(arch not in archs and part in name for part, archs in known.items())
    ]
    assert launched and not missed, f"never launched: {missed}"
    # Forked, because jit functions cannot be pickled.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        print(json.dumps(pool.map(_compile, list(_RECORDED), chunksize=1)))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
