"""Data by the name of a file, a folder or a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from calibration.readers import TURNS, tokenizer

import fp4pass
from fp4pass.calibration import batches
from fp4pass.calibration.rows import open_source, read_text
from fp4pass.errors import CalibrationError, CheckpointError, OptionError
from fp4pass.evaluation import token_windows

pytest.importorskip("datasets")

pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.core
def test_texts_of_files_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [json.dumps({"id": i, "text": f"row {i}"}) for i in range(3)]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "test.jsonl").write_text("\n".join(rows[1:]) + "\n")
    (tmp_path / "plain.txt").write_text("one\n<|doc|>\ntwo")
    line = "\n<|doc|>\n"
    assert read_text(str(tmp_path / "plain.txt")) == "one\n<|doc|>\ntwo"
    assert read_text(str(folder / "test.jsonl")) == f"row 1{line}row 2"
    assert read_text(str(folder)) == line.join(f"row {i}" for i in range(3))
    assert read_text(f"{folder}:test") == f"row 1{line}row 2"
    assert read_text(f"{folder}:default:test") == f"row 1{line}row 2"
    # Only as much as is wanted, with room to spread.
    long = "\n".join(json.dumps({"body": "x" * 100}) for _ in range(9))
    (folder / "train.jsonl").write_text(long)
    assert read_text(str(folder), tokens=10).count("x") == 200
    (folder / "train.jsonl").write_text('{"id": 3}')
    (folder / "test.jsonl").unlink()
    with pytest.raises(fp4pass.Fp4PassError, match=r"row 0: expected columns .*, got id \(int\)"):
        read_text(str(folder))


def test_what_is_taken_of_lines_is_spread_over_the_file(tmp_path: Path) -> None:
    rows = ["a" * 99] * 50 + ["b" * 99] * 50
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    found = open_source(str(path)).documents(tokens=60)
    assert sum(each.text[0] == "b" for each in found) == len(found) // 2 > 2


def test_tables_are_read_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the text of the file, in which a row is JSON."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_dict({"id": ["a", "b"], "text": ["one é", "two"]})
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "one é"}, {"text": "two"}]))
    wanted = batches(["one é", "two"], tokenizer())
    for suffix in ("csv", "parquet", "json"):
        path = tmp_path / f"rows.{suffix}"
        assert read_text(str(path)) == "one é\n<|doc|>\ntwo"
        assert torch.equal(batches(path, tokenizer())[0], wanted[0])
    table.rename_column("text", "body").to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(CalibrationError, match=r"got id \(str\), body \(str\)\. Looked for"):
        read_text(str(tmp_path / "rows.parquet"))


def test_chats_of_files_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table have None where a message lacks what others have."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    call = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
    chats = [TURNS, [{"role": "assistant", "content": "", "tool_calls": [call]}], TURNS[1:]]
    rows = [{"id": i, "messages": chat} for i, chat in enumerate(chats)]
    wanted = batches(chats, tokenizer())
    table = datasets.Dataset.from_list(rows)
    assert table[0]["messages"][0]["tool_calls"] is None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    table.to_parquet(tmp_path / "rows.parquet")
    splits = datasets.DatasetDict(test=table.select([0]), train=table)
    files = [tmp_path / name for name in ("rows.jsonl", "rows.json", "rows.parquet")]
    sets = (table, table.to_iterable_dataset(), splits, table["messages"], iter(rows))
    for data in (*files, *sets):
        assert torch.equal(batches(data, tokenizer())[0], wanted[0]), data
    # For measuring they are texts, each behind bos once.
    text = read_text(str(tmp_path / "rows.jsonl"), tokenizer=tokenizer())
    assert text.split("\n<|doc|>\n")[0].startswith("system: be brief\nuser: how")
    first = token_windows(tokenizer(), text, window=16)[0]
    assert torch.equal(first, wanted[0][0, :16])


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_token_ids_of_datasets(kind: str | None) -> None:
    import datasets

    rows = {"text": ["a", "b"], "input_ids": [[5, 6, 7], [8, 9, 10]]}
    data = datasets.Dataset.from_dict(rows).with_format(kind)
    assert batches(data, seq_len=3)[0].tolist() == rows["input_ids"]


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"none\.jsonl does not exist"):
        batches("none.jsonl", tokenizer())
    with pytest.raises(CheckpointError, match="nodata: there is no such file or folder here"):
        batches("nodata", tokenizer())
    path = tmp_path / "rows.parquet"
    path.touch()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OptionError, match=r"parquet is read by datasets, .*: pip install datasets"):
        batches(path, tokenizer())


@pytest.mark.core
@pytest.mark.parametrize("name", ["calib.txt", "my text.txt"])
def test_a_path_is_a_path_and_other_words_are_a_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("a list\n<|doc|>\nof words", encoding="utf-8")
    wanted = batches(["a list", "of words"], tokenizer())
    for data in (name, Path(name), tmp_path / name):
        assert torch.equal(batches(data, tokenizer())[0], wanted[0])
    assert torch.equal(
        batches("a list of words", tokenizer())[0], batches(["a list of words"], tokenizer())[0]
    )
    with pytest.raises(OptionError, match=r"your text\.txt does not exist"):
        batches("your text.txt", tokenizer())
