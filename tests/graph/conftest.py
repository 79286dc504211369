"""What tests of passes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from post_grad import fresh


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """No caches and no passes of before, and no gradients."""
    with fresh(), torch.no_grad():
        yield
