"""What --calib reads, and the lines that say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from calibration.readers import TEMPLATE, TURNS, picture, processor, tokenizer, vision_model
from commands import run, run_json
from small_models import TINY

from fp4pass.calibration import batches

for package in ("transformers", "datasets", "typer", "rich", "yaml"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")

QUICK = ("--scheme", "nvfp4", "--method", "naive")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The bundled model with a chat template, and a context of 64 tokens."""
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["memory", "stream"])
def test_chats_of_a_file(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    chats = [TURNS, TURNS[1:], [*TURNS, *TURNS[1:]]]
    data = jsonl(tmp_path / "chats.jsonl", [{"id": 1, "messages": chat} for chat in chats])
    command = ("quantize", source, "-o", tmp_path / "q", *QUICK, "--data", data, *options)
    lines = run(*command).stderr
    assert f"fp4pass: {data}: reads messages, of id, messages.\n" in lines
    assert "fp4pass: windows have 64 tokens, the context of the model, and not 512.\n" in lines
    (made,) = batches(chats, tokenizer(), seq_len=64)
    count = len(made["input_ids"])
    assert f"{data} has {count} windows of up to 64 tokens, 128 were asked for.\n" in lines
    # Padding is no token.
    found = run_json("inspect", tmp_path / "q")["calibration"]
    assert found["tokens"] == int(made["attention_mask"].sum()) < made["input_ids"].numel()
    # What is asked for is refused where the default is cut.
    error = run(*command, "--seq-len", 65, "--overwrite", code=2).stderr
    assert "--seq-len is 65, but the context of the model is 64 tokens" in error


def test_texts_of_eval_may_be_chats(source: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chats.jsonl", [{"messages": TURNS * 3}] * 4)
    (row,) = run_json("eval", source, "--data", data, "--seq-len", 32)["texts"]
    assert row["unit"] == "document" and row["units"] == 4


def test_images_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    vision_model().save_pretrained(folder)
    processor().save_pretrained(folder)
    picture().save(tmp_path / "one.png")
    data = jsonl(tmp_path / "rows.jsonl", [{"image": "one.png", "text": "a list"}] * 2)
    command = ("quantize", folder, "-o", tmp_path / "q", *QUICK, "--data", data)
    result = run(*command)
    assert "reads text + image.\n" in result.stderr and "does not reach" not in result.stderr
    rows = run_json("inspect", tmp_path / "q")["layers"]
    assert any("vision_tower" in row["name"] for row in rows)
