"""A folder is replaced whole or not at all, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from small_models import TINY, Packed, assert_same_bits, mlp, packed_model

import fp4pass
from fp4pass.errors import CheckpointError, StateError


def test_files_are_as_open_as_others(tmp_path: Path) -> None:
    fp4pass.save(packed_model(mlp()), tmp_path / "q")
    modes = {path.stat().st_mode for path in (tmp_path / "q").iterdir()}
    assert len(modes) == 1


@pytest.mark.core
def test_save_needs_a_converted_model_and_a_free_folder(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="convert"):
        fp4pass.save(mlp(), tmp_path / "q")
    model = packed_model(mlp())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        fp4pass.save(model, tmp_path / "other")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        fp4pass.save(model, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"
    fp4pass.save(model, tmp_path / "q")
    with pytest.raises(CheckpointError, match="not empty"):
        fp4pass.save(model, tmp_path / "q")
    other = packed_model(mlp(seed=5))
    fp4pass.save(other, tmp_path / "q", overwrite=True)
    assert_same_bits(other, fp4pass.load(tmp_path / "q", model=mlp()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "q"]


SAVE_AND_DIE = """
    import os, shutil, sys
    import torch
    from torch import nn
    import fp4pass
    from fp4pass.checkpoint import saving
    from fp4pass.checkpoint import source_files as files

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))
    fp4pass.convert(model, "nvfp4", "naive", weight_only=True)
    steps = 0

    def deadly(function, at):
        def step(*args, **kwargs):
            global steps
            steps += 1
            if steps == at:
                os._exit(9)
            return function(*args, **kwargs)
        return step

    for at, target in enumerate(sys.argv[1:], start=1):
        child = os.fork()
        if child == 0:
            os.rename, os.fsync = deadly(os.rename, at), deadly(os.fsync, at)
            os.open, shutil.rmtree = deadly(os.open, at), deadly(shutil.rmtree, at)
            saving.save_file = deadly(saving.save_file, at)
            files.write_json = deadly(files.write_json, at)
            fp4pass.save(model, target, overwrite=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Each run dies before another of the calls that touch the disk; the last ones live."""
    old = packed_model(mlp(), method="naive")
    new = packed_model(mlp(seed=7), method="naive")
    targets = [tmp_path / f"run{at}" / "q" for at in range(20)]
    for target in targets:
        fp4pass.save(old, target)
    command = [sys.executable, "-c", textwrap.dedent(SAVE_AND_DIE), *map(str, targets)]
    codes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert codes[:8] == ["9"] * 8 and codes[-1] == "0", codes
    interrupted = 0
    for code, target in zip(codes, targets, strict=True):
        if target.exists():
            found = fp4pass.load(target, model=mlp())
        else:
            with pytest.raises(CheckpointError, match="interrupted") as error:
                fp4pass.load(target, model=mlp())
            whole = [p for p in target.parent.iterdir() if str(p) in str(error.value)]
            found = fp4pass.load(whole[0], model=mlp())
            interrupted += 1
        packed = found[0].weight_packed
        expected = (new,) if code == "0" else (old, new)
        assert any(torch.equal(packed, m[0].weight_packed) for m in expected)
    assert interrupted


def test_a_link_stays_and_what_cannot_be_renamed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed_model(mlp())
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for overwrite in (False, True):
        fp4pass.save(model, link, overwrite=overwrite)
        assert link.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
        assert_same_bits(fp4pass.load(link, model=mlp()), model)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="current folder"):
        fp4pass.save(model, ".")


@pytest.mark.core
def test_a_failed_rename_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, rename = packed_model(mlp()), packed_model(mlp(seed=5)), os.rename
    fp4pass.save(old, tmp_path / "q")

    def fail(source: Path, target: Path) -> None:
        if "-new-" in Path(source).name:
            raise OSError("no space left")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match=r"q cannot be written: no space left"):
        fp4pass.save(new, tmp_path / "q", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    assert_same_bits(fp4pass.load(tmp_path / "q", model=mlp()), old)


FULL = {
    "safetensors": ("fp4pass.checkpoint.saving.save_file", SafetensorError("disk full")),
    "configs": ("fp4pass.checkpoint.source_files.write_json", OSError(28, "disk full")),
    "tokenizers": ("transformers.PreTrainedTokenizerBase.save_pretrained", Exception("disk full")),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: Packed, what: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    target, error = FULL[what]

    def full(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(target, full)
    with pytest.raises(CheckpointError, match=r"q cannot be written: .*disk full"):
        fp4pass.save(packed(), tmp_path / "q", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.core
def test_what_a_killed_save_left_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = packed_model(mlp())
    fp4pass.save(model, tmp_path / "q")
    (tmp_path / "q").rename(tmp_path / ".q.fp4pass-old-00000000")
    with pytest.raises(CheckpointError, match=r"left whole checkpoints at .*q.fp4pass-old-0"):
        fp4pass.load(tmp_path / "q", model=mlp())
    fp4pass.save(model, tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"left .q.fp4pass-old-00000000 beside it"):
        fp4pass.save(model, tmp_path / "q")
    fp4pass.save(model, tmp_path / "q", overwrite=True)
    assert ".q.fp4pass-old-00000000 is of a save that was killed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".q.fp4pass-old-00000000", "q"]


def test_circles_and_long_names_are_errors(tmp_path: Path) -> None:
    model = packed_model(mlp())
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for folder, message in (
        (tmp_path / "a", "circle of links"),
        (tmp_path / ("n" * 240), "too long"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fp4pass.save(model, folder)
        with pytest.raises(CheckpointError, match="is not a folder"):
            fp4pass.load(folder, model=mlp())
