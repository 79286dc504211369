"""gptq and the options of hessian, from prepare to the report."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from blocks import HESSIANS, VARIANTS
from torch import Tensor, nn

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.errors import CalibrationError, NonFiniteError, OptionError, ShapeError
from fp4pass.kernels.statistics.naive import diagonal_blocks, ieee_products
from fp4pass.methods import METHODS, Gptq, Hessian, Stats, certify
from fp4pass.quantization.observers.observer import OBSERVERS, Observer, collect

K = 96


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 48)).to(dtype).eval()


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(K, K, generator=generator) * 0.95 ** torch.arange(K).view(K, 1)
    return [torch.randn(200, K, generator=generator) @ mix for _ in range(count)]


def converted(method: Any = "gptq", prepared: Any = None, **options: Any) -> Any:
    model = fp4pass.prepare(mlp(), prepared or method)
    fp4pass.calibrate(model, batches(), progress=False)
    return fp4pass.convert(model, method=method, weight_only=True, **options)


def output_errors(model: nn.Module) -> list[float]:
    errors = [row.output_error for row in fp4pass.report(model).converted]
    return [error for error in errors if error is not None]


@pytest.mark.quick(1)
@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
def test_the_output_is_nearer_than_with_scales_alone(fmt: Any) -> None:
    x = batches(1)[0]
    off: dict[str, float] = {}
    for method in ("hessian", Hessian(codes="joint"), Gptq(sweeps=0), "gptq"):
        model = converted(method, fmt=fmt.name, block=fmt.block)
        with torch.no_grad():
            quantized, original = model[0](x), mlp()[0](x)
        off[str(method)] = float((quantized - original).norm() / original.norm())
    hessian, joint, once, gptq = off.values()
    assert gptq < once < 0.8 * joint and joint < hessian


def test_the_report_has_the_error_of_the_calibration_inputs() -> None:
    """With the whole Hessian nothing is predicted: it is |W x - Q x| / |W x| on what was seen."""
    x = torch.cat(batches()).double()
    for method, prepared in (("gptq", None), ("hessian", "gptq"), ("sse", "gptq")):
        model = converted(method, prepared)
        w, q = mlp()[0].weight.detach().double(), model[0].weight.double()
        expected = float((x @ (w - q).t()).norm() / (x @ w.t()).norm())
        assert output_errors(model)[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.core
def test_what_is_collected() -> None:
    model = fp4pass.prepare(mlp(), "gptq")
    fp4pass.calibrate(model, batches(), progress=False)
    stats = collect([model[0]], "0").matrix(0)
    x = torch.cat(batches())
    exact = x.double().t() @ x.double()
    assert stats.hessian is not None and stats.block_hessian is not None
    size = exact.diagonal().sqrt()
    assert ((stats.hessian - exact).abs() <= 1e-5 * torch.outer(size, size)).all()
    assert torch.equal(diagonal_blocks(stats.hessian), stats.block_hessian)
    assert stats.block_hessian.shape == (3, 32, 32) and stats.tokens == 600
    assert stats.input_amax == x.abs().max()
    holders = [nn.Module(), nn.Module()]
    for holder in holders:
        observer = Observer(("hessian",), K)
        observer(x)
        holder.__dict__[OBSERVERS] = (observer,)
    once, twice = (collect(holders[:n], "0").matrix(0).hessian for n in (1, 2))
    assert once is not None and twice is not None and torch.equal(twice, 2 * once)


def test_the_precision_of_products_is_put_back() -> None:
    cuda, precision = torch.backends.cuda.matmul, "high"
    before = torch.get_float32_matmul_precision()
    cuda.allow_fp16_accumulation = True
    torch.set_float32_matmul_precision(precision)
    try:
        with ieee_products():
            assert cuda.fp32_precision == "ieee" and not cuda.allow_fp16_accumulation
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == precision
        assert cuda.allow_fp16_accumulation
    finally:
        cuda.allow_fp16_accumulation = False
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Gptq, {"damping": 0}, "damping: expected a number above 0, got 0"),
        (Gptq, {"damping": math.inf}, "got inf"),
        (Gptq, {"sweeps": -1}, r"sweeps: expected 0, 1, 2, \.\.\., got -1"),
        (Hessian, {"exact": 1}, "exact: expected True or False, got 1"),
        (Hessian, {"node_budget": 0}, r"node_budget: expected 1, 2, \.\.\., got 0"),
        (Hessian, {"codes": "jiont"}, "Did you mean 'joint'"),
    ],
)
def test_options_that_do_not_exist(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("hessian", "error", "message"),
    [
        (None, ShapeError, r"The Hessian: expected shape \(32, 32\), got None"),
        (torch.eye(16), ShapeError, r"expected shape \(32, 32\).* got \(16, 16\)"),
        (torch.full((32, 32), math.nan), NonFiniteError, "NaN or infinity"),
        (torch.eye(32) - 0.1, CalibrationError, "negative eigenvalues"),
    ],
)
def test_hessians_that_do_not_fit(
    hessian: Tensor | None, error: type[Exception], message: str
) -> None:
    weight, fmt = torch.randn(4, 32), get_format("nvfp4")
    with pytest.raises(error, match=message):
        METHODS["gptq"].function(weight, Stats(None, 1, 1.0, hessian), fmt, 1.0, Gptq())


def test_the_certificate_is_in_the_report() -> None:
    options = Hessian(exact=True, node_budget=1 << 10)
    model = converted(options)
    rows = fp4pass.report(model).converted
    for row in rows:
        assert row.proved is not None and 0 < row.proved <= 1
        assert row.gap is not None and 0 <= row.gap < 1
    read = fp4pass.Report.from_dict(fp4pass.report(model).to_dict())
    assert read == fp4pass.report(model)
    joint = fp4pass.report(converted(Hessian(codes="joint"))).converted
    assert all(row.proved is None and row.gap is None for row in joint)
    for row, base in zip(rows, joint, strict=True):
        assert row.output_error is not None and base.output_error is not None
        assert row.output_error <= base.output_error * (1 + 1e-6)


def test_certify() -> None:
    """What any method made can be certified; the loss it says is that of the weight it gives."""
    weight = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    hessian, fmt = HESSIANS["mild"]()[:1], get_format("nvfp4")
    g = fmt.global_scale_for(weight.abs().max().item())
    stats = Stats(hessian, 100, 1.0)
    naive = METHODS["naive"].function(weight, stats, fmt, g, METHODS["naive"].options())
    less, few = certify(weight, naive, hessian, 10)
    best, most = certify(weight, naive, hessian, 1 << 15)
    assert few.proved <= most.proved == 1 and most.gap == 0 < few.gap
    assert (few.loss >= most.loss).all() and (few.bound <= most.loss * (1 + 1e-9)).all()
    again, same = certify(weight, best, hessian, 1 << 15)
    assert torch.equal(again.qdata, best.qdata) and torch.equal(again.scale, best.scale)
    torch.testing.assert_close(same.loss, most.loss, rtol=1e-12, atol=0)
    assert less.shape == naive.shape and less.global_scale == g
    exact = METHODS["hessian"].function(
        weight, stats, fmt, g, Hessian(exact=True, node_budget=1 << 15)
    )
    _, certificate = exact
    assert certificate.proved == 1
    torch.testing.assert_close(certificate.loss, most.loss, rtol=2e-9, atol=0)
