"""Write a report, its JSON and its pictures as files, each of them whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..core.files import path_of
from ..errors import CheckpointError, OptionError, as_option, expected
from . import charts, figures
from .data import gather
from .source import Source
from .text import DASH, calibrated_on, measures, scored, verdict, written


def write_report(
    source: Source,
    path: str | os.PathLike[str],
    *,
    name: str = "",
    reference: Source | None = None,
    reference_name: str = "",
    evaluations: Sequence[Mapping[str, Any]] = (),
    pictures: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a page about a quantized model, with its numbers as JSON and its charts as PNG beside.

    Args:
        source: a converted model, or a folder with packed weights.
        path: of the page, such as report.html.
        name: what the page calls the model.
        reference: the float model or its folder.
        reference_name: what the page calls that.
        evaluations: what was measured on texts, as `Evaluation.row` returns it.
        pictures: whether to write PNG files, too.
        overwrite: whether to replace files that exist.
        progress: as for `convert`.

    Returns:
        The content of the JSON.

    Raises:
        OptionError: a file is in the way, matplotlib is missing, or an argument is of another type.
        CheckpointError: the folder has no packed weights, or the page cannot be written.
        StateError: the model is not converted.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> options = {"pictures": False, "progress": False}
        >>> data = fp4pass.reporting.write_report(model, "report.html", **options)
        >>> sorted(path.name for path in Path().iterdir())
        ['report.html', 'report.json']
    """
    page = path_of(path, "path")
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
    """Raise OptionError for all that would stop `write_page` after hours of work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("Reports need matplotlib, which is missing: pip install 'fp4pass[cli]'.")
    if page.suffix not in (".html", ".htm"):
        raise OptionError(expected("path", "a name that ends in .html", str(page)))
    there = [path for path in _files(page, pictures) if path.exists()]
    folders = [path for path in there if path.is_dir()]
    if folders:
        raise OptionError(f"{folders[0]} is a folder. Choose another name for the page.")
    if there and not overwrite:
        raise OptionError(
            f"{', '.join(map(str, there))} exists. Choose another name, or pass "
            f"{as_option('overwrite', True)} to replace it."
        )


def write_page(data: Mapping[str, Any], page: Path, pictures: bool) -> list[Path]:
    """Write the page and the files beside it, named after it, and return their paths.

    Errors of the disk become a CheckpointError.
    """
    text = json.dumps(data, indent=2) + "\n"
    makers: dict[Path, Callable[[Path], object]] = {
        page.with_suffix(".json"): lambda path: path.write_text(text, encoding="utf-8"),
        page: lambda path: path.write_text(render(data), encoding="utf-8"),
    }
    for name, panels in figures.FIGURES.items():
        if pictures and panels(data):
            makers[_picture(page, name)] = partial(figures.draw, data, name)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{page.name}.fp4pass-new-", dir=page.parent) as new:
            for path, make in makers.items():
                make(Path(new, path.name))
            # Pictures of an earlier page that this one does not have.
            for path in set(_files(page, pictures)) - set(makers):
                path.unlink(missing_ok=True)
            for path in makers:
                os.replace(Path(new, path.name), path)
    except OSError as error:
        raise CheckpointError(
            f"{page} cannot be written: {error}. Make room, or choose another path."
        ) from error
    return list(makers)


def _files(page: Path, pictures: bool) -> list[Path]:
    """Return the files that a page can have."""
    drawn = [_picture(page, name) for name in figures.FIGURES if pictures]
    return [page, page.with_suffix(".json"), *drawn]


def _picture(page: Path, name: str) -> Path:
    return page.with_name(f"{page.stem}-{name}.png")


def render(data: Mapping[str, Any]) -> str:
    """Return the page, one HTML file that needs no network and no scripts."""
    environment = Environment(
        loader=PackageLoader("fp4pass.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = written
    page = environment.get_template("page.html")
    drawn: dict[str, Any] = {name: _svgs(data, name) for name in figures.FIGURES}
    drawn["perplexity"] = [
        _svgs({"evaluations": [row]}, "perplexity", str(i))
        for i, row in enumerate(data["evaluations"])
    ]
    return page.render(
        data=data,
        measures=measures,
        scored=scored,
        verdict=verdict,
        calibrated_on=calibrated_on,
        charts=drawn,
        dash=DASH,
        colors=charts.PAGE_COLORS,
        # As a file that `quantize --rules` reads.
        recipe_text="" if data["recipe"] is None else json.dumps(data["recipe"], indent=2),
    )


def _svgs(data: Mapping[str, Any], name: str, salt: str = "") -> list[Markup]:
    panels = figures.FIGURES[name](data)
    return [Markup(charts.svg(panel, f"{name}{salt}-{i}")) for i, panel in enumerate(panels)]
