"""Formats as data, and the rounding that follows from their tables."""

from __future__ import annotations

import dataclasses
import itertools
import math

import oracle
import pytest
import torch
from blocks import VARIANTS
from torch import Tensor

from fp4pass.core.elements import Element, Scale, element_table, scale_table
from fp4pass.core.formats import E2M1, E4M3, E8M0, FORMATS, Format, get_format
from fp4pass.errors import Fp4PassError, OptionError
from fp4pass.kernels.common.rounding import (
    naive_scale,
    round_to_codes_,
    round_to_scale,
    round_to_values_,
)

CPU = torch.device("cpu")
SCALES = {scale.name: scale for scale in (E4M3, E8M0)}

# Elements that no format uses, to test what is derived from a table.
INT4 = Element("int4", bits=4, magnitudes=tuple(float(i) for i in range(8)))
E3M2 = Element("e3m2", bits=6, magnitudes=tuple(i / 16 for i in range(8)) + tuple(
    (4 + i % 4) / 16 * 2 ** (i // 4) for i in range(4, 28)
))  # fmt: skip
NORMAL = Element("normal", bits=4, magnitudes=(0.0, 0.08, 0.17, 0.26, 0.35, 0.5, 0.69, 1.0))
ELEMENTS = {element.name: element for element in (E2M1, INT4, E3M2, NORMAL)}


def neighbours(x: Tensor) -> Tensor:
    """x and the float32 numbers next to it on both sides."""
    below = torch.nextafter(x, torch.tensor(-math.inf))
    above = torch.nextafter(x, torch.tensor(math.inf))
    return torch.cat((below, x, above))


def midpoints(element: Element) -> Tensor:
    """All places where rounding changes, exact in float32 for E2M1 and the integers."""
    return torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(element.magnitudes)])


def nearest_codes(y: Tensor, element: Element) -> Tensor:
    """Nearest magnitude by float64 distances to all of them, ties to the even code."""
    distance = (y.abs().double().unsqueeze(-1) - torch.tensor(element.magnitudes).double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    index = torch.arange(len(element.magnitudes))
    rank = torch.where(nearest, index % 2 * 1000 + index, 1 << 20)
    return rank.argmin(-1) + (torch.signbit(y).long() << (element.bits - 1))


def test_the_formats() -> None:
    assert list(FORMATS)[:2] == ["nvfp4", "mxfp4"]
    assert [f.key for f in VARIANTS] == ["nvfp4", "nvfp4:32", "mxfp4", "mxfp4:16"]
    assert [f.bits_per_weight((3, 64)) for f in VARIANTS] == [4.5, 4.25, 4.25, 4.5]


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_a_key_finds_its_format(fmt: Format) -> None:
    assert get_format(fmt.key) == fmt
    assert get_format(fmt.name, fmt.block) == fmt


def test_a_key_says_which_way_the_global_scale_goes() -> None:
    for block in (16, 32):
        fmt = get_format("nvfp4", block)
        multiplying = fmt.with_multiplier()
        assert multiplying.key == f"nvfp4:{block}:multiplier"
        assert (
            get_format(multiplying.key) == multiplying == dataclasses.replace(fmt, multiplies=True)
        )
        assert multiplying.with_multiplier(False) == fmt
        assert (fmt.global_scale_of(8.0), multiplying.global_scale_of(8.0)) == (0.125, 8.0)


def test_values_of_every_code() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = element_table(E2M1, CPU)
    assert table.tolist() == magnitudes + [-m for m in magnitudes]
    assert torch.signbit(table).tolist() == [False] * 8 + [True] * 8


def test_e4m3_bytes_are_those_of_torch() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    torch_values = stored.view(torch.float8_e4m3fn).float()
    ours = scale_table(E4M3, CPU)
    assert torch.equal(ours[:127], torch_values[:127])
    assert ours[127:].isnan().all() and torch_values[127].isnan()
    assert (E4M3.min, E4M3.max, len(E4M3.values)) == (2.0**-9, 448.0, 126)


def test_e8m0_bytes_are_those_of_torch() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    ours = scale_table(E8M0, CPU)
    assert ours[0] == 2.0**-127
    assert torch.equal(ours[:255], stored.view(torch.float8_e8m0fnu).float()[:255])
    assert torch.equal(ours[:255].double(), 2.0 ** (stored[:255].double() - 127))
    assert ours[255].isnan()
    assert (E8M0.min, E8M0.max, len(E8M0.values)) == (2.0**-126, 2.0**127, 254)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_halving_from(scale: Scale) -> None:
    values = set(scale.values)
    halved = [value / 2 in values for value in scale.values]
    assert all(halved[scale.halving_from - 1 :])
    assert not halved[scale.halving_from - 2]
    assert scale.halving_from == {"e4m3": 16, "e8m0": 2}[scale.name]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_rounding_to_scales(scale: Scale) -> None:
    """Every scale, every midpoint and one ulp to each side of both, against all distances."""
    table = torch.tensor([0.0, *scale.values], dtype=torch.float64)
    middles = ((table[1:] + table[:-1]) / 2).float()
    value = torch.cat((neighbours(middles), neighbours(table[1:].float()), torch.zeros(1)))
    value = value[value.isfinite()]
    distance = (value.double().unsqueeze(1) - table).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    wanted = torch.where(nearest, torch.arange(len(table)) % 2 * 1000, 1 << 20).argmin(1)
    assert torch.equal(round_to_scale(value, scale), wanted)
    huge = torch.tensor([3.4e38, math.inf])
    assert round_to_scale(huge, scale).tolist() == [scale.last] * 2


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_rounding_to_elements(element: Element) -> None:
    """Midpoints and one ulp to each side, both signs, zeros, and what saturates."""
    y = neighbours(torch.cat((midpoints(element), torch.tensor(element.magnitudes))))
    special = torch.tensor([0.0, 1e-45, 1e-20, element.max, 2 * element.max, 3e38, math.inf])
    random = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * element.max / 2
    y = torch.cat((y, special, random))
    y = torch.cat((y, -y))
    codes = nearest_codes(y, element)
    codes[y.abs() > element.max] = (len(element.magnitudes) - 1) + (
        torch.signbit(y[y.abs() > element.max]).long() << (element.bits - 1)
    )
    assert torch.equal(round_to_codes_(y.clone(), element).long(), codes)
    values = element_table(element, CPU)[codes]
    assert torch.equal(round_to_values_(y.clone(), element), values)


def test_ties_of_e2m1() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to_values_(ties.clone(), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert round_to_codes_(ties.clone(), E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert round_to_codes_(-ties, E2M1).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert torch.equal(oracle.codes(ties), round_to_codes_(ties.clone(), E2M1).long())


def test_what_rounds_to_zero_keeps_its_sign() -> None:
    y = torch.tensor([0.0, -0.0, 0.25, -0.25, 1e-45, -1e-45, -0.2])
    assert round_to_codes_(y.clone(), E2M1).tolist() == [0, 8, 0, 8, 0, 8, 8]


def test_minifloats_are_recognized() -> None:
    found = {name: element.minifloat for name, element in ELEMENTS.items()}
    assert found["e2m1"] == (1, 0)
    assert found["e3m2"] == (2, -2)
    assert found["normal"] is None
    mantissa_bits, min_exponent = found["int4"] or (0, 0)
    # An integer grid is one binade of subnormals and a normal one.
    assert min_exponent - mantissa_bits == 0 and mantissa_bits >= 2


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_halving_reach(element: Element) -> None:
    """Up to amax = reach * s, no block is better off at 2 s than at s; just above, one is."""
    reach = element.halving_reach
    values = torch.tensor(element.magnitudes, dtype=torch.float64)

    def error(x: Tensor, s: float) -> Tensor:
        return (x.unsqueeze(1) - s * values).abs().amin(1)

    x = torch.linspace(0, reach, 200001, dtype=torch.float64)
    assert (error(x, 1.0) <= error(x, 2.0) + 1e-12).all()
    assert error(torch.tensor([reach * 1.001]), 1.0) > error(torch.tensor([reach * 1.001]), 2.0)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(4000, 16, generator=generator, dtype=torch.float64)
    blocks *= reach / blocks.amax(1, keepdim=True)
    sums = [error(blocks.flatten(), s).square().view(4000, 16).sum(1) for s in (1.0, 2.0)]
    assert (sums[0] <= sums[1] * (1 + 1e-12)).all()


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_dead_zone(element: Element) -> None:
    zone = torch.tensor([element.dead_zone], dtype=torch.float32)
    half_code = round_to_codes_(neighbours(zone), element)
    assert half_code[0] == 0 and half_code[2] == 1


@pytest.mark.parametrize(
    ("magnitudes", "message"),
    [
        ((0.0, 1.0, 1.0, 2.0), "ascending"),
        ((0.5, 1.0, 2.0, 3.0), "ascending"),
        ((0.0, 1.0, 2.0, 3.0, 4.0), "in 2 bits beside the sign, got 5"),
    ],
)
def test_elements_are_checked(magnitudes: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Element("bad", bits=3, magnitudes=magnitudes)


@pytest.mark.parametrize("block", [16, 32])
def test_global_scale_is_the_least_power_of_two(block: int) -> None:
    fmt = get_format("nvfp4", block)
    powers = [2.0**k for k in range(-149, 128)]
    limits = [2688 * 2.0**k for k in range(-126, 116)]
    for amax in (*powers, *limits):
        up = float(torch.nextafter(torch.tensor(amax), torch.tensor(math.inf)))
        down = float(torch.nextafter(torch.tensor(amax), torch.tensor(0.0)))
        for value in (down, amax, up):
            if math.isfinite(value):
                assert fmt.global_scale_for(value) == oracle.power_of_two_for(value), value
    assert fmt.global_scale_for(2688.0) == 1.0
    assert fmt.global_scale_for(math.nextafter(2688.0, math.inf)) == 2.0


def test_global_scale_at_the_ends() -> None:
    fmt = get_format("nvfp4")
    assert fmt.global_scale_for(0.0) == 1.0
    assert fmt.global_scale_for(1e-45) == 2.0**-126
    assert fmt.global_scale_for(torch.finfo(torch.float32).max) == 2.0**117
    assert fmt.global_scale_for(1e300) == 2.0**126
    assert get_format("mxfp4").global_scale_for(1e30) == 1.0
    for amax in (math.nan, math.inf, -1.0):
        with pytest.raises(OptionError, match="finite and not negative"):
            fmt.global_scale_for(amax)


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_naive_scales_at_the_ends(fmt: Format) -> None:
    largest = torch.finfo(torch.float32).max
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, largest])
    byte = naive_scale(amax, 1.0, fmt.element, fmt.scale)
    assert byte[:2].tolist() == [1, 1]
    assert byte[3] == (fmt.scale.last if fmt.has_global_scale else 127 + 125)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nvpf4", "'nvfp4'"),
        ("mxfp", "'mxfp8'"),
        ("nvfp4:x", "'nvfp4'"),
        ("nvfp4:16:multiply", "'nvfp4'"),
        ("nvfp4:multiplier", "'nvfp4"),
        ("mxfp4:32:multiplier", "'mxfp4'"),
    ],
)
def test_an_unknown_format_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=rf"Format '{name}' does not exist\. Did you mean {hint}"):
        get_format(name)


@pytest.mark.parametrize("name", ["zzz", None, 4, ""])
def test_an_unknown_format_names_all(name: object) -> None:
    with pytest.raises(Fp4PassError, match=r"Known: fp8, fp8_block, .*nvint4\."):
        get_format(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [24, 8, 64, "16", None, "defalt", 0, -16])
def test_a_block_that_the_format_lacks(block: object) -> None:
    with pytest.raises(OptionError, match=r"'nvfp4' has no block of .*\(16, 32\), or 'default'"):
        get_format("nvfp4", block)  # type: ignore[arg-type]


def test_records_are_told_apart_by_hash_and_text() -> None:
    """Kernels are looked up by both."""
    records = [get_format(f.name, block) for f in FORMATS.values() for block in f.blocks]
    records += [record.with_multiplier() for record in records]
    for record in records:
        copy = dataclasses.replace(record)
        assert copy == record and hash(copy) == hash(record) and repr(copy) == repr(record)
        for other in (dataclasses.replace(record, block=8), *(r for r in records if r != record)):
            assert hash(other) != hash(record) and repr(other) != repr(record)
        assert repr(record.scale) in repr(record) and repr(record.element) in repr(record)
    assert get_format("nvfp4") is FORMATS["nvfp4"]
