"""What is around the searches of fp4pass.functional: signatures, errors, metrics and tables."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from every_format import TABLES
from torch import Tensor

from fp4pass import functional as F
from fp4pass.core.formats import FORMATS
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError


@pytest.mark.parametrize("name", F.__all__)
def test_every_function_says_what_it_is(name: str) -> None:
    found = getattr(F, name)
    assert found.__name__ == found.__qualname__ == name
    assert found.__module__ == "fp4pass.functional"
    assert pickle.loads(pickle.dumps(found)) is found
    doc = inspect.getdoc(found)
    assert doc and "{" not in doc
    lines = doc.splitlines()
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)


def test_signatures_are_those_of_qwantize() -> None:
    for name in FORMATS:
        for triton in ("", "_triton"):
            for ending in ("naive", "optimal", "optimal_hessian"):
                names = ["W", "dim", "return_dequant"]
                names += ["X", "H_blocks"] if ending == "optimal_hessian" else []
                parameters = inspect.signature(vars(F)[f"{name}_{ending}{triton}"]).parameters
                assert list(parameters) == [*names, "global_scale", "packed"]
                assert parameters["dim"].default == -1
                by_keyword = [p.name for p in parameters.values() if p.kind == p.KEYWORD_ONLY]
                assert by_keyword == ["global_scale", "packed"]
        dequantize = inspect.signature(vars(F)[f"{name}_dequantize"])
        assert list(dequantize.parameters) == ["scales", "quants", "dim"]
    assert len(F.__all__) == len(set(F.__all__)) == 10 + 7 * len(FORMATS)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ShapeError, r"is the block; \(16, 32\)", lambda: F.nvfp4_naive(torch.ones(4, 17))),
        (ShapeError, "not a dimension of W", lambda: F.nvfp4_naive(torch.ones(4, 16), 2)),
        (ShapeError, "not a dimension of W", lambda: F.nvfp4_naive(torch.ones(()))),
        (ShapeError, "empty", lambda: F.nvfp4_naive(torch.ones(0, 16))),
        (DtypeError, "torch.int64", lambda: F.nvfp4_naive(torch.ones(4, 16).long())),
        (NonFiniteError, "NaN", lambda: F.nvfp4_naive(torch.full((4, 16), math.nan))),
        (NonFiniteError, "beyond", lambda: F.nvfp4_naive(torch.ones(4, 16).double() * 1e200)),
        (OptionError, "both are None", lambda: F.nvfp4_optimal_hessian(torch.ones(4, 16))),
        (ShapeError, r"\[J, 16, 16\]", lambda: with_hessian(torch.ones(1, 32, 32))),
        (ShapeError, r"\[N, 3\] is wanted", lambda: with_hessian(torch.ones(3, 16, 16))),
        (DtypeError, "H_blocks is", lambda: with_hessian(torch.ones(1, 16, 16).int())),
        (NonFiniteError, "H_blocks", lambda: with_hessian(torch.full((1, 16, 16), math.inf))),
        (ShapeError, "X has shape", lambda: with_inputs(torch.ones(5, 24))),
        (ShapeError, "at least one token", lambda: with_inputs(torch.ones(0, 16))),
        (DtypeError, "X is", lambda: with_inputs(torch.ones(5, 16).int())),
        (NonFiniteError, "X or", lambda: with_inputs(torch.full((5, 16), math.nan))),
        (ShapeError, "the same", lambda: F.nvfp4_dequantize(torch.ones(3), torch.ones(4, 16))),
        (ShapeError, "dim=2", lambda: F.nvfp4_dequantize(torch.ones(4), torch.ones(4, 16), 2)),
        (OptionError, "is no scale", lambda: F.scale_bytes(torch.tensor([1.03]))),
        (OptionError, "is no scale", lambda: F.scale_bytes(torch.tensor([math.nan]))),
        (OptionError, "no E8M0", lambda: F.scales_to_ue8m0_exponent(torch.tensor([3.0]))),
        (OptionError, "no E8M0", lambda: F.scales_to_ue8m0_exponent(torch.tensor([0.0]))),
        (OptionError, "no E8M0", lambda: F.scales_to_ue8m0_exponent(torch.tensor([math.inf]))),
        (OptionError, "must ascend", lambda: F.snap_to_table(torch.ones(1), torch.ones(2))),
        (ShapeError, "table", lambda: F.snap_to_table(torch.ones(1), torch.ones(2, 2))),
        (DtypeError, "int64", lambda: F.snap_to_table(torch.ones(1).long(), torch.ones(1))),
        (ShapeError, "W_dq", lambda: F.compute_metrics(torch.ones(2, 3), torch.ones(3, 2))),
        (ShapeError, "X has", lambda: F.compute_metrics(*[torch.ones(2, 3)] * 2, torch.ones(4, 2))),
        (DtypeError, "fp4_unpack|uint8", lambda: F.fp4_unpack(torch.ones(3))),
    ],
)
def test_errors_say_what_is_wanted(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


def with_hessian(hessian: Tensor) -> Any:
    return F.nvfp4_optimal_hessian(torch.ones(4, 1, 16), H_blocks=hessian)


def with_inputs(X: Tensor) -> Any:
    return F.nvfp4_optimal_hessian(torch.ones(4, 1, 16), X=X)


@pytest.mark.parametrize("shape", [(6, 48), (6, 3, 16)])
def test_metrics_are_the_norms(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(shape, generator=generator)
    W_dq = W + torch.randn(shape, generator=generator) * 1e-3
    X = torch.randn(5, 20, 48, generator=generator)
    off, dense = (t.double().flatten(1) for t in (W_dq - W, W))
    tokens = X.double().flatten(0, 1)
    wanted = {
        "weight_error": off.norm(),
        "weight_error_pct": 100 * off.norm() / dense.norm(),
        "output_error": (tokens @ off.T).norm(),
        "output_error_pct": 100 * (tokens @ off.T).norm() / (tokens @ dense.T).norm(),
    }
    found = F.compute_metrics(W, W_dq, X)
    assert list(found) == list(wanted)
    assert list(F.compute_metrics(W, W_dq)) == list(wanted)[:2]
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-6)
    monkeypatch.setattr(F, "_TILE", 48 * 7)
    assert F.compute_metrics(W, W_dq, X) == pytest.approx(found, rel=1e-6)
    rounded_inputs = F.compute_metrics(W, W_dq, X.bfloat16())
    assert rounded_inputs == F.compute_metrics(W, W_dq, X.bfloat16().float())
    assert F.compute_metrics(W, W, X) == dict.fromkeys(wanted, 0.0)
    zero = F.compute_metrics(torch.zeros(shape), W, X)
    assert zero["weight_error_pct"] == zero["output_error_pct"] == math.inf
    assert F.compute_metrics(torch.zeros(2, 3), torch.zeros(2, 3))["weight_error_pct"] == 0.0


def test_metrics_of_float64_are_in_float64() -> None:
    W = torch.ones(3, 4, dtype=torch.float64)
    assert F.compute_metrics(W, W + 1e-12)["weight_error"] == pytest.approx(
        12**0.5 * 1e-12, rel=1e-3
    )


def test_fp4_unpack_doubles_the_values() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    found = F.fp4_unpack(packed)
    values = [0, 1, 2, 3, 4, 6, 8, 12]
    values += [-v for v in values]
    wanted = [values[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert found.dtype == torch.int8 and found.shape == (2, 256)
    assert found.flatten().tolist() == wanted


def test_tables_are_all_scales() -> None:
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
        fmt = FORMATS[name].name
        assert F.scale_bytes(table, fmt).tolist() == list(range(1, len(table) + 1))
    exponents = F.scales_to_ue8m0_exponent(tables["mxfp4"])
    assert exponents.dtype == torch.int32 and exponents.tolist() == list(range(1, 255))
    half = F.scales_to_ue8m0_exponent(torch.tensor([0.5, 4.0]).bfloat16())
    assert half.tolist() == [126, 129]


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
