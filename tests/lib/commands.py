"""Commands of `fp4pass` in this process, and folders that they look into."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import TINY

CALIB, EVAL = TINY / "calib.txt", TINY / "eval.txt"
PLAIN = ("--method", "sse", "--weight-only")
CALIBRATED = ("--data", CALIB, "--samples", 4, "--seq-len", 64)


def run(*args: object, code: int | None = 0) -> Any:
    """A command; its output and errors apart."""
    from fp4pass.cli import app

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = app.run([str(arg) for arg in args])
    result = SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue(), exit_code=found)
    result.output = result.stdout + result.stderr
    assert code in (found, None), result.output
    return result


def run_json(*args: object, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


def make_folders(folder: Path) -> Path:
    """`mixed` needs no calibration, `inputs` quantizes inputs."""
    rules = folder / "rules.yaml"
    rules.write_text('- "*.down_proj": {fmt: mxfp4a16}\n- "model.layers.0.*": null\n')
    run("quantize", TINY, "-o", folder / "mixed", *PLAIN, "--rules", rules)
    run("quantize", TINY, "-o", folder / "inputs", "--scheme", "nvfp4", *CALIBRATED)
    return folder


@contextmanager
def no_network() -> Iterator[None]:
    """Without asking a hub, and with the loudness of transformers as it was."""
    import huggingface_hub.constants
    import transformers

    verbosity = transformers.logging.get_verbosity()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
