"""Formats beside nvfp4 and mxfp4, by tables and brute force that share no code with the library."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from blocks import ALL
from torch import Tensor, nn

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import pack_codes, unpack_codes
from fp4pass.errors import OptionError, ShapeError

# One of each kind of element, and of each kind of scale.
NAMES = ("nvfp4_ue5m3", "int8", "mxfp6_e3m2", "mxfp8")
OTHERS = [fmt for fmt in ALL if fmt.name in NAMES]
every_other = pytest.mark.parametrize("fmt", OTHERS, ids=lambda fmt: fmt.key)


def floats(exponent_bits: int, mantissa_bits: int, bias: int) -> Tensor:
    """All values of an unsigned binary float with subnormals, float64, by their bits."""
    exponent, fraction = torch.meshgrid(
        torch.arange(1 << exponent_bits), torch.arange(1 << mantissa_bits), indexing="ij"
    )
    normal = (1 + fraction / (1 << mantissa_bits)) * 2.0 ** (exponent.double() - bias)
    subnormal = fraction.double() / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    return torch.where(exponent == 0, subnormal, normal).flatten()


def of_torch(dtype: torch.dtype) -> Tensor:
    """The finite values of an 8-bit float of torch that are not negative, ascending."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()]


MAGNITUDES = {
    "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64),
    "int8": torch.arange(128).double(),
    "e3m2": floats(3, 2, 3),
    "e4m3": of_torch(torch.float8_e4m3fn),
}
SCALES = {
    "e4m3": of_torch(torch.float8_e4m3fn)[1:],
    "e8m0": 2.0 ** (torch.arange(1, 255).double() - 127),
    "ue5m3": floats(5, 3, 15)[1:255],
}
# Of the elements and the scales of each format, as its specification has them.
PARTS = {
    "nvfp4_ue5m3": ("e2m1", "ue5m3", 4),
    "int8": ("int8", "e4m3", 8),
    "mxfp6_e3m2": ("e3m2", "e8m0", 6),
    "mxfp8": ("e4m3", "e8m0", 8),
}


def rounded(quotient: Tensor, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes without sign and values nearest to float32 quotients, ties to the even code."""
    y = quotient.abs().double().clamp(max=magnitudes[-1].item())
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    index = torch.bucketize(y, middles)
    tie = (index < len(middles)) & (y == middles[index.clamp(max=len(middles) - 1)])
    index = index + (tie & (index % 2 == 1))
    return index, magnitudes[index] * quotient.sign()


def residuals(x: Tensor, fmt: Format, global_scale: float) -> Tensor:
    """x - RTN(x) in float64 [S, ...] at every scale."""
    element, scale, _ = PARTS[fmt.name]
    steps = (SCALES[scale] * global_scale).float()
    found = []
    for step in steps:
        _, values = rounded(x / step, MAGNITUDES[element])
        found.append(x.double() - values * step.double())
    return torch.stack(found)


def weights(rows: int = 6, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(rows, columns, generator=generator)
    weight = normal / (torch.rand(rows, columns, generator=generator) + 0.05)
    weight[0] = 0
    weight[1] *= 1e-4
    weight[2] = weight[2].sign() * 7
    return weight


def dequantized(packed: Tensor, scale: Tensor, global_scale: float, fmt: Format) -> Tensor:
    """By the law, in float64."""
    element, scales, bits = PARTS[fmt.name]
    code = unpack_codes(packed, bits).long()
    half = 1 << (bits - 1)
    values = MAGNITUDES[element][code % half] * torch.where(code < half, 1, -1)
    step = SCALES[scales][scale.long() - 1] * global_scale
    return values * step.repeat_interleave(fmt.block, -1)


@every_other
def test_tables_are_those_of_the_specification(fmt: Format) -> None:
    element, scale, bits = PARTS[fmt.name]
    assert list(fmt.element.magnitudes) == MAGNITUDES[element].tolist()
    assert list(fmt.scale.values) == SCALES[scale].tolist()
    assert fmt.element.bits == bits and fmt.bits_per_weight((2, 256)) == bits + 8 / fmt.block
    assert fmt.element.minifloat is not None


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_lie_in_their_bytes_one_after_the_other(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (5, 3, 24), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, 3, 24 * bits // 8)
    for row, stored in zip(codes.flatten(0, 1).tolist(), packed.flatten(0, 1), strict=True):
        number = sum(code << bits * i for i, code in enumerate(row))
        assert number.to_bytes(24 * bits // 8, "little") == bytes(stored.tolist())
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_packing_says_what_it_wants() -> None:
    with pytest.raises(ShapeError, match=r"a multiple of 4 columns.*got 6"):
        pack_codes(torch.zeros(6, dtype=torch.uint8), 6)
    with pytest.raises(ShapeError, match=r"a multiple of 3 bytes.*got 4"):
        unpack_codes(torch.zeros(4, dtype=torch.uint8), 6)
    with pytest.raises(OptionError, match="Codes of 5 bits have no packing; choose 4, 6 or 8"):
        pack_codes(torch.zeros(8, dtype=torch.uint8), 5)


@pytest.mark.parametrize("objective", ["naive", "sse", "hessian"])
@every_other
def test_the_search_finds_the_best_of_all_scales(fmt: Format, objective: str) -> None:
    weight = weights()
    g = fmt.global_scale_for(weight.abs().max().item())
    if objective == "hessian" and fmt.block > 32:
        with pytest.raises(OptionError, match=f"blocks of {fmt.block}; calibration collects"):
            fp4pass.prepare(nn.Linear(256, 4), rules=[("", {"fmt": fmt.name, "block": fmt.block})])
        return
    hessian = None
    if objective == "hessian":
        root = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(5))
        hessian = root @ root.mT
    packed, scale = ops.search(weight, hessian, g, fmt.key, objective)
    dense = ops.dequantize(packed, scale, torch.tensor([1 / g]), fmt.key, torch.float32)
    assert torch.equal(dense.double(), dequantized(packed, scale, g, fmt))
    found = (weight.double() - dense.double()).view(len(weight), -1, fmt.block)
    if objective == "naive":
        amax = weight.view(len(weight), -1, fmt.block).abs().amax(-1)
        element, scales, _ = PARTS[fmt.name]
        largest = MAGNITUDES[element][-1].item()
        if scales == "e8m0":
            exponent = torch.frexp(amax).exponent - math.frexp(largest)[1]
            wanted = (exponent + 127).clamp(1, 254)
        else:
            distance = (SCALES[scales] - (amax / (largest * g)).double().unsqueeze(-1)).abs()
            nearest = distance == distance.amin(-1, keepdim=True)
            byte = torch.arange(1, 1 + len(SCALES[scales]))
            # The even byte of two that are as near.
            wanted = torch.where(nearest, byte % 2 * 1000 + byte, 1 << 20).argmin(-1) + 1
        assert torch.equal(scale.long()[amax > 0], wanted.long()[amax > 0])
        return
    grid = residuals(weight, fmt, g).view(-1, *found.shape)
    if hessian is None:
        least, chosen = grid.square().sum(-1).amin(0), found.square().sum(-1)
    else:
        split = [hessian[:, i : i + fmt.block, i : i + fmt.block] for i in range(0, 32, fmt.block)]
        metric = torch.stack(split, 1).flatten(0, 1).double()
        least = torch.einsum("srji,jik,srjk->srj", grid, metric, grid).amin(0)
        chosen = torch.einsum("rji,jik,rjk->rj", found, metric, found)
    assert (chosen <= least * (1 + 1e-6)).all()


@every_other
def test_activations_have_naive_scales_and_nearest_codes(fmt: Format) -> None:
    x = weights()
    element, scales, bits = PARTS[fmt.name]
    g = fmt.global_scale_for(x.abs().max().item())
    divisor = torch.tensor([1 / g]) if fmt.has_global_scale else None
    packed, scale = ops.quantize(x, divisor, fmt.key)
    step = (SCALES[scales][scale.long() - 1] * g).float().repeat_interleave(fmt.block, -1)
    index, _ = rounded(x / step, MAGNITUDES[element])
    codes = index + (torch.signbit(x).long() << (bits - 1))
    amax = x.view(len(x), -1, fmt.block).abs().amax(-1).repeat_interleave(fmt.block, -1)
    assert torch.equal(unpack_codes(packed, bits).long()[amax > 0], codes[amax > 0])
    if scales == "e8m0":
        # The least power of two at which amax is nearer to the largest element than to the next.
        top = MAGNITUDES[element]
        limit = (2 * top[-1] - top[-2]).item() / 2 + top[-1].item() / 2
        assert (amax < step.double() * limit).all() and (
            amax[amax > 0] * 2 >= limit * step[amax > 0]
        ).all()


@pytest.mark.parametrize("weight_only", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_converts_saves_and_loads(name: str, weight_only: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    x = torch.randn(8, 64)
    key = get_format(name).key
    with torch.no_grad():
        fp4pass.prepare(model, "sse")
        model(x)
        fp4pass.convert(model, name, "sse", weight_only=weight_only)
        y = model(x)
        dense = x
        for layer in model:
            if isinstance(layer, nn.ReLU):
                dense = layer(dense)
                continue
            if not weight_only:
                quantized = ops.quantize(dense, layer.input_global_scale, key)
                dense = ops.dequantize(*quantized, layer.input_global_scale, key, torch.float32)
            dense = nn.functional.linear(dense, layer.weight, layer.bias)
        assert torch.equal(dense, y)
    fp4pass.save(model, tmp_path / "out")
    skeleton = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    loaded = fp4pass.load(tmp_path / "out", model=skeleton)
    with torch.no_grad():
        assert torch.equal(loaded(x), y)
