"""A machine without FP4 tensor cores, and what is said of it."""

from __future__ import annotations

import pytest

from fp4pass.record.rows import say_once

NOTE = (
    "Scheme nvfp4 also quantizes inputs, for FP4 tensor cores, which this machine lacks. "
    "Without them, scheme nvfp4a16 is faster and more accurate."
)


@pytest.fixture(autouse=True)
def without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no GPU, in a process that has said nothing yet."""
    monkeypatch.setattr("torch.version.cuda", None)
    say_once.cache_clear()
