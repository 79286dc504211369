"""The loss of distillation: KL divergence of the student's next tokens from the teacher's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError

# Logits that are compared at once in float32: 64 MB.
_CHUNK = 1 << 24


class _Kl(torch.autograd.Function):
    """KL in chunks of tokens, whose gradient is computed with it, in the dtype of the logits."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, learns: bool) -> Tensor:
        rows, vocabulary = student.shape
        size = max(1, _CHUNK // vocabulary)
        grad = torch.empty_like(student) if learns else student.new_empty(rows, 0)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for own, other, out in zip(
            student.split(size), teacher.split(size), grad.split(size), strict=True
        ):
            log_q, log_p = own.float().log_softmax(-1), other.float().log_softmax(-1)
            p = log_p.exp()
            # A token that the teacher rules out (logit -inf) adds nothing.
            total += torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dtype=torch.float64)
            if learns:
                out.copy_((log_q.exp() - p) / rows)
        ctx.save_for_backward(grad)
        return (total / rows).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None


def kl_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student), the mean over tokens: a float32 scalar with a gradient.

    Args:
        student: logits [..., vocabulary].
        teacher: logits of the same shape; no gradient flows to them.

    Raises:
        ShapeError: the shapes differ, as those of two vocabularies do.

    Example:
        >>> logits = torch.randn(2, 5, 40)
        >>> fp4pass.lab.learning.kl_loss(logits, logits)
        tensor(0.)
    """
    if student.shape != teacher.shape:
        raise ShapeError(
            f"The teacher has logits {tuple(teacher.shape)}: expected {tuple(student.shape)}, "
            "those of the student. Give the model that was converted."
        )
    learns = student.requires_grad and torch.is_grad_enabled()
    found: Tensor = _Kl.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2), learns)
    return found
