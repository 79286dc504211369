"""Folders that many tests read, written once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from small_models import Packed, Saved, converted

import fp4pass


@pytest.fixture(scope="session")
def packed() -> Packed:
    """The tiny language model, converted as `small_models.converted` does; not to be changed."""
    models: dict[tuple[str, bool], Any] = {}

    def get(fmt: str = "nvfp4", weight_only: bool = True) -> Any:
        key = (fmt, weight_only)
        if key not in models:
            models[key] = converted(fmt, weight_only)
        return models[key]

    return get


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, packed: Packed) -> Saved:
    """The folder of such a model in a layout; not to be changed."""
    folders: dict[tuple[str, bool, str], Path] = {}

    def get(
        fmt: str = "nvfp4", weight_only: bool = True, layout: str = "compressed-tensors"
    ) -> Path:
        key = (fmt, weight_only, layout)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("saved") / "q"
            fp4pass.save(packed(fmt, weight_only), folders[key], layout=layout)
        return folders[key]

    return get


@pytest.fixture
def foreign_copy(saved: Saved, tmp_path: Path) -> Saved:
    """A copy of such a folder without fp4pass.json, as another library would have written it."""

    def get(*args: Any, **options: Any) -> Path:
        folder = tmp_path / "q"
        shutil.copytree(saved(*args, **options), folder)
        (folder / "fp4pass.json").unlink()
        return folder

    return get
