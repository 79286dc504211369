"""What every test runs under."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

# Kernels run in Triton's interpreter where there is no GPU; it reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The tests are many and small; threads cost them more than they bring.
torch.set_num_threads(1)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without values is all ones, which is NaN in a float."""
    empty = Tensor.new_empty

    def filled(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = empty(self, *args, **kwargs)  # type: ignore[arg-type]
        out.view(torch.uint8).fill_(255)
        return out

    monkeypatch.setattr(Tensor, "new_empty", filled)
