"""What every test of a kernel runs under."""

from __future__ import annotations

import pytest
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without values is NaN, or all ones."""
    empty = Tensor.new_empty

    def filled(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = empty(self, *args, **kwargs)  # type: ignore[arg-type]
        if out.is_floating_point():
            return out.fill_(float("nan"))
        return out.fill_(-1 if out.dtype.is_signed else 255)

    monkeypatch.setattr(Tensor, "new_empty", filled)
