"""Options as type checkers see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp4pass.record.config import OPTIONS, LinearOptions, SchemeOptions

CALLS = """
import torch
import fp4pass

model = torch.nn.Linear(32, 32)
fp4pass.prepare(model, fmt="nvfp4", rotation=16)
fp4pass.convert(model, "nvfp4a16", "sse", rules=[("x", None)], weight_only=True, block=32)
fp4pass.allocate(model, bits=5.0, compute="fp8")
fp4pass.quantize_checkpoint("a", "b", unreached="skip")

fp4pass.convert(3)
fp4pass.convert(model, nonsense=True)
fp4pass.prepare(model, block="16")
fp4pass.allocate(model, bits=5.0, fmt="nvfp4")
fp4pass.quantize_checkpoint("a", "b", nonsense=True)
"""


def test_the_typed_options_are_those_of_a_layer() -> None:
    names = {each.name for each in OPTIONS}
    assert set(SchemeOptions.__annotations__) | {"method"} == names
    assert set(LinearOptions.__annotations__) == names - {"fmt", "method"}


@pytest.mark.slow
def test_mypy_sees_every_option(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    lines = [int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line]
    first = CALLS.splitlines().index("fp4pass.convert(3)") + 1
    assert lines == list(range(first, first + 5)), found.stdout
