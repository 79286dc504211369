"""Quantize one tensor in any scheme: shapes, dtypes, partial blocks, files, errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import fp4pass
from fp4pass import ops
from fp4pass.core.elements import element_table, scale_table
from fp4pass.core.formats import FORMATS
from fp4pass.core.packing import unpack_codes
from fp4pass.core.quant_state import QuantState, load_state
from fp4pass.errors import CheckpointError, DtypeError, NonFiniteError, OptionError, ShapeError
from fp4pass.parity import CodebookState
from fp4pass.parity.codebooks import CODEBOOKS

# Two codebooks, two formats of four bits, one of six, one with a scale for a tile.
SCHEMES = ["nf4", "nvfp4", "mxfp4", "mxfp6_e2m3", "fp8_block"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reach(scheme: str) -> float:
    """How far a normal value may be from what it becomes, relative to its block's largest.

    Half of the widest gap between values; scales of powers of two can be half of what is needed.
    """
    if scheme in CODEBOOKS:
        values = sorted(v for v in CODEBOOKS[scheme].values if not math.isnan(v))
        return max(b - a for a, b in itertools.pairwise(values)) / 2
    found = FORMATS[scheme]
    magnitudes = found.element.magnitudes
    widest = max(b - a for a, b in itertools.pairwise(magnitudes))
    return widest / found.element.max * (1 if found.scale.mantissa_bits else 2)


# Every scheme in float32, and every dtype in a scheme of each kind.
ROUND_TRIPS = [(scheme, torch.float32) for scheme in SCHEMES]
ROUND_TRIPS += [(scheme, dtype) for scheme in ("nf4", "nvfp4", "mxfp4") for dtype in DTYPES[1:]]


def block_of(state: QuantState | CodebookState) -> int:
    return (state.codebook if isinstance(state, CodebookState) else state.format).block


def in_format(x: Tensor, scheme: str, **options: Any) -> QuantState:
    state = fp4pass.quantize(x, scheme, **options)
    assert isinstance(state, QuantState)
    return state


@pytest.mark.core
@pytest.mark.parametrize("scheme, dtype", ROUND_TRIPS, ids=str)
def test_round_trip(scheme: str, dtype: torch.dtype) -> None:
    x = normal(6, 256, dtype=dtype)
    state = fp4pass.quantize(x, scheme)
    dense = fp4pass.dequantize(state)
    assert dense.shape == x.shape and dense.dtype == x.dtype
    block = block_of(state) or x.numel()
    largest = x.abs().double().reshape(-1, block).amax(1, keepdim=True)
    error = ((dense - x).abs().double().reshape(-1, block) / largest).amax()
    assert error <= reach(scheme) + torch.finfo(dtype).eps
    assert torch.equal(dense, fp4pass.dequantize(fp4pass.quantize(x, scheme)))


SHAPES = [(), (1,), (7,), (130,), (3, 33), (2, 3, 65), (64, 1)]


@pytest.mark.core
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["nf4", "nvfp4", "mxfp6_e2m3"])
def test_any_shape_has_a_last_partial_block(scheme: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape) + 3
    state = fp4pass.quantize(x, scheme)
    dense = fp4pass.dequantize(state)
    assert dense.shape == state.shape == x.shape and dense.is_contiguous()
    assert ((dense - x).abs() <= x.abs().max() * reach(scheme) * 1.001).all()
    if isinstance(state, CodebookState):
        assert state.qdata.numel() == math.ceil(x.numel() / 2)
        assert state.absmax.numel() == math.ceil(x.numel() / state.codebook.block)
    else:
        fmt = state.format
        blocks = math.ceil((x.shape[-1] if shape else 1) / fmt.block)
        assert state.scale.shape == (*shape[:-1], blocks)
        assert state.qdata.shape[-1] * 8 == blocks * fmt.block * fmt.element.bits


@pytest.mark.core
@pytest.mark.parametrize("scheme", ["nvfp4", "int8"])
def test_a_format_is_that_of_its_method(scheme: str) -> None:
    """A matrix is quantized as a weight is; rows that are no whole blocks are padded."""
    x = normal(6, 256)
    fmt = FORMATS[scheme]
    for method in ("naive", "sse"):
        state = in_format(x, scheme, method=method)
        factor = fmt.global_scale_for(x.abs().max().item())
        packed, scale = ops.search(x, None, factor, scheme, method)
        assert torch.equal(state.qdata, packed) and torch.equal(state.scale, scale)
        assert state.global_scale == factor
    short = in_format(x[:, :250], scheme)
    padded = torch.nn.functional.pad(x[:, :250], (0, 256 - 250))
    whole = in_format(padded, scheme)
    assert torch.equal(short.qdata, whole.qdata) and torch.equal(short.scale, whole.scale)


@every_scheme
def test_a_file_and_back(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    state = fp4pass.quantize(normal(3, 77, dtype=torch.bfloat16), scheme)
    state.save(path)
    again = load_state(path)
    assert type(again) is type(state) and type(state).load(path).shape == state.shape
    for field in dataclasses.fields(state):
        ours, theirs = getattr(state, field.name), getattr(again, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
    assert torch.equal(fp4pass.dequantize(again), fp4pass.dequantize(state))
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["quant_state"])
        assert set(file.keys()) == {"qdata", "scale"}
    assert facts["scheme"] == scheme and facts["packing"] == state.packing
    assert state.packing.split()[0] in ("1", "2", "4")
    other = QuantState if isinstance(state, CodebookState) else CodebookState
    with pytest.raises(CheckpointError, match=rf"expected a {other.__name__}, got .*{scheme}"):
        other.load(path)


@pytest.mark.core
def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=f"x.safetensors: expected a tensor.*{message}"):
            load_state(path)

    refused("No such file")
    path.write_bytes(b"nothing")
    refused("Save it again")
    fp4pass.quantize(normal(64), "nf4:32").save(path)
    whole = path.read_bytes()
    for old, new, message in (
        (b"nf4:32", b"nf4:99", "no block of 99"),
        (b"nf4:32", b"nf4:16", r"absmax: expected \(4,\)"),
        (b"float32", b"float33", "float33"),
        (b"float32", b"float_t", "float_t"),
        (b"float32", b"complex", "complex"),
    ):
        path.write_bytes(whole.replace(old, new))
        refused(message)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["quant_state"])
        tensors = {name: file.get_tensor(name) for name in ("qdata", "scale")}
    for shape in ([-8, -8], [0, 64]):
        facts["shape"] = shape
        save_file(tensors, path, metadata={"quant_state": json.dumps(facts)})
        refused(rf"positive sizes, got \[{shape[0]}, {shape[1]}\]")


@pytest.mark.parametrize("scheme", ["nvfp4", "nf4"])
def test_a_flipped_bit_is_never_another_tensor(scheme: str, tmp_path: Path) -> None:
    """100 files of each scheme: bits all over the file, and all of its facts."""
    path = tmp_path / "x.safetensors"
    fp4pass.quantize(normal(3, 77), scheme).save(path)
    whole = path.read_bytes()
    load_state(path)
    record = whole.index(b"quant_state")
    places = {i * len(whole) // 70 for i in range(70)} | {record + 3 * i for i in range(30)}
    for i, place in enumerate(sorted(places)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (i % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"x.safetensors: expected a tensor"):
            load_state(path)


@pytest.mark.core
def test_a_file_without_checksums_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    fp4pass.quantize(normal(64), "nvfp4").save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}
    facts = json.loads(metadata["quant_state"])
    del facts["checksums"]
    save_file(tensors, path, metadata={"quant_state": json.dumps(facts)})
    with pytest.raises(CheckpointError, match="it has no checksums"):
        load_state(path)
    save_file({**tensors, "qdata": tensors["qdata"] ^ 1}, path, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"damaged \(qdata: another checksum\)"):
        load_state(path)


@pytest.mark.core
def test_values_are_multiplied_by_the_global_scale_itself() -> None:
    """And not divided by its reciprocal, which is rounded."""
    for number in (0.1, 0.3, 0.7):
        state = in_format(normal(8, 64), "nvfp4", global_scale=number)
        fmt, device = state.format, torch.device("cpu")
        step = scale_table(fmt.scale, device)[state.scale.long()] * torch.tensor(number)
        codes = unpack_codes(state.qdata).long().unflatten(1, (-1, fmt.block))
        wanted = element_table(fmt.element, device)[codes] * step.unsqueeze(-1)
        assert torch.equal(fp4pass.dequantize(state), wanted.flatten(1))


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "nf5"}, OptionError, "Scheme 'nf5' does not exist. Did you mean 'nf"),
        ({"scheme": "nf4", "block_size": 48}, OptionError, "'nf4' has no block of 48"),
        ({"scheme": "nf4:64", "block_size": 32}, OptionError, "contradict each other"),
        ({"scheme": "nvfp4", "block_size": 64}, OptionError, "'nvfp4' has no block of 64"),
        ({"scheme": "nvfp4", "method": "hessian"}, OptionError, "Choose 'naive' or 'sse'"),
        ({"scheme": "nvfp4", "method": "best"}, OptionError, "Method 'best' does not exist"),
        (
            {"scheme": "nf4", "global_scale": 2.0},
            OptionError,
            "nf4 is a codebook and has no global scale",
        ),
        ({"scheme": "mxfp4", "global_scale": 2.0}, OptionError, "mxfp4 has no global scale"),
        (
            {"scheme": "nvfp4", "global_scale": -1.0},
            OptionError,
            "a number from 2.-126 to 2.126, got",
        ),
        ({"scheme": "nvfp4", "global_scale": "amax"}, OptionError, "got 'amax'"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp4pass.quantize(normal(2, 64), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["nf4", "nvfp4"])
def test_bad_tensors(scheme: str) -> None:
    with pytest.raises(ShapeError, match=r"got shape \(0, 64\)"):
        fp4pass.quantize(torch.empty(0, 64), scheme)
    with pytest.raises(DtypeError, match=r"x of float32, bfloat16.*got torch.int64"):
        fp4pass.quantize(torch.arange(64), scheme)
    for bad in (math.nan, math.inf):
        x = normal(2, 70)
        x[1, 69] = bad
        with pytest.raises(NonFiniteError, match="got NaN or infinity"):
            fp4pass.quantize(x, scheme)
    with pytest.raises(NonFiniteError, match="finite float32"):
        fp4pass.quantize(torch.full((64,), 1e300, dtype=torch.float64), scheme)
    with pytest.raises(DtypeError, match=r"a dense tensor, got torch\.sparse_coo"):
        fp4pass.quantize(torch.eye(64).to_sparse(), scheme)


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_numbers_stay_finite_or_are_an_error(scheme: str, dtype: torch.dtype) -> None:
    for value in (1e38, 2e38, 3e38, 3.4e38):
        x = torch.full((2, 64), value, dtype=dtype)
        try:
            state = fp4pass.quantize(x, scheme)
        except NonFiniteError as error:
            assert "rounds to what float32 cannot hold. Scale x" in str(error) and value > 2e38
        else:
            found = fp4pass.dequantize(state)
            assert found.isfinite().all() and torch.allclose(found, x, rtol=reach(scheme))
