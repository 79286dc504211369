"""Formats with float32 scales: searched, multiplied, converted, saved and compiled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import language_model, logits
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import FORMATS, Format
from fp4pass.errors import OptionError, ShapeError
from fp4pass.kernels.search.float_scales import CANDIDATES
from fp4pass.lab import trainable
from fp4pass.methods import Hessian
from fp4pass.parallel import ColumnLinear, RowLinear, require_whole_blocks
from fp4pass.record.config import LinearConfig

FLOATS = [fmt for fmt in FORMATS.values() if fmt.has_float_scale]
formats = pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.key)
SCHEMES = ("fp8", "fp8_block", "fp8_tensor", "mxfp8")

# Neither is a multiple of a tile or of a block of the Hessian.
N, K = 150, 200


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> Tensor:
    weight = normal(N, K)
    weight[0] = 0
    weight[1, 3] *= 30
    weight[2] *= 1e-30
    return weight


def hessians() -> Tensor:
    x = normal(400, K, seed=1) * torch.linspace(0.1, 3, K)
    x[:, 33:64] = x[:, 32:63] + 0.1 * x[:, 33:64]
    padded = F.pad(x, (0, -K % 32)).unflatten(1, (-1, 32)).transpose(0, 1)
    return padded.mT @ padded


def tiles(fmt: Format) -> list[tuple[slice, slice]]:
    height, width = fmt.rows or N, fmt.block or K
    rows = [slice(i, i + height) for i in range(0, N, height)]
    return [(r, slice(j, j + width)) for r in rows for j in range(0, K, width)]


def nearest(x: Tensor, scale: float) -> Tensor:
    """Float64 values of the nearest codes, by torch's own rounding."""
    quotient = (x / torch.tensor(scale)).clamp(-448, 448)
    return quotient.to(torch.float8_e4m3fn).double() * scale


def loss(residual: Tensor, columns: slice, hessian: Tensor | None) -> float:
    if hessian is None:
        return float(residual.square().sum())
    whole = torch.zeros(len(residual), len(hessian) * 32, dtype=torch.float64)
    whole[:, columns.start : columns.start + residual.shape[1]] = residual
    blocks = whole.unflatten(1, (-1, 32)).transpose(0, 1)
    return float((blocks @ hessian.double() * blocks).sum())


@formats
@pytest.mark.parametrize("objective", ["sse", "hessian"])
def test_scales_are_the_best_of_the_octave(fmt: Format, objective: str) -> None:
    """Against every candidate, in float64, tile by tile."""
    weight, hessian = weights(), hessians() if objective == "hessian" else None
    codes, scale = ops.search(weight, hessian, 1.0, fmt.key, objective)
    assert scale.shape == fmt.scale_shape(N, K) and scale.dtype == torch.float32
    for place, (rows, columns) in enumerate(tiles(fmt)):
        x, chosen = weight[rows, columns], float(scale.flatten()[place])
        naive = float(torch.clamp(x.abs().max() / 448, min=2.0**-126))
        values = codes[rows, columns].view(torch.float8_e4m3fn).double() * chosen
        assert torch.equal(values, nearest(x, chosen))
        factors = (2.0 ** (-i / CANDIDATES) for i in range(CANDIDATES))
        known = [max(float(torch.tensor(naive * each)), 2.0**-126) for each in factors]
        least = min(loss(x - nearest(x, each), columns, hessian) for each in known)
        assert loss(x - values, columns, hessian) <= least * (1 + 1e-6)
        assert any(math.isclose(chosen, each, rel_tol=1e-6) for each in known)


@formats
def test_naive_scales_reach_amax(fmt: Format) -> None:
    weight = weights()
    codes, scale = ops.search(weight, None, 1.0, fmt.key, "naive")
    for place, (rows, columns) in enumerate(tiles(fmt)):
        amax = weight[rows, columns].abs().max()
        assert scale.flatten()[place] == (amax / 448).clamp(min=2.0**-126)
    assert not codes[0].any() and (scale > 0).all() and scale.isfinite().all()
    dense = ops.dequantize(codes, scale, None, fmt.key, torch.float32)
    assert (dense - weight).norm() < 0.04 * weight.norm()


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_inputs_have_a_scale_by_amax(name: str) -> None:
    """As compressed-tensors quantizes tokens, and groups of them: amax / 448, ties to even."""
    x = normal(5, 256)
    codes, scale = ops.quantize(x, None, name)
    groups = x.view(5, -1, 256 if name == "fp8" else 128)
    wanted = groups.abs().amax(-1) / 448
    assert torch.equal(scale, wanted)
    values = (groups / wanted.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes, values.view(torch.uint8).view(5, 256))


def layer(scheme: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192 if scheme.startswith("mxfp8") else K, N))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return fp4pass.convert(model, scheme, "sse", progress=False)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *zip(SCHEMES, [torch.float32, torch.bfloat16, torch.float16, torch.float64], strict=True),
        *((f"{each}a16", torch.bfloat16) for each in SCHEMES),
    ],
)
def test_products_are_rounded_once(scheme: str, dtype: torch.dtype) -> None:
    model = layer(scheme).to(dtype)
    linear: Any = model[0]
    x, config = normal(6, linear.in_features).to(dtype), linear.config
    rows, key = x.double(), config.format.key
    if not config.weight_only:
        rows = ops.dequantize(*ops.quantize(x, None, key), None, key, torch.float64)
    stored = (linear.weight_packed, linear.weight_scale.view(config.format.scale.dtype), None)
    exact = rows @ ops.dequantize(*stored, key, torch.float64).t() + linear.bias.detach().double()
    eps = torch.finfo(dtype).eps if dtype.itemsize < 4 else 2.0**-19
    found = model(x).detach()
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(),
        exact,
        rtol=eps,
        atol=float(exact.abs().max()) * 2e-6 + (eps if dtype.itemsize < 4 else 0) * 0.01,
    )


def test_gradients_are_those_of_the_dense_weight() -> None:
    model = layer("fp8")
    x = normal(4, K).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.sum(0).expand(4, K), rtol=1e-4, atol=1e-4)


def test_a_static_scale_of_inputs_is_calibrated() -> None:
    model: Any = fp4pass.prepare(nn.Sequential(nn.Linear(K, N)), fmt="fp8_tensor")
    x = normal(40, K)
    model(x)
    model = fp4pass.convert(model, progress=False)
    assert model[0].input_global_scale == x.abs().max() / 448
    codes, scale = ops.quantize(2 * x, model[0].input_global_scale, "fp8_tensor")
    assert (scale == model[0].input_global_scale).all() and codes.max() == 254


def test_a_mixed_model_is_saved_and_loaded(tmp_path: Path) -> None:
    rules = [("*self_attn*", {"fmt": "fp8"}), ("*down_proj", {"fmt": "fp8_blocka16"})]
    model = fp4pass.convert(language_model(), "nvfp4a16", "sse", rules=rules, progress=False)
    rows = fp4pass.report(model).converted
    schemes = {row.name.rpartition(".")[2]: row.config.scheme for row in rows}
    assert schemes["q_proj"] == "fp8" and schemes["down_proj"] == "fp8_blocka16"
    assert schemes["up_proj"] == "nvfp4a16"
    fp4pass.save(model, tmp_path, layout="fp4pass")
    assert torch.equal(logits(fp4pass.load(tmp_path)), logits(model))


def test_a_report_counts_the_bits() -> None:
    (row,) = fp4pass.report(layer("fp8")).rows
    assert row.bits == 8 + 32 / K and row.weight_error < 0.03
    (row,) = fp4pass.report(layer("fp8_block")).rows
    assert row.bits == 8 + 32 * 4 / (N * K)


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp8"])
def test_gptq_is_better_on_the_outputs(scheme: str) -> None:
    torch.manual_seed(0)
    mixing, errors = torch.randn(192, 192) / 8, {}
    for method in ("hessian", "gptq"):
        model = fp4pass.prepare(nn.Sequential(nn.Linear(192, 96)), method, fmt=scheme)
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
        model(normal(600, 192) @ mixing)
        model = fp4pass.convert(model, weight_only=True, progress=False)
        (row,) = fp4pass.report(model).rows
        errors[method] = row.output_error
    assert errors["gptq"] < 0.95 * errors["hessian"]


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match=r"chooses 8-bit block scales, and those of fp8 are"):
        LinearConfig("fp8", Hessian(codes="joint"))
    with pytest.raises(OptionError, match=r"a float32 scale for a row. Call fp4pass.quantize"):
        fp4pass.functional.quantize_blocks(normal(4, 16), "fp8")
    model = layer("fp8")
    with pytest.raises(OptionError, match="No layer can learn"):
        trainable(model, nn.Sequential(nn.Linear(K, N)))


def test_options_that_float_scales_lack_are_settled() -> None:
    config = LinearConfig("fp8", "naive", activation_scales="sse", compute="fp8")
    assert (config.activation_scales, config.compute) == ("naive", "input")
    assert fp4pass.set_compute(layer("fp8"), "fp8")[0].config.compute == "input"


@pytest.mark.parametrize(
    ("scheme", "shape", "kind", "why"),
    [
        ("fp8", (6, 10), RowLinear, ""),
        ("fp8_block", (256, 256), RowLinear, ""),
        ("fp8_block", (384, 256), ColumnLinear, "out_features=384 is not a multiple of 2 ranks x"),
        ("fp8_block", (256, 192), RowLinear, "128 .the block of fp8_block"),
    ],
)
def test_a_split_cuts_no_tile(scheme: str, shape: Any, kind: Any, why: str) -> None:
    n, k = shape
    model = fp4pass.convert(nn.Sequential(nn.Linear(k, n)), scheme, "naive", progress=False)
    if not why:
        require_whole_blocks("x", model[0], kind, 2)
        return
    with pytest.raises(ShapeError, match=why):
        require_whole_blocks("x", model[0], kind, 2)
