"""Uploading a folder: what a hub is asked for, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import converted

import fp4pass
from fp4pass.errors import CheckpointError, OptionError

huggingface_hub = pytest.importorskip("huggingface_hub")


class Hub:
    """Notes what it is asked for, in place of `HfApi`."""

    calls: list[tuple[Any, ...]]
    fails = ""

    def __init__(self, token: str | None = None, **library: str) -> None:
        self.calls.append(("token", token))

    def _note(self, name: str, *facts: Any) -> None:
        if self.fails == name:
            raise ConnectionError("no route.\nmore")
        self.calls.append((name, *facts))

    def whoami(self) -> None:
        self._note("whoami")

    def create_repo(self, name: str, *, private: bool | None, exist_ok: bool) -> Any:
        self._note("create_repo", name, private, exist_ok)
        return SimpleNamespace(repo_id=f"me/{name.rpartition('/')[2]}")

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        files = sorted(path.name for path in Path(folder_path).iterdir())
        self._note("upload_folder", repo_id, Path(folder_path), files)
        assert fp4pass.__version__ in commit_message


@pytest.fixture(scope="module")
def model() -> Any:
    return converted()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    made = type("FakeHub", (Hub,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", made)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "own")
    return made


def test_a_folder_is_written_and_then_uploaded_whole(
    model: Any, tmp_path: Path, hub: type[Hub]
) -> None:
    folder = tmp_path / "q"
    fp4pass.save(model, folder, card=True, push_to_hub="me/tiny", private=True, token="t")
    *_, made, sent = hub.calls
    assert [call[0] for call in hub.calls] == [
        *("token", "whoami", "token", "create_repo", "upload_folder")
    ]
    assert {call for call in hub.calls if call[0] == "token"} == {("token", "t")}
    assert made == ("create_repo", "me/tiny", True, True)
    assert sent == ("upload_folder", "me/tiny", folder, sorted(p.name for p in folder.iterdir()))
    page = (folder / "README.md").read_text()
    assert "# tiny\n" in page
    assert 'fp4pass.load(snapshot_download("me/tiny"))' in page and "vllm serve me/tiny" in page


def test_nothing_is_written_without_a_login(
    model: Any, tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(CheckpointError, match=r"no token .* Run `hf auth login`, or set HF_TOKEN"):
        fp4pass.save(model, tmp_path / "q", push_to_hub="me/tiny")
    assert not (tmp_path / "q").exists() and not hub.calls


def test_a_folder_that_cannot_be_uploaded_is_whole(
    model: Any, tmp_path: Path, hub: type[Hub]
) -> None:
    hub.fails = "upload_folder"
    with pytest.raises(CheckpointError, match="The folder is whole: upload it with `hf upload me/"):
        fp4pass.save(model, tmp_path / "q", push_to_hub="me/tiny")
    assert fp4pass.load(tmp_path / "q") is not None


@pytest.mark.parametrize("name", ["a b", "a/b/c"])
def test_what_is_no_name_of_a_repository_is_refused(model: Any, tmp_path: Path, name: Any) -> None:
    with pytest.raises(OptionError, match=r"push_to_hub: expected the name of a repository, as"):
        fp4pass.save(model, tmp_path / "q", push_to_hub=name)
    assert not (tmp_path / "q").exists()


def test_a_streamed_model_is_not_begun_without_a_login(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(CheckpointError, match="hf auth login"):
        fp4pass.quantize_checkpoint(
            "no folder", tmp_path / "q", "nvfp4a16", "sse", push_to_hub="me/tiny"
        )
