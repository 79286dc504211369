"""fp4pass.parity.qwantize: its names, its conventions, and its tables."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from blocks import BLOCKS
from every_format import TABLES, inputs, sample

from fp4pass.errors import DtypeError, OptionError, ShapeError
from fp4pass.parity import qwantize as F
from fp4pass.quantization.functional import quantize_blocks

OBJECTIVES = {"naive": "naive", "optimal": "sse", "optimal_hessian": "hessian"}


# The names that qwantize has for formats, where they are others.
THEIRS = {"mxfp8": "mxfp8_e4m3"}


def test_names_and_signatures_are_those_of_qwantize() -> None:
    for name in (THEIRS.get(name, name) for name in BLOCKS):
        for triton in ("", "_triton"):
            for ending in OBJECTIVES:
                function = getattr(F, f"{name}_{ending}{triton}")
                parameters = inspect.signature(function).parameters
                positional = [p.name for p in parameters.values() if p.kind != p.KEYWORD_ONLY]
                assert positional == ["W", "dim", "return_dequant", "X", "H_blocks"]
                assert list(parameters)[5:] == ["global_scale", "packed"]
        dequantize = inspect.signature(getattr(F, f"{name}_dequantize"))
        assert list(dequantize.parameters) == ["scales", "quants", "dim"]
    assert len(F.__all__) == len(set(F.__all__)) == 8 + 7 * len(BLOCKS)
    assert all(callable(getattr(F, name)) for name in F.__all__)
    found = pickle.loads(pickle.dumps(F.nvfp4_naive))
    assert torch.equal(found(torch.ones(2, 16))[0], F.nvfp4_naive(torch.ones(2, 16))[0])
    with pytest.raises(AttributeError, match="has no attribute 'nvfp4_admm'"):
        F.nvfp4_admm  # noqa: B018


@pytest.mark.parametrize("ending", OBJECTIVES)
@pytest.mark.parametrize("name", BLOCKS)
def test_results_are_those_of_quantize_blocks(name: str, ending: str) -> None:
    fmt = BLOCKS[name]
    x, X = sample(fmt), inputs(fmt)
    more = {"inputs": X} if ending == "optimal_hessian" else {}
    theirs = THEIRS.get(name, name)
    function = getattr(F, f"{theirs}_{ending}")
    default = 1 / 127 if name == "int8" else 1.0
    for given in (None, "auto"):
        g = default if given is None else given
        wanted = quantize_blocks(x, name, OBJECTIVES[ending], global_scale=g, **more)
        parts = wanted.steps(), wanted.values(), wanted.dequantize()
        found = function(x, -1, True, *more.values(), global_scale=given)
        packed = function(x, -1, True, *more.values(), global_scale=given, packed=True)
        for a, b in zip(found, parts, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(packed[1], wanted.packed) and torch.equal(packed[2], parts[2])
    two = getattr(F, f"{theirs}_{ending}_triton")(x.movedim(-1, 0), 0, False, *more.values())
    moved = function(x, -1, False, *more.values())
    assert len(two) == 2 and torch.equal(two[0], moved[0])
    assert torch.equal(two[1], moved[1].movedim(-1, 0))


@pytest.mark.core
@pytest.mark.parametrize("name", ["nvfp4", "int8", "mxfp6_e2m3"])
def test_dequantize_takes_values_and_packed_codes(name: str) -> None:
    x = sample(BLOCKS[name]).movedim(-1, 1)
    quantize, dequantize = getattr(F, f"{name}_optimal"), getattr(F, f"{name}_dequantize")
    scales, values, dequant = quantize(x, 1, True)
    _, packed = quantize(x, 1, packed=True)
    assert torch.equal(dequantize(scales, values, 1), dequant)
    assert torch.equal(dequantize(scales, packed, 1), dequant)


ones = torch.ones


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (OptionError, "got neither", lambda: F.nvfp4_optimal_hessian(ones(4, 16))),
        (ShapeError, "without dim=-1, got", lambda: F.nvfp4_dequantize(ones(3), ones(4, 16))),
        (ShapeError, "without dim=2", lambda: F.nvfp4_dequantize(ones(4), ones(4, 16), 2)),
        (OptionError, r"got 3\.0", lambda: F.scales_to_ue8m0_exponent(torch.tensor([3.0]))),
        (OptionError, "ascending", lambda: F.snap_to_table(ones(1), ones(2))),
        (OptionError, r"table \(2, 2\)", lambda: F.snap_to_table(ones(1), ones(2, 2))),
        (OptionError, "got torch.int64", lambda: F.snap_to_table(ones(1).long(), ones(1))),
        (DtypeError, "torch.uint8, got torch.float32", lambda: F.fp4_unpack(ones(3))),
    ],
)
def test_errors_say_what_was_expected(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


def test_fp4_unpack_doubles_the_values() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    found = F.fp4_unpack(packed)
    values = [0, 1, 2, 3, 4, 6, 8, 12]
    values += [-v for v in values]
    wanted = [values[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert found.dtype == torch.int8 and found.shape == (2, 256)
    assert found.flatten().tolist() == wanted


def test_tables_have_all_scales() -> None:
    tables = {
        "nvfp4": F.build_fp8_e4m3_scales(),
        "mxfp4": F.build_ue8m0_scales("cpu"),
        "nvfp4_ue4m4": F.build_ue4m4_scales(),
        "nvfp4_ue5m3": F.build_ue5m3_scales(torch.device("cpu")),
    }
    assert [len(t) for t in tables.values()] == [126, 254, 254, 254]
    for name, table in tables.items():
        assert table.dtype == torch.float32
        assert table.double().tolist() == TABLES[name][1]
    exponents = F.scales_to_ue8m0_exponent(tables["mxfp4"])
    assert exponents.dtype == torch.int32 and exponents.tolist() == list(range(1, 255))
    half = F.scales_to_ue8m0_exponent(torch.tensor([0.5, 4.0]).bfloat16())
    assert half.tolist() == [126, 129]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_snapping_to_e4m3_is_the_cast(dtype: torch.dtype) -> None:
    table = F.build_fp8_e4m3_scales()
    middle = (table[1:] + table[:-1]) / 2
    x = torch.cat(
        (table, middle, torch.rand(500, generator=torch.Generator().manual_seed(0)) * 448)
    )
    x = x.to(dtype).clamp(min=2.0**-9)
    wanted = x.float().to(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(F.snap_to_table(x, table), wanted)
    ends = F.snap_to_table(torch.tensor([0.0, 1e9, math.inf, math.nan]), table)
    assert ends[:3].tolist() == [2.0**-9, 448.0, 448.0] and ends[3].isnan()
    one = F.snap_to_table(torch.tensor([[1.0, 5.0]]), torch.tensor([3.0]))
    assert one.tolist() == [[3.0, 3.0]]
