"""Codes in bytes, and the records of a quantized tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from blocks import VARIANTS

from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import pack_codes, unpack_codes
from fp4pass.core.quant_state import QuantState
from fp4pass.errors import DtypeError, ShapeError


def state(fmt: Format, rows: int = 3, columns: int = 64) -> QuantState:
    packed = torch.arange(rows * columns // 2).remainder(256).byte().view(rows, -1)
    scale = torch.full((rows, columns // fmt.block), 100, dtype=torch.uint8)
    return QuantState(packed, scale, 0.5 if fmt.has_global_scale else 1.0, fmt, (rows, columns))


def test_every_byte_round_trips() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = unpack_codes(packed)
    assert codes.shape == (4, 128) and codes.max() == 15
    assert torch.equal(pack_codes(codes), packed)
    assert torch.equal(unpack_codes(packed.t()), unpack_codes(packed.t().contiguous()))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_and_bytes_share_no_memory(bits: int) -> None:
    for convert in (pack_codes, unpack_codes):
        given = torch.zeros(2, 12, dtype=torch.uint8)
        convert(given, bits).fill_(1)
        assert not given.any()


def test_bad_codes() -> None:
    with pytest.raises(ShapeError, match=r"a multiple of 2 columns.*got 5"):
        pack_codes(torch.zeros(2, 5, dtype=torch.uint8))
    with pytest.raises(DtypeError, match=r"codes of torch.uint8, got torch.int64"):
        pack_codes(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(DtypeError, match=r"bytes of torch.uint8, got torch.int8"):
        unpack_codes(torch.zeros(2, 4, dtype=torch.int8))


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_a_state_counts_its_bytes(fmt: Format) -> None:
    quantized = state(fmt)
    bits = 8 * (quantized.nbytes - 4 * fmt.has_global_scale)
    assert bits == fmt.bits_per_weight((3, 64)) * 3 * 64
    assert fmt.key in repr(quantized) and "3 x 64" in repr(quantized) and "cpu" in repr(quantized)


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_a_state_moves(fmt: Format) -> None:
    quantized = state(fmt)
    moved = quantized.to("meta")
    assert moved.qdata.device.type == moved.scale.device.type == "meta"
    assert (moved.format, moved.shape, moved.global_scale) == (
        fmt,
        quantized.shape,
        quantized.global_scale,
    )
    assert quantized.qdata.device.type == "cpu"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "qdata",
            torch.zeros(3, 31, dtype=torch.uint8),
            r"QuantState.qdata: expected \(3, 32\) .*got \(3, 31\)",
        ),
        ("qdata", torch.zeros(3, 32, dtype=torch.int8), r"torch.uint8 .*got \(3, 32\) torch.int8"),
        ("scale", torch.zeros(3, 3, dtype=torch.uint8), r"expected \(3, 4\) torch.uint8"),
        ("scale", torch.zeros(3, 4).to(torch.float8_e4m3fn), r"scale: .*got .*float8_e4m3fn"),
        ("shape", (4, 64), r"for a 4 x 64 tensor in nvfp4"),
    ],
)
def test_a_state_that_does_not_fit(field: str, value: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        dataclasses.replace(state(get_format("nvfp4")), **{field: value})
