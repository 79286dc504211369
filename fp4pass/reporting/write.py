"""A page, its JSON and its pictures as files, each of them whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import OptionError
from .facts import gather
from .pictures import PICTURES, draw, require_matplotlib
from .render import render


def write_report(
    source: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    name: str = "",
    reference: nn.Module | str | os.PathLike[str] | None = None,
    reference_name: str = "",
    evaluations: Sequence[Mapping[str, Any]] = (),
    pictures: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a page about a quantized model, with its numbers as JSON and its charts as PNG beside.

    source: a converted model, or a folder with packed weights. path: of the page, such as
    report.html. reference: the float model or its folder. evaluations: what was measured on texts,
    as `Evaluation.row` makes them. name, reference_name: what the page calls both.
    Returns what is in the JSON. Raises OptionError if a file is in the way or a package is missing,
    CheckpointError or StateError for a source that is not quantized.
    """
    page = Path(path)
    require_free(page, pictures, overwrite)
    data = gather(
        source,
        name=name,
        reference=reference,
        reference_name=reference_name,
        evaluations=evaluations,
        progress=progress,
    )
    write_page(data, page, pictures)
    return data


def require_free(page: Path, pictures: bool, overwrite: bool) -> None:
    """Raise OptionError for what would stop a page after hours of work."""
    if pictures:
        require_matplotlib()
    if page.suffix not in (".html", ".htm"):
        raise OptionError(f"The page is {page}; a name that ends in .html is wanted.")
    there = [path for path in files_of(page, pictures) if path.exists()]
    folders = [path for path in there if path.is_dir()]
    if folders:
        raise OptionError(f"{folders[0]} is a folder. Choose another name for the page.")
    if there and not overwrite:
        raise OptionError(
            f"{', '.join(map(str, there))} exists. Choose another name, or pass overwrite=True "
            "(--overwrite) to replace it."
        )


def files_of(page: Path, pictures: bool) -> list[Path]:
    """The files that a page has, or could have."""
    names = [f"{page.stem}-{picture}.png" for picture in PICTURES] if pictures else []
    return [page, page.with_suffix(".json"), *(page.with_name(name) for name in names)]


def write_page(data: Mapping[str, Any], page: Path, pictures: bool) -> list[Path]:
    """Write the files of what `gather` found; their paths.

    Nothing gets its name before all of it is made. Pictures of an earlier page, of which this one
    has none, go.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    makers: dict[Path, Callable[[Path], None]] = {
        page.with_suffix(".json"): lambda path: _write(path, json.dumps(data, indent=2) + "\n"),
        page: lambda path: _write(path, render(data)),
    }
    if pictures:
        for name in draw_names(data):
            makers[page.with_name(f"{page.stem}-{name}.png")] = _picture(data, name)
    token = secrets.token_hex(4)
    made = {path: path.with_name(f".{path.name}.fp4pass-new-{token}") for path in makers}
    try:
        for path, make in makers.items():
            make(made[path])
        for path in set(files_of(page, pictures)) - set(makers):
            path.unlink(missing_ok=True)
        for path, new in made.items():
            os.replace(new, path)
    except BaseException:
        for new in made.values():
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
        raise
    return list(makers)


def draw_names(data: Mapping[str, Any]) -> list[str]:
    """The pictures that there are numbers for."""
    return [name for name, wanted in PICTURES.items() if wanted(data)]


def _picture(data: Mapping[str, Any], name: str) -> Callable[[Path], None]:
    return lambda path: draw(data, name, path)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
