"""Codebooks are there once fp4pass.parity is imported, and errors say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp4pass
import fp4pass.parity
from fp4pass.errors import CheckpointError, OptionError
from fp4pass.ops.registration import OPERATORS
from fp4pass.parity import operators

FIRST = r"Import fp4pass\.parity first for codebooks, such as nf4\.$"


@pytest.mark.core
def test_codebooks_need_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fp4pass.quantize(torch.randn(4, 64), "nf4")
    state.save(tmp_path / "x.safetensors")
    assert isinstance(
        fp4pass.quantization.tensor.load_state(tmp_path / "x.safetensors"), type(state)
    )
    monkeypatch.setattr("fp4pass.core.quant_state.OTHER_RECORDS", {})
    with pytest.raises(OptionError, match=FIRST):
        fp4pass.quantize(torch.randn(4, 64), "nf4")
    with pytest.raises(CheckpointError, match=FIRST):
        fp4pass.quantization.tensor.load_state(tmp_path / "x.safetensors")


@pytest.mark.core
def test_the_import_registers_the_operators() -> None:
    for name in ("quantize_codebook", "dequantize_codebook", "linear_codebook", "linear_int8"):
        assert name in OPERATORS
        assert getattr(operators, name) is getattr(torch.ops.fp4pass, name).default
