"""Folders with packed weights, for reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import no_network
from small_models import language_model, tokens

import fp4pass


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mixed` has two formats and skipped layers, `inputs` was calibrated, `theirs` says least."""
    folder = tmp_path_factory.mktemp("folders")
    rules = [("*.down_proj", {"fmt": "mxfp4a16"}), ("model.layers.0.*", None)]
    with no_network():
        mixed = fp4pass.convert(language_model(), method="sse", weight_only=True, rules=rules)
        fp4pass.save(mixed, folder / "mixed")
        model = fp4pass.prepare(language_model())
        fp4pass.calibrate(model, [tokens()], progress=False)
        fp4pass.convert(model)
        for name in ("inputs", "theirs"):
            fp4pass.save(model, folder / name)
    (folder / "theirs" / "fp4pass.json").unlink()
    return folder
