"""Every kernel compiles for sm_80, 89 and 90, without a GPU, and without float8 conversions.

A process of its own launches the kernels as the library does, on tensors without storage and under
a driver that claims to be the target. It records what Triton would compile, and compiles that down
to machine code.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
TARGETS = (80, 89, 90)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_kernels_compile_for_every_target(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"], "no kernel was recorded"
    assert found["never_launched"] == []
    assert found["failed"] == []
    assert found["float8"] == []
    for arch in TARGETS:
        assert sorted(found["compiled"][str(arch)]) == sorted(found["kernels"])


class _Driver:
    """What Triton asks of a driver before it compiles; the device's number is its target's."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def _record(arch: int) -> dict[str, tuple[Any, ...]]:
    """What Triton would compile for the launches of `_launch_all`, by its cache key."""
    import triton
    from triton.runtime.jit import JITFunction

    recorded: dict[str, tuple[Any, ...]] = {}

    def record(
        self: Any,
        key: Any,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> None:
        recorded[f"{arch} {self.__name__} {key}"] = (self, signature, constexprs, attrs, options)

    JITFunction._do_compile = record
    triton.runtime.driver.set_active(_Driver(arch))
    _launch_all(arch)
    return recorded


def _launch_all(arch: int) -> None:
    """Call every wrapper over formats, blocks and dtypes, with shapes that choose all variants.

    On the last target all of them, on the others those that a model in bf16 uses.
    """
    both = [get_format(f.name, block) for f in FORMATS.values() for block in f.blocks]
    cases = [(fmt, torch.bfloat16) for fmt in (both if arch == TARGETS[-1] else FORMATS.values())]
    if arch == TARGETS[-1]:
        cases += [(NVFP4, torch.float16), (NVFP4, torch.float32)]
    for fmt, dtype in cases:
        _launch_searches(fmt, dtype)
        _launch_activations(fmt, dtype)
        _launch_linears(fmt, dtype)


def _launch_searches(fmt: Format, dtype: torch.dtype) -> None:
    weight = _empty(96, 256, dtype=dtype)
    for objective in OBJECTIVES:
        hessian = _empty(8, 32, 32) if objective == "hessian" else None
        search_triton(weight, hessian, 1.0, fmt, objective)


def _launch_activations(fmt: Format, dtype: torch.dtype) -> None:
    divisor = _empty(1) if fmt.has_global_scale else None
    for rows, columns in ((64, 256), (8192, 4096), (7, 48 * fmt.block)):
        x = _empty(rows, columns, dtype=dtype)
        quantize_triton(x, divisor, fmt)
        rms_norm_quantize_triton(x, _empty(columns, dtype=dtype), 1e-6, divisor, fmt)
        global_divisor_triton(x, fmt)
        hessian = _empty(-(-columns // 32), 32, 32)
        observe_triton(x, hessian, _empty(1, dtype=torch.int64), _empty(1))


def _launch_linears(fmt: Format, dtype: torch.dtype) -> None:
    for n, k in ((4096, 4096), (14336, 4096), (96, 48 * fmt.block)):
        weight = _quantized(n, k, fmt)
        dequantize_triton(*weight, fmt, dtype)
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048):
            x = _empty(m, k, dtype=dtype)
            linear_triton(x, *weight, _empty(n, dtype=dtype), fmt)
            linear_quantized_triton(*_quantized(m, k, fmt), *weight, None, fmt, dtype)


def _quantized(rows: int, columns: int, fmt: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    packed = _empty(rows, columns // 2, dtype=torch.uint8)
    scale = _empty(rows, columns // fmt.block, dtype=torch.uint8)
    return packed, scale, _empty(1) if fmt.has_global_scale else None


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _defined() -> dict[str, Any]:
    """Every kernel of fp4pass/kernels/*_triton.py: the jit functions that no other one calls."""
    from triton.runtime.jit import JITFunction

    import fp4pass.kernels

    functions: dict[str, Any] = {}
    for module in pkgutil.iter_modules(fp4pass.kernels.__path__):
        if module.name.endswith("_triton"):
            loaded = importlib.import_module(f"fp4pass.kernels.{module.name}")
            functions |= {
                f"{module.name}.{name}": value
                for name, value in vars(loaded).items()
                if isinstance(value, JITFunction) and value.fn.__module__ == loaded.__name__
            }
    sources = {name: function.src.partition("):")[2] for name, function in functions.items()}
    return {
        name: function
        for name, function in functions.items()
        if not any(f"{function.__name__}(" in source for source in sources.values())
    }


_RECORDED: dict[str, tuple[Any, ...]] = {}


def _compile(key: str) -> dict[str, Any]:
    """Compile one recorded variant to machine code; its name, and what is wrong with it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, signature, constexprs, attrs, options = _RECORDED[key]
    arch = int(key.split()[0])
    result = {"arch": arch, "kernel": function.__name__, "error": None, "float8": False}
    try:
        compiled = triton.compile(
            ASTSource(function, signature, constexprs, attrs),
            target=GPUTarget("cuda", arch, 32),
            options=options.__dict__,
        )
    # Any error of any compiler stage is the finding.
    except Exception as error:
        result["error"] = f"sm_{arch} {function.__name__}: {type(error).__name__}: {error}"[:2000]
        return result
    assert compiled.asm["cubin"]
    result["float8"] = any(word in compiled.asm["ptx"] for word in ("e4m3", "e5m2"))
    return result


def _main() -> None:
    for arch in TARGETS:
        _RECORDED.update(_record(arch))
    # Forked, because jit functions cannot be pickled.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        results = pool.map(_compile, list(_RECORDED), chunksize=1)
    launched = {function for function, *_ in _RECORDED.values()}
    found = {
        "kernels": sorted({function.__name__ for function in launched}),
        "never_launched": [name for name, kernel in _defined().items() if kernel not in launched],
        "compiled": {
            arch: sorted({r["kernel"] for r in results if r["arch"] == arch and not r["error"]})
            for arch in TARGETS
        },
        "failed": [r["error"] for r in results if r["error"]],
        "float8": [f"sm_{r['arch']} {r['kernel']}" for r in results if r["float8"]],
        "variants": len(results),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
