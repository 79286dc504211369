"""KL and its gradient, against those of PyTorch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fp4pass.errors import ShapeError
from fp4pass.lab.learning import kl_loss, loss


@pytest.mark.parametrize("chunk", [1 << 24, 64])
def test_kl_and_its_gradient(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    student = (3 * torch.randn(2, 5, 31, generator=generator)).requires_grad_()
    teacher = (3 * torch.randn(2, 5, 31, generator=generator)).requires_grad_()
    found = kl_loss(student, teacher)
    (2 * found).backward()
    exact = student.detach().double().requires_grad_()
    logs = [each.log_softmax(-1).flatten(0, 1) for each in (exact, teacher.detach().double())]
    expected = F.kl_div(*logs, reduction="batchmean", log_target=True)
    (2 * expected).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(student.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)
    assert teacher.grad is None


def test_a_token_that_the_teacher_rules_out_adds_nothing() -> None:
    student = torch.zeros(1, 3, requires_grad=True)
    found = kl_loss(student, torch.tensor([[0.0, 0.0, -math.inf]]))
    found.backward()
    assert found.item() == pytest.approx(math.log(3 / 2))
    assert torch.allclose(student.grad, torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]))


def test_the_gradient_has_the_dtype_of_the_logits() -> None:
    student = torch.randn(4, 9).bfloat16().requires_grad_()
    kl_loss(student, torch.randn(4, 9)).backward()
    assert student.grad.dtype == torch.bfloat16


def test_another_vocabulary_is_an_error() -> None:
    with pytest.raises(ShapeError, match=r"logits \(2, 5\): expected \(2, 4\), those of the stud"):
        kl_loss(torch.zeros(2, 4), torch.zeros(2, 5))
