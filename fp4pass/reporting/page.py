"""Write a report as a page, one HTML file that needs no network, with its numbers as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import CheckpointError, OptionError, as_option, expected
from . import charts
from .data import gather
from .models import Source
from .text import DASH, calibrated_on, measures, scored, verdict, written


def write_report(
    source: Source,
    path: str | os.PathLike[str],
    *,
    name: str = "",
    reference: Source | None = None,
    reference_name: str = "",
    evaluations: Sequence[Mapping[str, Any]] = (),
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a page about a quantized model, with its numbers as JSON beside it.

    Args:
        source: a converted model, or a folder with packed weights.
        path: of the page, such as report.html.
        name: what the page calls the model.
        reference: the float model or its folder.
        reference_name: what the page calls that.
        evaluations: what was measured on texts, as `Evaluation.row` returns it.
        overwrite: whether to replace files that exist.
        progress: as for `convert`.

    Returns:
        The content of the JSON.

    Raises:
        OptionError: a file is in the way, or the reference has none of the layers.
        CheckpointError: the folder has no packed weights, or the page cannot be written.
        StateError: the model is not converted.

    Example:
        >>> model = fp4pass.convert(model, "nvfp4a16", "sse")
        >>> data = fp4pass.reporting.write_report(model, "report.html", progress=False)
        >>> sorted(path.name for path in Path().iterdir())
        ['report.html', 'report.json']
    """
    page = Path(path)
    require_free(page, overwrite)
    data = gather(
        source,
        name=name,
        reference=reference,
        reference_name=reference_name,
        evaluations=evaluations,
        progress=progress,
    )
    write_page(data, page)
    return data


def require_free(page: Path, overwrite: bool) -> None:
    """Raise OptionError for all that would stop `write_page` after hours of work."""
    if page.suffix not in (".html", ".htm"):
        raise OptionError(expected("path", "a name that ends in .html", str(page)))
    there = [path for path in (page, page.with_suffix(".json")) if path.exists()]
    folders = [path for path in there if path.is_dir()]
    if folders:
        raise OptionError(f"{folders[0]} is a folder. Choose another name for the page.")
    if there and not overwrite:
        raise OptionError(
            f"{', '.join(map(str, there))} exists. Choose another name, or pass "
            f"{as_option('overwrite', True)} to replace it."
        )


def write_page(data: Mapping[str, Any], page: Path) -> Path:
    """Write the page and the JSON beside it, whole or not at all; return the path of the JSON."""
    numbers = page.with_suffix(".json")
    texts = {numbers: json.dumps(data, indent=2) + "\n", page: render(data)}
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{page.name}.fp4pass-new-", dir=page.parent) as new:
            for path, text in texts.items():
                Path(new, path.name).write_text(text, encoding="utf-8")
            for path in texts:
                os.replace(Path(new, path.name), path)
    except OSError as error:
        raise CheckpointError(
            f"{page} cannot be written: {error}. Make room, or choose another path."
        ) from error
    return numbers


def render(data: Mapping[str, Any]) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("fp4pass.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = written
    sides = dict.fromkeys(("rows", "columns", "method"))
    rows = [
        {
            **sides,
            **layer,
            **dict(zip(("rows", "columns"), layer["shape"], strict=False)),
            "bits": layer["bits"] or None,
        }
        for layer in data["layers"]
    ]
    return environment.get_template("page.html").render(
        data=data,
        rows=rows,
        sizes=[{**part, "parameters": part["parameters"] or None} for part in data["sizes"]],
        outside=[data["layers"][index] for index in data["outside"]],
        measures=measures,
        scored=scored,
        verdict=verdict,
        calibrated_on=calibrated_on,
        charts={
            "layers": charts.layers(data),
            "scales": charts.scales(data),
        },
        dash=DASH,
        colors=charts.COLORS,
        # As a file that `quantize --rules` reads.
        recipe_text="" if data["recipe"] is None else json.dumps(data["recipe"], indent=2),
    )
