"""One tensor to any scheme and back: shapes, dtypes, partial blocks, files, errors."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import fp4pass
from fp4pass import ops
from fp4pass.core.codebooks import CODEBOOKS, NF4, Codebook, get_scheme
from fp4pass.core.formats import FORMATS, FP8_E4M3
from fp4pass.core.quant_state import QuantState, unpack_codes
from fp4pass.errors import CheckpointError, DtypeError, NonFiniteError, OptionError, ShapeError

SCHEMES = [*CODEBOOKS, *FORMATS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_codebook = pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=lambda c: c.name)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reach(scheme: str) -> float:
    """How far a normal value may be from what it becomes, relative to its block's largest.

    Half of the widest gap between values; scales of powers of two can be half of what is needed.
    """
    found = get_scheme(scheme)
    if isinstance(found, Codebook):
        values = sorted(v for v in found.values if not math.isnan(v))
        return max(b - a for a, b in itertools.pairwise(values)) / 2
    magnitudes = found.element.magnitudes
    widest = max(b - a for a, b in itertools.pairwise(magnitudes))
    return widest / found.element.max * (1 if found.scale.mantissa_bits else 2)


@every_scheme
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(scheme: str, dtype: torch.dtype) -> None:
    x = normal(6, 256, dtype=dtype)
    state = fp4pass.quantize(x, scheme)
    dense = fp4pass.dequantize(state)
    assert dense.shape == x.shape and dense.dtype == x.dtype
    block = state.scheme.block
    largest = x.abs().double().reshape(-1, block).amax(1, keepdim=True)
    error = ((dense - x).abs().double().reshape(-1, block) / largest).amax()
    assert error <= reach(scheme) + torch.finfo(dtype).eps
    assert torch.equal(dense, fp4pass.dequantize(fp4pass.quantize(x, scheme)))


@every_scheme
@pytest.mark.parametrize("shape", [(), (1,), (7,), (130,), (3, 33), (2, 3, 65), (64, 1)])
def test_any_shape_has_a_last_partial_block(scheme: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape) + 3
    state = fp4pass.quantize(x, scheme)
    dense = fp4pass.dequantize(state)
    assert dense.shape == state.shape == x.shape and dense.is_contiguous()
    assert ((dense - x).abs() <= x.abs().max() * reach(scheme) * 1.001).all()
    found = state.scheme
    if isinstance(found, Codebook):
        assert state.qdata.numel() == math.ceil(x.numel() * found.bits / 8)
        assert state.scale.numel() == math.ceil(x.numel() / found.block)
    else:
        blocks = math.ceil((x.shape[-1] if shape else 1) / found.block)
        assert state.scale.shape == (*shape[:-1], blocks)
        assert state.qdata.shape[-1] * 8 == blocks * found.block * found.element.bits


@every_scheme
def test_zeros_stay_zero(scheme: str) -> None:
    x = normal(4, 128)
    x[1] = 0
    assert not fp4pass.dequantize(fp4pass.quantize(x, scheme))[1].any()
    assert not fp4pass.dequantize(fp4pass.quantize(torch.zeros(3, 70), scheme)).any()


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_format_is_that_of_its_method(scheme: str) -> None:
    """Whole blocks of a matrix are what `convert` would make of it; the rest is as padded."""
    x = normal(6, 256)
    fmt = FORMATS[scheme]
    for method in ("naive", "sse"):
        state = fp4pass.quantize(x, scheme, method=method)
        factor = fmt.global_scale_for(x.abs().max().item())
        packed, scale = ops.search(x, None, factor, scheme, method)
        assert torch.equal(state.qdata, packed) and torch.equal(state.scale, scale)
        assert state.global_scale == factor
    short = fp4pass.quantize(x[:, :250], scheme)
    padded = torch.nn.functional.pad(x[:, :250], (0, 256 - 250))
    whole = fp4pass.quantize(padded, scheme)
    assert torch.equal(short.qdata, whole.qdata) and torch.equal(short.scale, whole.scale)


def test_sse_is_not_worse_than_naive() -> None:
    x = normal(16, 500, dtype=torch.bfloat16)
    for scheme in FORMATS:
        errors = [
            (fp4pass.dequantize(fp4pass.quantize(x, scheme, method=method)) - x).float().norm()
            for method in ("naive", "sse")
        ]
        assert errors[1] <= errors[0] * 1.001, scheme


def test_a_global_scale_of_ones_own() -> None:
    x = normal(4, 64)
    state = fp4pass.quantize(x, "nvfp4", global_scale=0.3)
    assert state.global_scale == 0.3
    codes = unpack_codes(state.qdata).long()
    values = torch.tensor(FORMATS["nvfp4"].element.values)[codes]
    step = state.scale.view(torch.float8_e4m3fn).float() * torch.tensor(0.3)
    assert torch.equal(fp4pass.dequantize(state), values * step.repeat_interleave(16, 1))


@pytest.mark.parametrize("block", [16, 32, 128, 4096])
def test_a_codebook_in_other_blocks(block: int) -> None:
    x = normal(5, 1000)
    state = fp4pass.quantize(x, "nf4", block)
    assert state.scheme == get_scheme("nf4", block) == get_scheme(f"nf4:{block}")
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
    assert state.absmax is not None and torch.equal(state.absmax, blocks.abs().amax(1))


@every_codebook
def test_codes_are_the_nearest_values(codebook: Codebook) -> None:
    """By brute force in float64, up to float32 rounding of the quotient."""
    x = normal(16, 64)
    state = fp4pass.quantize(x, codebook.name)
    assert state.absmax is not None
    used = torch.tensor([v for v in codebook.values if not math.isnan(v)], dtype=torch.float64)
    quotient = x.double() / state.absmax.view(-1, 1)
    least = (quotient.unsqueeze(-1) - used).abs().amin(-1)
    error = (fp4pass.dequantize(state).double() / state.absmax.view(-1, 1) - quotient).abs()
    assert (error <= least + 1e-6).all()


def test_four_bits_are_packed() -> None:
    assert fp4pass.quantize(normal(64, 64), "nf4").nbytes == 64 * 32 + 4 * 64
    assert fp4pass.quantize(normal(64, 64), "int4_linear", 4096).nbytes == 64 * 32 + 4


def test_linear_codes_are_integers() -> None:
    x = normal(8, 64)
    state = fp4pass.quantize(x, "int8_linear")
    assert state.absmax is not None
    step = state.absmax.view(-1, 1) / 127
    codes = state.qdata.view(torch.int8).view(8, 64)
    assert codes.abs().max() == 127
    assert ((codes * step - x).abs() <= step * 0.5001).all()
    nibbles = fp4pass.quantize(x, "int4_linear").qdata
    first = (nibbles >> 4).to(torch.int8).view(8, 32)
    step = state.absmax.view(-1, 1) / 7
    assert (((first - 16 * (first > 7)) * step - x[:, ::2]).abs() <= step * 0.5001).all()


def test_fp8_is_e4m3_that_ends_at_448() -> None:
    x = normal(8, 64)
    state = fp4pass.quantize(x, "fp8")
    assert state.absmax is not None
    bytes_ = state.qdata.view(torch.float8_e4m3fn).view(8, 64)
    assert bytes_.float().abs().max() == FP8_E4M3.max
    stretched = x / state.absmax.view(-1, 1) * 448
    torch.testing.assert_close(bytes_.float(), stretched.to(torch.float8_e4m3fn).float())


def test_nf8_is_built_as_nf4() -> None:
    values = CODEBOOKS["nf8"].values
    assert len(set(values)) == 256 and list(values) == sorted(values)
    assert (values[0], values[127], values[255]) == (-1.0, 0.0, 1.0)
    # The same construction with 4 bits, from quantiles of torch.
    delta = (1 / 32 + 1 / 30) / 2
    steps = [torch.linspace(1 - delta, 0.5, n, dtype=torch.float64)[:-1] for n in (9, 8)]
    sides = [torch.special.ndtri(step) for step in steps]
    table = torch.cat([-sides[1], torch.zeros(1), sides[0]]).sort().values / sides[0].max()
    torch.testing.assert_close(torch.tensor(NF4.values).double(), table, rtol=0, atol=3e-7)


@every_scheme
def test_a_file_and_back(scheme: str, tmp_path: Path) -> None:
    x = normal(3, 77, dtype=torch.bfloat16)
    state = fp4pass.quantize(x, scheme)
    state.save(tmp_path / "x.safetensors")
    again = QuantState.load(tmp_path / "x.safetensors")
    assert torch.equal(again.qdata, state.qdata) and torch.equal(again.scale, state.scale)
    for field in ("global_scale", "scheme", "shape", "dtype", "packing"):
        assert getattr(again, field) == getattr(state, field)
    assert torch.equal(fp4pass.dequantize(again), fp4pass.dequantize(state))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        facts = json.loads(file.metadata()["quant_state"])
    assert facts["scheme"] == scheme and facts["packing"] == state.packing


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match=r"x.safetensors is no file of QuantState.save"):
        QuantState.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="Save it again"):
        QuantState.load(path)
    fp4pass.quantize(normal(64), "nf4:32").save(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"nf4:32", b"nf4:99"))
    with pytest.raises(CheckpointError, match="no block of 99"):
        QuantState.load(path)
    for wrong in (b"float33", b"float_t", b"complex"):
        path.write_bytes(whole.replace(b"float32", wrong))
        with pytest.raises(CheckpointError, match=r"x.safetensors is no file of QuantState.save"):
            QuantState.load(path)
    path.write_bytes(whole.replace(b"nf4:32", b"nf4:16"))
    with pytest.raises(CheckpointError, match=r"scale is \(2,\)"):
        QuantState.load(path)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["quant_state"])
        tensors = {name: file.get_tensor(name) for name in ("qdata", "scale")}
    facts["shape"] = [-8, -8]
    save_file(tensors, path, metadata={"quant_state": json.dumps(facts)})
    with pytest.raises(CheckpointError, match=r"of shape \[-8, -8\]"):
        QuantState.load(path)


@every_scheme
def test_it_moves_and_says_what_it_is(scheme: str) -> None:
    state = fp4pass.quantize(normal(3, 64, dtype=torch.bfloat16), scheme)
    moved = state.to("meta")
    assert moved.qdata.device.type == moved.scale.device.type == "meta"
    assert fp4pass.dequantize(moved).device.type == "meta"
    text = repr(state)
    for part in (scheme, "3 x 64", "bfloat16", "cpu", str(state.nbytes), str(state.scheme.block)):
        assert part in text
    if isinstance(state.scheme, Codebook):
        assert state.codebook is state.scheme and state.absmax is state.scale
        with pytest.raises(OptionError, match="is no tensor in a format"):
            _ = state.format
    else:
        assert state.codebook is None and state.absmax is None
        assert state.format is FORMATS[scheme]
    assert state.packing.split()[0] in ("1", "2", "4")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "nf5"}, OptionError, "Scheme 'nf5' does not exist. Did you mean 'nf"),
        ({"scheme": "nf4", "block_size": 48}, OptionError, "'nf4' has no block of 48"),
        ({"scheme": "nf4:64", "block_size": 32}, OptionError, "contradict each other"),
        ({"scheme": "nf4:x"}, OptionError, "does not exist"),
        ({"scheme": "nf4", "block_size": "64"}, OptionError, "a number or 'default' is wanted"),
        ({"scheme": "nvfp4", "block_size": 64}, OptionError, "'nvfp4' has no block of 64"),
        ({"scheme": "nvfp4", "method": "hessian"}, OptionError, "Choose 'naive' or 'sse'"),
        ({"scheme": "nvfp4", "method": "best"}, OptionError, "Method 'best' does not exist"),
        ({"scheme": "nf4", "global_scale": 2.0}, OptionError, "a codebook, nf4, has none"),
        ({"scheme": "mxfp4", "global_scale": 2.0}, OptionError, "mxfp4 has none"),
        ({"scheme": "nvfp4", "global_scale": -1.0}, OptionError, "a number from 2.-126 to 2.126"),
        ({"scheme": "nvfp4", "global_scale": 1e-46}, OptionError, "a number from 2.-126 to 2.126"),
        ({"scheme": "nvfp4", "global_scale": 1e300}, OptionError, "a number from 2.-126 to 2.126"),
        ({"scheme": "nvfp4", "global_scale": "2.0"}, OptionError, "global_scale='2.0'"),
        ({"scheme": "nvfp4", "global_scale": None}, OptionError, "global_scale=None"),
        ({"scheme": "nf4", "method": "zzz"}, OptionError, "zzz"),
        ({"scheme": "nvfp4", "global_scale": "amax"}, OptionError, "global_scale='amax'"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp4pass.quantize(normal(2, 64), **options)  # type: ignore[arg-type]


@every_scheme
def test_bad_tensors(scheme: str) -> None:
    with pytest.raises(ShapeError, match=r"shape \(0, 64\), which is empty"):
        fp4pass.quantize(torch.empty(0, 64), scheme)
    with pytest.raises(DtypeError, match=r"is torch.int64; float32, bfloat16"):
        fp4pass.quantize(torch.arange(64), scheme)
    for bad in (math.nan, math.inf):
        x = normal(2, 70)
        x[1, 69] = bad
        with pytest.raises(NonFiniteError, match="holds NaN or infinity"):
            fp4pass.quantize(x, scheme)
    with pytest.raises(NonFiniteError, match="in float32"):
        fp4pass.quantize(torch.full((64,), 1e300, dtype=torch.float64), scheme)


def test_a_tensor_that_needs_gradients() -> None:
    x = normal(4, 64).requires_grad_()
    for scheme in ("nf4", "nvfp4"):
        state = fp4pass.quantize(x, scheme)
        assert not state.qdata.requires_grad and not fp4pass.dequantize(state).requires_grad


def test_a_codebook_that_is_none() -> None:
    with pytest.raises(OptionError, match="15 values of 4 bits"):
        Codebook("short", 4, NF4.values[1:])
    with pytest.raises(OptionError, match="has no block of 24"):
        Codebook("odd", 4, NF4.values, block=24)


@every_codebook
@pytest.mark.parametrize("shape", [(3, 64), (77,), (0,)])
def test_operators(codebook: Codebook, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.quantize_codebook, (x, codebook.key), test_utils=checks)
    packed, absmax = ops.quantize_codebook(x, codebook.key)
    arguments = (packed, absmax, codebook.key, shape, torch.bfloat16)
    torch.library.opcheck(ops.dequantize_codebook, arguments, test_utils=checks)
    with pytest.raises(ShapeError, match=rf"has {len(packed) + codebook.bits // 4 * 4} and"):
        ops.dequantize_codebook(*arguments[:3], (x.numel() + 8,), torch.bfloat16)


def test_formats_have_operators_of_their_own() -> None:
    with pytest.raises(OptionError, match="got 'nvfp4', a format"):
        ops.quantize_codebook(normal(64), "nvfp4")


def test_compiled() -> None:
    """One graph, the same bits."""

    def there_and_back(x: Tensor) -> Tensor:
        return ops.dequantize_codebook(*ops.quantize_codebook(x, "nf4"), "nf4", x.shape, x.dtype)

    x = normal(3, 100)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))
