"""Files of packed layers that become files of the checkpoint."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_models import assert_same_bits, language_model

import fp4pass
from fp4pass.checkpoint import open_checkpoint
from fp4pass.record.state import get_state

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("layers")
    model = language_model()
    return fp4pass.convert(model, method="naive", weight_only=True, stream=folder)


def taken(model: Any, folder: Path, **options: Any) -> int:
    """Save a model; how many of its files are in the checkpoint. It is as the model is."""
    fp4pass.save(model, folder, **options)
    assert_same_bits(fp4pass.load(folder), model)
    state = get_state(model)
    assert state is not None
    files = {file.path.stat().st_ino for file in state.files if file.path.exists()}
    return len(files & {path.stat().st_ino for path in folder.glob("*.safetensors")})


def test_they_are_taken_where_the_layout_has_them_so(streamed: Any, tmp_path: Path) -> None:
    assert taken(streamed, tmp_path / "a") == 4
    assert taken(streamed, tmp_path / "b", layout="modelopt") == 0
    assert taken(streamed, tmp_path / "c", max_shard_size="100KB") == 0
    # All that can read the one reads the other: no name and no checksum differs.
    sums = [open_checkpoint(tmp_path / each).own["tensors"] for each in ("a", "c")]
    assert sums[0] == sums[1]


def test_a_layer_that_is_skipped_whole_has_no_file(tmp_path: Path) -> None:
    rules = [("model.layers.1.*", None)]
    options: dict[str, Any] = {"method": "naive", "weight_only": True, "rules": rules}
    model = fp4pass.convert(language_model(), stream=tmp_path / "layers", **options)
    assert taken(model, tmp_path / "q") == 3


@pytest.mark.core
def test_not_what_was_changed(streamed: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(streamed)
    model.model.layers[1].mlp.up_proj.weight_packed[0, 0] ^= 1
    model.model.layers[2].mlp.down_proj.weight_packed = model.model.layers[
        2
    ].mlp.down_proj.weight_packed.clone()
    assert taken(model, tmp_path / "q") <= 2
    files = [file.path for file in get_state(streamed).files]
    before = files[0].read_bytes()
    # Another file in its place, or none.
    shutil.copy(files[0], tmp_path / "copy")
    (tmp_path / "copy").rename(files[0])
    files[1].unlink()
    try:
        assert taken(streamed, tmp_path / "r") == 2
    finally:
        files[0].write_bytes(before)


def test_a_disk_without_links(
    streamed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", none)
    fp4pass.save(streamed, tmp_path / "q")
    assert_same_bits(fp4pass.load(tmp_path / "q"), streamed)
