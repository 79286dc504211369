"""error_metrics against the norms in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fp4pass import functional as F
from fp4pass.errors import DtypeError, ShapeError


@pytest.mark.core
@pytest.mark.parametrize("shape", [(6, 48), (6, 3, 16)])
def test_metrics_are_the_norms(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(shape, generator=generator)
    W_dq = W + torch.randn(shape, generator=generator) * 1e-3
    X = torch.randn(5, 20, 48, generator=generator)
    off, dense = (t.double().flatten(1) for t in (W_dq - W, W))
    tokens = X.double().flatten(0, 1)
    wanted = {
        "weight_error": off.norm(),
        "weight_error_pct": 100 * off.norm() / dense.norm(),
        "output_error": (tokens @ off.T).norm(),
        "output_error_pct": 100 * (tokens @ off.T).norm() / (tokens @ dense.T).norm(),
    }
    found = F.error_metrics(W, W_dq, X)
    assert list(found) == list(wanted)
    assert list(F.error_metrics(W, W_dq)) == list(wanted)[:2]
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-6)
    monkeypatch.setattr(F, "_CHUNK", 48 * 7)
    assert F.error_metrics(W, W_dq, X) == pytest.approx(found, rel=1e-6)
    rounded_inputs = F.error_metrics(W, W_dq, X.bfloat16())
    assert rounded_inputs == F.error_metrics(W, W_dq, X.bfloat16().float())
    assert F.error_metrics(W, W, X) == dict.fromkeys(wanted, 0.0)
    zero = F.error_metrics(torch.zeros(shape), W, X)
    assert zero["weight_error_pct"] == zero["output_error_pct"] == math.inf
    assert F.error_metrics(torch.zeros(2, 3), torch.zeros(2, 3))["weight_error_pct"] == 0.0


def test_metrics_of_float64_are_in_float64() -> None:
    W = torch.ones(3, 4, dtype=torch.float64)
    assert F.error_metrics(W, W + 1e-12)["weight_error"] == pytest.approx(12**0.5 * 1e-12, rel=1e-3)


@pytest.mark.core
def test_errors_say_what_was_expected() -> None:
    W = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"of one shape.*got \(2, 3\) and \(3, 2\)"):
        F.error_metrics(W, torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"inputs of shape \[\.\.\., 3\].*got \(4, 2\)"):
        F.error_metrics(W, W, torch.ones(4, 2))
    for tensors in ((W.int(), W), (W, W.int()), (W, W, W.int())):
        with pytest.raises(DtypeError, match=r"got torch\.int32"):
            F.error_metrics(*tensors)
