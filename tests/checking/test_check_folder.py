"""Folders are judged alone: each damage is found and named, and nothing is found in good ones."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from damages import DAMAGES
from good_folders import GOOD

from fp4pass.checking import KINDS, check_folder, repair_folder

for package in ("transformers", "compressed_tensors", "typer", "rich"):
    pytest.importorskip(package)

# How a folder of ours names all that its checksums tell apart.
SUMS = {"checksum", "tensor-missing"}

Good = Callable[[str], Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """A good folder by its name, made once; not to be changed."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("good") / name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[name] = GOOD[name](folder)
        return made[name]

    return get


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_found_in_good_folders(good: Good, name: str) -> None:
    found = check_folder(good(name), progress=False)
    assert found.findings == () and found.layers and not found.not_judged


def damaged(good: Good, tmp_path: Path, damage: str, name: str) -> Path | None:
    """A damaged copy of a good folder, None where it does not have what is damaged."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good(name), folder)
    return folder if DAMAGES[damage].act(folder) else None


def check_damage(good: Good, tmp_path: Path, damage: str, name: str) -> bool:
    folder = damaged(good, tmp_path, damage, name)
    if folder is None:
        return False
    found = check_folder(folder, progress=False)
    kinds = {each.kind for each in found.findings}
    assert DAMAGES[damage].kind in kinds, (damage, name, kinds)
    if DAMAGES[damage].mended and found.findings and not kinds & SUMS:
        out = tmp_path / "mended"
        shutil.rmtree(out, ignore_errors=True)
        mended = repair_folder(folder, out, progress=False)
        assert mended.after is not None, (damage, name, mended.refused)
        assert mended.after.findings == () and mended.mended, (damage, name)
    return True


# Of random weights the order of codes cannot be told.
RANDOM = ("ours_mixture", "gpt_oss")
ORDER = ("codes-order", "rows-order", "scale-order")


def names_for(damage: str) -> list[str]:
    return [n for n in GOOD if DAMAGES[damage].kind not in ORDER or n not in RANDOM]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found_and_named(good: Good, tmp_path: Path, damage: str) -> None:
    """In one folder of those that can have it, another one for each damage."""
    names = names_for(damage)
    start = list(DAMAGES).index(damage) % len(names)
    assert any(check_damage(good, tmp_path, damage, n) for n in names[start:] + names[:start])


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found_in_every_folder(good: Good, tmp_path: Path, damage: str) -> None:
    assert sum(check_damage(good, tmp_path, damage, name) for name in names_for(damage))


def test_every_kind_is_planted_or_told_apart() -> None:
    planted = {each.kind for each in DAMAGES.values()}
    others = {"checksum", "fused-schemes", "input-direction", "cache-scale"}
    assert planted | others == set(KINDS)
