"""Products in compiled graphs for a CPU: C++ of the graph, with the bits of eager."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fp4pass
from fp4pass._compat.inductor import Described
from fp4pass.graph.inductor import cpu
from fp4pass.kernels.cpu.operators import FEW_ROWS

# In CI there is one, or these fail; Inductor needs it for any graph.
pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and not any(map(shutil.which, ("g++", "clang++"))),
    reason="there is no compiler: apt-get install g++",
)


class Block(nn.Module):
    """Two products of one input, which are grouped, and one of what they make."""

    def __init__(self, dtype: torch.dtype, columns: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Linear(columns, 64, dtype=dtype) for _ in "ab")
        self.down = nn.Linear(64, columns, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.left(x) * self.right(x))


def block(fmt: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    return fp4pass.convert(Block(dtype), fmt, "naive", weight_only=True, **options)


def code_of(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, str]:
    torch.compiler.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        return run_and_get_code(torch.compile(model, fullgraph=True, **options), x)


def check(fmt: str, dtype: torch.dtype, rows: int) -> str:
    model, x = block(fmt, dtype), torch.randn(rows, 96).to(dtype)
    y, (code,) = code_of(model, x)
    with torch.no_grad():
        assert torch.equal(y, model(x)) or dtype == torch.bfloat16
        torch.testing.assert_close(y, model(x), rtol=2e-2 if dtype == torch.bfloat16 else 0, atol=0)
    return code


def call(rows: int | None = 4, compute: str = "input", **changed: Any) -> Any:
    """What a product is lowered to."""
    n, k = 64, 96

    def tensor(dtype: torch.dtype, *size: int | None) -> Described:
        return Described(None, size, dtype)

    arguments = {
        "x": tensor(torch.bfloat16, rows, k),
        "packed": tensor(torch.uint8, n, k // 2),
        "scale": tensor(torch.uint8, n, k // 16),
        "global_scale": tensor(torch.float32, 1),
        "bias": tensor(torch.bfloat16, n),
        "fmt": "nvfp4",
    }
    return cpu._linear(*(arguments | changed).values(), compute)


def test_other_products_stay_operators() -> None:
    (found,) = call()
    assert found.size == (4, 64) and len(found.inputs) == 5 and len(found.parameters) == 6
    (found,) = call(bias=None, x=Described(None, (2, 1, 96), torch.float32))
    assert found.size == (2, 1, 64) and found.parameters[-1] == "float*" and len(found.inputs) == 4
    assert "fp4pass::product<float>(" in found.source and "nullptr, reinterpret" in found.source
    assert call(FEW_ROWS) and call(FEW_ROWS, "fp8")
    assert not call(0) and not call(None) and not call(FEW_ROWS + 1)
    for x in (Described(None, (4, 96), torch.float16), Described(None, (4, 96), torch.float64)):
        assert not call(x=x, bias=None)
    assert not call(fmt="mxfp6_e2m3")
    assert not call(packed=Described(None, (64, 32), torch.uint8))
    assert not call(scale=Described(None, (64, 3), torch.uint8))
    for number in (Described(None, (1,), torch.float64), Described(None, (), torch.float32)):
        assert not call(global_scale=number)
    # A bias of another dtype is rounded to that of x before.
    assert not call(bias=Described(None, (64,), torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_needs_no_operator(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = block("nvfp4", dtype), torch.randn(2, 96).to(dtype)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        y = torch._inductor.aoti_load_package(path)(x)
        torch.testing.assert_close(y, model(x))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "nvint4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS])
def test_every_few_rows_are_code(fmt: str, dtype: torch.dtype, rows: int) -> None:
    code = check(fmt, dtype, rows)
    # Equal ones are one function, called for each; and nothing goes through the dispatcher.
    assert code.count("    cpp_fp4pass_") == 3 and "torch.ops.fp4pass" not in code
    assert code.count("fp4pass::product<") == 2
