"""Cases made of public bug reports: scripts beside the repository, of which each says `right`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT.parent / "shared" / "cases"

# Eight bits are not read yet.
NOT_YET = {
    "fp8_source": "its weights are FP8",
    "mixed_fp8_nvfp4_folder": "some of its layers are FP8",
}

# Faults that are being mended.
OPEN: dict[str, str] = {
    "base_model_saved": "stock transformers makes a head that the folder lacks",
    "classifier_on_causal_folder": "stock transformers makes a head that the folder lacks",
    "mtp_dropped": "tensors that the class ignores are not copied",
    "padding_in_calibration": "padding enters statistics",
    "score_heads": "heads of tasks are packed",
    "sequential_tracing": "unreached= is not followed layer by layer",
}

NAMES = sorted(path.stem for path in CASES.glob("*.py") if path.stem != "common")


def cases() -> list[object]:
    """Each script by its name; one that skips where there are none."""
    if not NAMES:
        return [pytest.param("", marks=pytest.mark.skip(f"there is no {CASES}"))]
    known = NOT_YET | OPEN
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=known[name], strict=True))
        if name in known
        else name
        for name in NAMES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_a_case_is_right(name: str, tmp_path: Path) -> None:
    """In a process of its own: a case may end it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(CASES / f"{name}.py")]
    options = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path}
    done = subprocess.run(command, timeout=600, **options)
    last = done.stdout.strip().rpartition("\n")[2]
    assert last == "right", f"{last}\n{done.stderr[-2000:]}"


def test_what_is_not_yet_right_is_there() -> None:
    assert not NAMES or (NOT_YET | OPEN).keys() <= set(NAMES)
