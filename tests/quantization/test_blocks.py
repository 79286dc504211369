"""What quantize_blocks reads and returns: dimensions, dtypes, inputs, global scales, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from blocks import BLOCKS
from every_format import hessian_of, inputs, sample
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.core.packing import unpack_codes
from fp4pass.errors import DtypeError, NonFiniteError, OptionError, ShapeError
from fp4pass.quantization import functional as tensor_blocks
from fp4pass.quantization.functional import quantize_blocks


@pytest.mark.parametrize("dim, name", [(0, "nvfp4"), (1, "int8"), (-2, "mxfp6_e2m3")])
def test_the_block_may_be_any_dimension(name: str, dim: int) -> None:
    fmt = BLOCKS[name]
    x, X = sample(fmt), inputs(fmt)
    last = quantize_blocks(x, name, "hessian", inputs=X)
    # The blocks of a row stay behind the rows.
    found = quantize_blocks(x.movedim(-1, dim), name, "hessian", dim=dim, inputs=X)
    assert torch.equal(found.scale, last.scale) and torch.equal(found.steps(), last.steps())
    assert torch.equal(found.packed, last.packed.movedim(-1, dim))
    assert torch.equal(found.values(), last.values().movedim(-1, dim))
    assert torch.equal(found.dequantize(), last.dequantize().movedim(-1, dim))


@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_inputs_are_read_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = BLOCKS[name]
    x, X = sample(fmt), inputs(fmt)

    def scale(**inputs: Tensor) -> Tensor:
        return quantize_blocks(x, name, "hessian", **inputs).scale

    whole = scale(inputs=X)
    assert torch.equal(scale(inputs=X.bfloat16()), whole)  # up to 40, exact in bfloat16
    assert torch.equal(scale(inputs=X.view(4, 20, -1)), whole)
    blocks = hessian_of(X, fmt.block)
    for hessian in (blocks, blocks.float(), blocks * 1e30, blocks * 1e-30):
        assert torch.equal(scale(block_hessian=hessian), whole)
    monkeypatch.setattr(tensor_blocks, "_CHUNK", 7 * X.shape[1])
    assert torch.equal(scale(inputs=X), whole)


@pytest.mark.core
def test_a_row_of_blocks_may_be_flat() -> None:
    """[N * J, n] and [2, N / 2, J, n] are [N, J, n]; orders in which they are not are refused."""
    fmt = BLOCKS["nvfp4"]
    x, X = sample(fmt), inputs(fmt)
    found = quantize_blocks(x, objective="hessian", inputs=X)
    for shape in ((72, 16), (2, 12, 3, 16), (8, 3, 3, 1, 16)):
        other = quantize_blocks(x.view(shape), objective="hessian", inputs=X)
        assert torch.equal(other.scale, found.scale.view(shape[:-1]))
        assert torch.equal(other.packed, found.packed.view(*shape[:-1], 8))
    with pytest.raises(ShapeError, match=r"expected a weight of \[N, 3\]"):
        quantize_blocks(x[:23].transpose(0, 1), objective="hessian", inputs=X)


@pytest.mark.core
@pytest.mark.parametrize("fmt", [BLOCKS["nvfp4"], BLOCKS["mxfp6_e2m3"]], ids=lambda f: f.key)
def test_packed_codes_stand_for_the_values(fmt: Format) -> None:
    x = sample(fmt)
    found = quantize_blocks(x, fmt.name)
    assert found.packed.dtype == found.scale.dtype == torch.uint8
    assert found.packed.shape == (*x.shape[:-1], fmt.block * fmt.element.bits // 8)
    codes = unpack_codes(found.packed, fmt.element.bits)
    values = found.values()
    assert torch.equal(torch.tensor(fmt.element.values)[codes.int()], values)
    assert torch.equal(torch.signbit(values), codes >= 1 << (fmt.element.bits - 1))
    assert torch.equal(
        torch.tensor(fmt.scale.values)[found.scale.long() - 1] * found.global_scale, found.steps()
    )


def test_a_global_scale_is_a_number_or_a_tensor_of_one() -> None:
    x = sample(BLOCKS["nvfp4"])
    wanted = quantize_blocks(x, global_scale=2.0**-5)
    for g in (torch.tensor(2.0**-5), torch.tensor([2.0**-5], dtype=torch.float64)):
        assert torch.equal(quantize_blocks(x, global_scale=g).scale, wanted.scale)
    auto = tensor_blocks.global_scale_for(x)
    assert quantize_blocks(x, global_scale=auto).global_scale == quantize_blocks(x).global_scale
    assert auto * 448 * 6 >= x.abs().max() > auto * 224 * 6
    assert quantize_blocks(torch.zeros(2, 16)).global_scale == 1.0
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-45, 1e38, "amax", None, torch.ones(3)):
        with pytest.raises(OptionError, match=r"expected global_scale to be 'auto' or a number"):
            quantize_blocks(x, global_scale=bad)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="mxfp4 has no global scale, got global_scale=2"):
        quantize_blocks(sample(BLOCKS["mxfp4"]), "mxfp4", global_scale=2.0)


def by(**tensors: Tensor) -> Any:
    return quantize_blocks(torch.ones(4, 1, 16), objective="hessian", **tensors)


ones = torch.ones


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (OptionError, "Did you mean 'nvfp4'", lambda: quantize_blocks(ones(4, 16), "nvfp5")),
        (OptionError, "Did you mean 'sse'", lambda: quantize_blocks(ones(4, 16), "nvfp4", "ssd")),
        (ShapeError, r"one of \(16, 32\), got", lambda: quantize_blocks(ones(4, 17))),
        (ShapeError, "got dim=2", lambda: quantize_blocks(ones(4, 16), dim=2)),
        (ShapeError, "got dim=-1", lambda: quantize_blocks(ones(()))),
        (ShapeError, r"got shape \(0, 16\)", lambda: quantize_blocks(ones(0, 16))),
        (DtypeError, "weight of .* got torch.int64", lambda: quantize_blocks(ones(4, 16).long())),
        (NonFiniteError, "got NaN", lambda: quantize_blocks(torch.full((4, 16), math.nan))),
        (NonFiniteError, "larger", lambda: quantize_blocks(ones(4, 16).double() * 1e200)),
        (OptionError, "got neither", lambda: by()),
        (OptionError, "no inputs", lambda: quantize_blocks(ones(4, 16), inputs=ones(3, 16))),
        (ShapeError, r"\[J, 16, 16\]", lambda: by(block_hessian=ones(1, 32, 32))),
        (ShapeError, r"\[N, 3\]", lambda: by(block_hessian=ones(3, 16, 16))),
        (DtypeError, "block_hessian of", lambda: by(block_hessian=ones(1, 16, 16).int())),
        (NonFiniteError, "block_hess", lambda: by(block_hessian=ones(1, 16, 16) * math.inf)),
        (ShapeError, r"got \(5, 24\)", lambda: by(inputs=ones(5, 24))),
        (ShapeError, "at least one token", lambda: by(inputs=ones(0, 16))),
        (DtypeError, "inputs of", lambda: by(inputs=ones(5, 16).int())),
        (NonFiniteError, "finite inputs", lambda: by(inputs=ones(5, 16) * math.nan)),
    ],
)
def test_errors_say_what_was_expected(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()
