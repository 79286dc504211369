"""Write a report as a page, one HTML file that needs no network, with its numbers as JSON."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import CheckpointError, OptionError, as_option, expected
from .data import Source, gather
from .text import DASH, ERRORS, calibrated_on, measures, scored, verdict, written

# The palette of Okabe and Ito, which readers who see fewer colors can tell apart, and cividis.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_CIVIDIS = ((0, 34, 78), (67, 78, 108), (125, 124, 120), (188, 174, 108), (254, 232, 56))

# The colors of a map span at least this share of its middle: errors that are closer to each other,
# as those of one method in all layers of a model, get nearly one color.
_LEAST_RANGE = 0.2


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
    rows = []
    for layer in data["layers"]:
        n, k = [*layer["shape"], None, None][:2]
        facts = {"rows": n, "columns": k, "bits": layer["bits"] or None}
        rows.append({"method": None, **layer, **facts})
    return environment.get_template("page.html").render(
        data=data,
        rows=rows,
        sizes=[{**part, "parameters": part["parameters"] or None} for part in data["sizes"]],
        outside=[data["layers"][index] for index in data["outside"]],
        measures=measures,
        scored=scored,
        verdict=verdict,
        calibrated_on=calibrated_on,
        maps=[*_maps(data)],
        dash=DASH,
        colors=_COLORS,
        # As a file that `quantize --rules` reads.
        recipe_text="" if data["recipe"] is None else json.dumps(data["recipe"], indent=2),
    )


def _maps(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a table of colored cells for each stack and error, and of bits where they differ."""
    kinds = [(key, f"{name}, %", 100) for key, name in ERRORS.items()]
    if len({group["bits"] for group in data["groups"]}) > 1:
        kinds.append(("bits", "bits per weight", 1))
    for found, (key, title, factor) in itertools.product(data["maps"], kinds):
        # Projections by depth: a number, "" for a skipped layer, None for none.
        cells = [
            [cell and ("" if cell[key] is None else factor * cell[key]) for cell in row]
            for row in zip(*found["cells"], strict=True)
        ]
        numbers = [each for row in cells for each in row if isinstance(each, float)]
        if numbers:
            name = title if len(data["maps"]) == 1 else f"{found['stack']}: {title}"
            ends = _color_ends(min(numbers), max(numbers))
            shown = [[_cell(each, *ends) for each in row] for row in cells]
            names = short_names(found["projections"])
            yield {
                "title": name,
                "depths": found["depths"],
                "rows": list(zip(names, shown, strict=True)),
            }


def _cell(value: float | str | None, low: float, high: float) -> tuple[str, str]:
    """Return the text and the style of a cell."""
    if not isinstance(value, float):
        return (DASH if value == "" else ""), ""
    # Cividis, from the smallest number to the largest.
    place = (value - low) / (high - low) * (len(_CIVIDIS) - 1)
    index = min(int(place), len(_CIVIDIS) - 2)
    pairs = zip(_CIVIDIS[index], _CIVIDIS[index + 1], strict=True)
    color = "#" + "".join(f"{round(a + (b - a) * (place - index)):02x}" for a, b in pairs)
    ink = "white" if value < (low + high) / 2 else "black"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}", f"background: {color}; color: {ink}"


def _color_ends(low: float, high: float) -> tuple[float, float]:
    """Return the numbers of the first and the last color, at least `_LEAST_RANGE` apart."""
    middle = (low + high) / 2
    reach = max(high - low, _LEAST_RANGE * middle) / 2 or 1.0
    return middle - reach, middle + reach


def short_names(projections: Sequence[str]) -> list[str]:
    """Return the last words of each projection, as few as tell it from all others."""
    names = []
    for name in projections:
        words = name.split(".")
        for count in range(1, len(words) + 1):
            end = words[-count:]
            if sum(other.split(".")[-count:] == end for other in projections) == 1:
                break
        names.append(".".join(end))
    return names
