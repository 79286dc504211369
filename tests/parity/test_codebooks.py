"""Tensors in codebooks: which values codes stand for, how they are packed, and the operators."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fp4pass
from fp4pass.errors import CheckpointError, OptionError, ShapeError
from fp4pass.parity import CodebookState
from fp4pass.parity import codebooks as ops
from fp4pass.parity.codebooks import CODEBOOKS, NF4, Codebook, get_codebook

every_codebook = pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=lambda c: c.name)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def in_codebook(x: Tensor, scheme: str, block: int | None = None) -> CodebookState:
    state = fp4pass.quantize(x, scheme, block)
    assert isinstance(state, CodebookState)
    return state


@pytest.mark.parametrize("block", [16, 4096])
def test_a_codebook_in_other_blocks(block: int) -> None:
    x = normal(5, 1000)
    state = in_codebook(x, "nf4", block)
    assert state.codebook == get_codebook("nf4", block) == get_codebook(f"nf4:{block}")
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
    assert torch.equal(state.absmax, blocks.abs().amax(1))


@pytest.mark.core
@every_codebook
def test_codes_are_the_nearest_values(codebook: Codebook) -> None:
    """By brute force in float64, up to float32 rounding of the quotient."""
    x = normal(16, 64)
    state = in_codebook(x, codebook.name)
    used = torch.tensor(codebook.values, dtype=torch.float64)
    quotient = x.double() / state.absmax.view(-1, 1)
    least = (quotient.unsqueeze(-1) - used).abs().amin(-1)
    error = (fp4pass.dequantize(state).double() / state.absmax.view(-1, 1) - quotient).abs()
    assert (error <= least + 1e-6).all()


def test_bad_codebooks() -> None:
    with pytest.raises(OptionError, match="has no block of 24"):
        Codebook("odd", NF4.values, block=24)
    with pytest.raises(OptionError, match="'nvfp4' does not exist"):
        ops.quantize_codebook(normal(64), "nvfp4")


@pytest.mark.core
def test_codebooks_need_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = tmp_path / "x.safetensors", r"Import fp4pass\.parity first for codebooks"
    state = in_codebook(normal(4, 64), "nf4")
    state.save(path)
    assert isinstance(fp4pass.quantization.functional.load_state(path), CodebookState)
    monkeypatch.setattr("fp4pass.core.quant_state.OTHER_RECORDS", {})
    with pytest.raises(OptionError, match=first):
        fp4pass.quantize(normal(4, 64), "nf4")
    with pytest.raises(CheckpointError, match=first):
        fp4pass.quantization.functional.load_state(path)


@pytest.mark.core
@every_codebook
@pytest.mark.parametrize("shape", [(77,), (0,)])
def test_operators(codebook: Codebook, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.quantize_codebook, (x, codebook.key), test_utils=checks)
    packed, absmax = ops.quantize_codebook(x, codebook.key)
    arguments = (packed, absmax, codebook.key, shape, torch.bfloat16)
    torch.library.opcheck(ops.dequantize_codebook, arguments, test_utils=checks)
    with pytest.raises(ShapeError, match=rf"expected {len(packed) + 4} bytes of"):
        ops.dequantize_codebook(*arguments[:3], (x.numel() + 8,), torch.bfloat16)


def a_state(codebook: Codebook, shape: tuple[int, ...] = (3, 67)) -> CodebookState:
    size, blocks = codebook.sizes(torch.Size(shape).numel())
    packed = torch.arange(size).remainder(256).byte()
    absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(0))
    return CodebookState(packed, absmax, codebook, shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qdata", torch.zeros(100, dtype=torch.uint8), r"qdata: expected \(101,\) .*\(100,\)"),
        ("absmax", torch.zeros(4).bfloat16(), r"absmax: expected \(4,\) torch.float32 .*bfloat16"),
        ("shape", (3, 70), r"for a 3 x 70 tensor in nf4"),
    ],
)
def test_a_codebook_state_that_does_not_fit(field: str, value: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        dataclasses.replace(a_state(CODEBOOKS["nf4"]), **{field: value})
