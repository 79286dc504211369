"""Scale search against float64 brute force over every scale of the format."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import oracle
import pytest
import torch
from blocks import ALL, HESSIANS, ROWS, WEIGHTS, check_optimal, spectrum
from kernel_cases import KEYS, cases, formats, seeded
from torch import Tensor

from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.kernels.search.naive import search_naive
from fp4pass.kernels.search.reference import OBJECTIVES, search_ref

# Every weight by its squares, each Hessian with a weight that it is hard on; then, of the other
# formats, no global scale (mxfp4), another block, and both.
OPTIMAL = [
    *(("nvfp4", name, None) for name in WEIGHTS),
    ("nvfp4", "normal", "mild"),
    ("nvfp4", "heavy-tailed", "steep"),
    ("nvfp4", "adversarial", "one-channel"),
    ("nvfp4", "bfloat16", "singular"),
    ("nvfp4", "float16", "cond-1e12"),
    ("nvfp4", "float64", "identity"),
    ("nvfp4", "least", "rank-one"),
    ("nvfp4", "largest", "indefinite"),
    ("nvfp4:32", "bfloat16", None),
    ("nvfp4:32", "heavy-tailed", "one-channel"),
    ("mxfp4", "adversarial", None),
    ("mxfp4", "largest", None),
    ("mxfp4", "heavy-tailed", "steep"),
    ("mxfp4", "adversarial", "indefinite"),
    ("mxfp4:16", "least", None),
    ("mxfp4:16", "adversarial", "cond-1e12"),
    ("mxfp4:16", "least", "singular"),
]


def make(name: str) -> Tensor:
    return WEIGHTS[name](seeded(0))


@lru_cache(maxsize=1)
def all_residuals(name: str, key: str) -> Tensor:
    """Residuals [S, R, J, n] of one weight at every scale; tests that share them are adjacent."""
    fmt, weight = get_format(key), make(name)
    blocks = weight.float().view(ROWS, -1, fmt.block)
    return oracle.residuals(blocks, fmt.name, fmt.global_scale_for(weight.abs().max().item()))


@pytest.mark.parametrize(
    ("key", "name", "curvature"),
    cases(OPTIMAL, itertools.product(KEYS, WEIGHTS, [None, *HESSIANS])),
)
def test_scales_are_optimal(key: str, name: str, curvature: str | None) -> None:
    """By the sum of squares for curvature None, else by the Hessian."""
    fmt, weight = get_format(key), make(name)
    hessian = None if curvature is None else HESSIANS[curvature]()
    g = fmt.global_scale_for(weight.abs().max().item())
    objective = "sse" if hessian is None else "hessian"
    found = search_ref(weight, hessian, g, fmt, objective)
    check_optimal(weight, all_residuals(name, key), fmt, found, hessian)


@pytest.mark.core
@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.key)
def test_every_format_is_searched_by_the_definition(fmt: Format) -> None:
    weight = torch.randn(4, 2 * math.lcm(96, fmt.block), generator=seeded(0))
    g = fmt.global_scale_for(weight.abs().max().item())
    codes, scale, _ = search_naive(weight, None, g, fmt)
    packed, found = search_ref(weight, None, g, fmt, "sse")
    assert torch.equal(found.long(), scale)
    assert torch.equal(unpack_codes(packed, fmt.element.bits), codes)


@pytest.mark.core
@formats
def test_equal_errors_go_to_the_smaller_scale(fmt: Format) -> None:
    """A single non-zero element fits exactly at every scale that divides it by a magnitude."""
    weight = torch.zeros(2, 64)
    weight[0, ::16] = torch.tensor([4.0, 1.5, -3.0, 6.0])
    _, scale = search_ref(weight, None, 1.0, fmt, "sse")
    residual = oracle.residuals(weight.view(2, -1, fmt.block), fmt.name, 1.0)
    errors = oracle.errors(residual, None)
    first = (errors == errors.amin(0)).byte().argmax(0) + 1
    assert torch.equal(scale.long(), first)
    assert (scale[1] == 1).all()


@formats
@pytest.mark.parametrize("name", WEIGHTS)
def test_naive_is_its_definition(fmt: Format, name: str) -> None:
    weight = make(name)
    g = fmt.global_scale_for(weight.abs().max().item())
    packed, scale = search_ref(weight, None, g, fmt, "naive")
    amax = weight.float().abs().view(len(weight), -1, fmt.block).amax(-1)
    if fmt.has_global_scale:
        expected = (amax / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        exponent = torch.frexp(amax.double()).exponent - 3 + 127
        expected = torch.where(amax == 0, 1, exponent).clamp(1, 254).byte()
    assert torch.equal(scale, expected)
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float().repeat_interleave(fmt.block, 1)
    codes = oracle.codes(weight.float() / step).byte()
    assert torch.equal(unpack_codes(packed), codes)


ZEROS = [*(("nvfp4", c) for c in HESSIANS), ("mxfp4", "indefinite"), ("mxfp4:16", "singular")]


@pytest.mark.parametrize(("key", "curvature"), cases(ZEROS, itertools.product(KEYS, HESSIANS)))
def test_zero_blocks_take_the_smallest_scale(key: str, curvature: str) -> None:
    """Also where the Hessian is indefinite, and no bound tells scales apart."""
    fmt = get_format(key)
    weight = torch.zeros(2, 64)
    weight[1] = -0.0
    packed, scale = search_ref(weight, HESSIANS[curvature]()[:2], 1.0, fmt, "hessian")
    assert (scale == 1).all()
    assert (packed[0] == 0).all() and (packed[1] == 0x88).all()


@pytest.mark.core
def test_a_hessian_that_is_zero_means_sse() -> None:
    weight = torch.randn(8, 64, generator=seeded(0))
    fmt = FORMATS["nvfp4"]
    zero = search_ref(weight, torch.zeros(2, 32, 32), 2.0**-10, fmt, "hessian")
    sse = search_ref(weight, None, 2.0**-10, fmt, "sse")
    assert all(torch.equal(a, b) for a, b in zip(zero, sse, strict=True))


@formats
def test_tiles_and_strides_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 128, generator=seeded(0))
    hessian = spectrum(0.9)[:4]
    whole = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    strided = search_ref(weight.t().contiguous().t(), hessian, 2.0**-9, fmt, "hessian")
    monkeypatch.setattr("fp4pass.kernels.search.reference._TILE", 1000)
    monkeypatch.setattr("fp4pass.kernels.search.reference._PASS", 2000)
    tiled = search_ref(weight, hessian, 2.0**-9, fmt, "hessian")
    for other in (strided, tiled):
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("fmt", [get_format("nvfp4"), get_format("mxfp4")], ids=lambda f: f.key)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 2), (2, 1)])
def test_the_weight_is_only_read(fmt: Format, objective: str, rows: int, count: int) -> None:
    """Of one row or one block too, of which a tile in blocks could be a view."""
    columns = count * fmt.block
    weight = torch.randn(rows, columns, generator=seeded(0))
    hessian = spectrum(0.9)[: math.ceil(columns / 32)] if objective == "hessian" else None
    copies = weight.clone(), None if hessian is None else hessian.clone()
    search_ref(weight, hessian, 2.0**-9, fmt, objective)
    assert torch.equal(weight, copies[0])
    assert hessian is None or torch.equal(hessian, copies[1])
