"""Cases made of public bug reports: scripts beside the repository, of which each says `right`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT.parent / "shared" / "cases"

# What is not right yet, and why.
NOT_YET = {
    # Both end in transformers' `_init_weights`, as docs/readers.md says.
    "base_model_saved": "stock transformers makes a head that the folder lacks",
    "classifier_on_causal_folder": "stock transformers makes a head that the folder lacks",
}

NAMES = sorted(path.stem for path in CASES.glob("*.py") if path.stem != "common")


@pytest.mark.slow
@pytest.mark.skipif(not NAMES, reason=f"there is no {CASES}")
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_right(name: str, tmp_path: Path) -> None:
    """In a process of its own: a case may end it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(CASES / f"{name}.py")]
    options = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path}
    done = subprocess.run(command, timeout=600, **options)
    last = done.stdout.strip().rpartition("\n")[2]
    assert (last == "right") is (name not in NOT_YET), f"{last}\n{done.stderr[-2000:]}"
