"""The C++ of CPUs: products within float32 sums, conversions with the bits of the references."""

from __future__ import annotations

import itertools
import logging
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ALL
from exact_products import assert_product
from kernel_cases import flat
from torch import Tensor

from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.kernels.cpu import operators as cpu
from fp4pass.kernels.cpu.operators import FEW_ROWS, dequantize_cpu, function, quantize_cpu
from fp4pass.kernels.dequantize.naive import dequantize_ref
from fp4pass.kernels.quantize.naive import quantize_ref

# In CI there is one, or these fail.
pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and not any(map(shutil.which, ("g++", "clang++"))),
    reason="there is no compiler: apt-get install g++",
)

linear_cpu, linear_ref = flat("linear", "cpu"), flat("linear", "reference")

DTYPES = (torch.float32, torch.bfloat16)
FORMATS = [fmt for fmt in ALL if cpu.serves(torch.float32, fmt)]
FORMATS.append(get_format("nvfp4").with_multiplier())


def stored(fmt: Format, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes and scales, all finite."""
    generator = torch.Generator().manual_seed(n * k)
    packed = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    middle = fmt.scale.bias << fmt.scale.mantissa_bits
    scale = torch.randint(middle - 8, middle + 8, (n, k // fmt.block), generator=generator)
    number = torch.tensor([0.375]) if fmt.has_global_scale else None
    return packed, scale.to(torch.uint8), number


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors are NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Words that fill no vector, one vector and more; threads.
SHAPES = [(1, 5, 32), (2, 7, 96), (3, 33, 512), (4, 64, 1056), (1, 17, 640), (2, 9, 64)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_multiplied(
    fmt: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "linear_ref", None)
    for m, n, k in SHAPES:
        generator = torch.Generator().manual_seed(m)
        weight = stored(fmt, n, k)
        dense = dequantize_ref(*weight, fmt, torch.float64)
        x = torch.randn(m, k, generator=generator).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype)
        assert_product(linear_cpu(x, *weight, None, fmt), x, dense)
        assert_product(linear_cpu(x, *weight, bias, fmt), x, dense, bias)
        # A view, a leading dimension more, a bias of another dtype.
        wide = torch.stack((x, x), -1)[..., 0].unsqueeze(0)
        assert not wide.is_contiguous() or m == k == 1
        y = linear_cpu(wide, *weight, bias.double(), fmt)
        assert torch.equal(y[0], linear_cpu(x, *weight, bias, fmt)) and y.shape == (1, m, n)


@pytest.mark.parametrize("key", ["nvfp4", "mxfp4"])
def test_a_row_has_its_bits_in_any_company_and_with_any_threads(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = get_format(key)
    weight, x = stored(fmt, 37, 320), torch.randn(FEW_ROWS, 320)
    together = linear_cpu(x, *weight, None, fmt)
    for threads in (2, 3, 64):
        monkeypatch.setattr(cpu, "threads_for", lambda numbers, threads=threads: threads)
        for row, y in zip(x, together, strict=True):
            assert torch.equal(linear_cpu(row, *weight, None, fmt), y)


def test_what_is_not_compiled_runs_the_reference() -> None:
    for key, dtype in (("mxfp6_e2m3", torch.float32), ("nvfp4", torch.float64)):
        fmt = get_format(key)
        x = torch.randn(3, 64, dtype=dtype)
        weight = ops.search(torch.randn(5, 64), None, 1.0, key, "naive")
        number = torch.ones(1) if fmt.has_global_scale else None
        y = linear_cpu(x, *weight, number, None, fmt)
        assert torch.equal(y, linear_ref(x, *weight, number, None, fmt))
    fmt = get_format("nvfp4")
    weight = stored(fmt, 5, 64)
    assert linear_cpu(torch.randn(0, 64), *weight, None, fmt).shape == (0, 5)
    assert linear_cpu(torch.randn(2, 0, 64), *weight, None, fmt).shape == (2, 0, 5)


@pytest.mark.parametrize("rows", [3, 2 * FEW_ROWS])
def test_only_what_is_in_memory_as_it_is_read_goes_to_compiled_code(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = get_format("nvfp4")
    packed, scale, number = stored(fmt, 5, 64)
    x, bias = torch.randn(rows, 64), torch.randn(5)
    monkeypatch.setattr(cpu, "function", lambda *_: lambda *_: pytest.fail("it was read"))
    for other in (number.double(), number[0]):
        expected = linear_ref(x, packed, scale, other, bias, fmt)
        assert torch.equal(linear_cpu(x, packed, scale, other, bias, fmt), expected)
    tensors = (packed, scale, number, bias)
    # torch looks codes up that are elsewhere, and refuses the rest.
    linear_cpu(x, packed.to("meta"), *tensors[1:], fmt)
    for i in range(1, 4):
        elsewhere = [each.to("meta") if j == i else each for j, each in enumerate(tensors)]
        with pytest.raises(RuntimeError, match="device"):
            linear_cpu(x, *elsewhere, fmt)
    dequantize_cpu(packed.to("meta"), scale, number, fmt, torch.float32)
    with pytest.raises(RuntimeError, match="device"):
        dequantize_cpu(packed, scale.to("meta"), number, fmt, torch.float32)
    monkeypatch.undo()
    # A sum of nothing.
    none = torch.empty(5, 0, dtype=torch.uint8)
    y = ops.linear(torch.randn(rows, 0), none, none, number, bias, "nvfp4")
    assert torch.equal(y, bias.expand(rows, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_have_the_bits_of_dense_products(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    for m, n, k in ((FEW_ROWS + 1, 37, 320), (17, 4096, 1024)):
        weight, x, bias = stored(fmt, n, k), torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        for each in (None, bias):
            expected = linear_ref(x, *weight, each, fmt)
            assert torch.equal(linear_cpu(x, *weight, each, fmt), expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_many_rows_a_tile_of_the_weight_is_dense(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: list[tuple[int, int]] = []

    def noting(name: str, *args: Any) -> Any:
        found = function(name, *args)

        def call(weight: Any, first: int, last: int, *rest: Any) -> None:
            tiles.append((first, last))
            found(weight, first, last, *rest)

        return call if name == "dequantize" else found

    fmt = get_format("nvfp4")
    packed, scale, _ = stored(fmt, 37, 64)
    # With this the weight is exact in bfloat16.
    weight = packed, scale, torch.tensor([4.0])
    x = torch.randn(2, FEW_ROWS, 64).to(dtype)
    bias = torch.randn(37)
    monkeypatch.setattr(cpu, "function", noting)
    monkeypatch.setattr(cpu, "TILE", 16 * 64)
    dense = dequantize_ref(*weight, fmt, torch.float64)
    assert_product(linear_cpu(x, *weight, None, fmt), x, dense)
    assert_product(linear_cpu(x, *weight, bias, fmt), x, dense, bias.to(dtype))
    assert tiles == [(0, 16), (16, 32), (32, 37)] * 2


def activations() -> list[Tensor]:
    """Numbers of all sizes; ties, zeros of both signs, NaN and infinity; any bits."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(9, 320, generator=generator)
    edges = torch.randn(12, 320, generator=generator)
    edges[0], edges[1] = 0.0, -0.0
    edges[2, 3], edges[3, 5], edges[4, 7] = math.nan, math.inf, -math.inf
    ties = [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, -0.25, -0.75, -5.0, -0.1, -0.0, 6]
    edges[5] = torch.tensor(ties).repeat(20)
    edges[6], edges[7], edges[8] = edges[5] * 448, edges[5] / 512, -edges[5]
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 320), generator=generator, dtype=torch.int32)
    edges[9:] = bits.view(torch.float32)
    return [edges, *(normal * size for size in (1.0, 1e-3, 1e20, 1e38, 1e-38, 1e-42))]


def divisors(fmt: Format) -> list[Tensor | None]:
    numbers = (1.0, 2.0**8, 3.7, 2.0**126, 2.0**-126, 1e-45, 3e38)
    return [None, *(torch.tensor([x]) for x in numbers if fmt.has_global_scale)]


@pytest.mark.quick(5)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_have_the_bits_of_the_references(
    fmt: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "quantize_ref", None)
    monkeypatch.setattr(cpu, "dequantize_ref", None)
    numbers = activations()
    # An odd number of blocks.
    numbers.append(numbers[0][:3, : 3 * fmt.block])
    for x, number in itertools.product(numbers, divisors(fmt)):
        packed, scale = quantize_ref(x.to(dtype), number, fmt)
        found = quantize_cpu(x.to(dtype), number, fmt)
        assert torch.equal(found[0], packed) and torch.equal(found[1], scale)
        dense = dequantize_cpu(packed, scale, number, fmt, dtype)
        expected = dequantize_ref(packed, scale, number, fmt, dtype)
        assert torch.equal(dense.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(dense.isnan(), expected.isnan())
        assert torch.equal(dense.signbit() & ~dense.isnan(), expected.signbit() & ~dense.isnan())


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    cpu.load.cache_clear()
    yield
    cpu.load.cache_clear()


@pytest.mark.usefixtures("loaded_anew")
def test_without_a_compiler_the_references_serve_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _no_compiler)
    fmt = get_format("nvfp4")
    weight, x = stored(fmt, 5, 64), torch.randn(3, 64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = linear_cpu(x, *weight, None, fmt)
            assert torch.equal(y, linear_ref(x, *weight, None, fmt))
    codes = quantize_cpu(x, weight[2], fmt)
    assert all(map(torch.equal, codes, quantize_ref(x, weight[2], fmt)))
    (record,) = caplog.records
    assert "plain PyTorch on this CPU" in record.message and "could not be" in record.message


def _no_compiler() -> str:
    from torch._inductor import exc

    raise exc.InvalidCxxCompiler()


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_anew")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags for x86")
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ()], ids=["AVX2", "SSE2"])
def test_older_instructions_give_the_same(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "older.so"
    command = ["g++", "-std=c++20", "-O3", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi", *flags]
    subprocess.run([*command, str(cpu.SOURCE), "-o", str(made)], check=True)
    monkeypatch.setattr(cpu, "_built", lambda: made)
    for fmt, dtype in itertools.product(FORMATS, DTYPES):
        with monkeypatch.context() as patch:
            test_few_rows_are_multiplied(fmt, dtype, patch)
            test_conversions_have_the_bits_of_the_references(fmt, dtype, patch)
