"""fp4pass inspect: what is in a folder with packed weights, or how far two folders are apart."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Argument, Exit, Option

from ..doctor.check import check_basics
from ..errors import OptionError, some
from ..reporting.compare import compare_folders
from ..reporting.data import gather
from ..reporting.text import calibrated_on, size
from . import screen
from .verify import opened

_BAR, _YAML_WIDTH = 40, 200


def inspect(
    folder: Annotated[Path, Argument(help="A folder with packed weights.", metavar="DIR")],
    other: Annotated[
        Path | None, Argument(help="Another folder, packed or float.", metavar="OTHER")
    ] = None,
    fail_above: Annotated[
        float | None,
        Option(
            help="With OTHER: exit with 1 if a relative difference is larger, or if only one of "
            "them has a tensor."
        ),
    ] = None,
    as_json: screen.Json = False,
) -> None:
    """Show the layers, sizes, block scales and recipe of a checkpoint.

    Reads every layout that fp4pass reads, of any library. Checks scales, dense tensors and names,
    and exits with 1 if one is wrong; verify also checks checksums. quantize --rules reads the JSON
    as a recipe. With OTHER, compare the weights of both folders, packed or float: |A - B| / |A| of
    every layer, formats and sizes.
    """
    if other is not None:
        _compare(folder, other, fail_above, as_json)
        return
    if fail_above is not None:
        raise OptionError("--fail-above: expected a second folder to compare with, got none.")
    stored = opened(folder, alone=True)
    wrong = check_basics(folder, whole=False)
    data = gather(stored)
    reasons = {each["name"]: each["skip_reason"] for each in data["layers"]}
    shown = "layout architecture recipe calibration versions sizes scales".split()
    found: dict[str, Any] = {
        "folder": str(folder),
        **{key: data[key] for key in shown},
        "layers": [each for each in data["layers"] if not each["skip_reason"]],
        "skipped": {n: why for n, why in reasons.items() if why},
        "mismatches": wrong,
    }
    if as_json:
        screen.print_json(found)
    else:
        _print(found)
    screen.print_mismatches(folder, wrong)


def _print(found: Mapping[str, Any]) -> None:
    what = f"{found['folder']}: {found['layout']}, {len(found['layers'])} packed layers"
    print(f"{what}, {found['architecture']}" if found["architecture"] else what)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    if versions:
        print(f"written with {versions}")
    _print_recipe(found["recipe"], found["calibration"])
    print()
    rows = [
        (
            *(row["name"], " x ".join(map(str, row["shape"])), row["label"], row["method"]),
            f"{row['bits']:.2f}",
            *(screen.percent(row[error]) for error in ("weight_error", "output_error")),
        )
        for row in found["layers"]
    ]
    header = ("layer ", "N x K", "scheme ", "method ", "bits", "W err", "out err")
    screen.print_table(header, rows)
    screen.print_reasons(found["skipped"])
    print(f"\n{size(sum(part['bytes'] for part in found['sizes']))} of tensors:")
    parts = [(p["kind"], size(p["bytes"]), f"{p['share']:.1%}") for p in found["sizes"]]
    screen.print_table(("", "size", "share"), parts)
    for scales in found["scales"]:
        _print_histogram(scales)


def _print_recipe(recipe: Mapping[str, Any] | None, calibration: Mapping[str, Any] | None) -> None:
    if recipe is None:
        print("not quantized by fp4pass: recipe and errors are unknown")
        return
    given = {key: value for key, value in recipe.items() if value is not None and value != []}
    print("recipe:")
    # As a file has it that quantize --rules reads: nested values on one line each.
    text = yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=_YAML_WIDTH)
    print(textwrap.indent(text, "  "), end="")
    if calibration:
        digest = f", sha256 {calibration['sha256'][:16]}" if "sha256" in calibration else ""
        print(f"calibrated on {calibrated_on(calibration)}{digest}")


def _print_histogram(scales: Mapping[str, Any]) -> None:
    """Print how many blocks of a format have a scale in each binade, from 2^e to below 2^(e+1)."""
    binades = {"0": scales["zero"]} if scales["zero"] else {}
    for each in scales["counts"]:
        binade = f"2^{math.frexp(each['value'])[1] - 1}"
        binades[binade] = binades.get(binade, 0) + each["blocks"]
    print(
        f"\n{scales['blocks']:,} block scales of {scales['format']} in {scales['scale']}, "
        f"{scales['distinct']} different, from {scales['min'] or 0:g} to {scales['max'] or 0:g}"
        + (f"; {scales['invalid']} of them invalid" if scales["invalid"] else "")
    )
    for binade, count in binades.items():
        bar = "#" * math.ceil(_BAR * count / max(binades.values()))
        print(f"  {binade:>6} {bar:<{_BAR}} {count / scales['blocks']:7.2%}")


def _compare(a: Path, b: Path, fail_above: float | None, as_json: bool) -> None:
    """Print how far the weights of two folders are apart."""
    found = compare_folders(a, b)
    failed: list[str] = []
    if fail_above is not None:
        layers, others = (
            [each["name"] for each in found[key] if not each["difference"] <= fail_above]
            for key in ("layers", "other")
        )
        failed = [*layers, *found["only_in_first"], *found["only_in_second"], *others]
        found["failed"] = failed
    if as_json:
        screen.print_json(found)
    else:
        _print_differences(found)
    if failed:
        screen.note(f"fp4pass: above {fail_above} or in one folder only: {some(failed, 20)}")
        raise Exit(screen.MISMATCH)


def _print_differences(found: Mapping[str, Any]) -> None:
    def shown(difference: float) -> str:
        return screen.percent(difference) if difference else "equal"

    lines = [(row["name"], *row["formats"], shown(row["difference"])) for row in found["layers"]]
    if lines:
        screen.print_table(("layer ", "A ", "B ", "difference"), lines)
    equal = found["other_tensors"] - len(found["other"])
    print(f"\nother tensors: {equal} equal, {len(found['other'])} different")
    for each in found["other"]:
        print(f"  {each['name']}: {shown(each['difference'])}")
    for key, letter in (("only_in_first", "A"), ("only_in_second", "B")):
        if found[key]:
            print(f"only in {letter}: {some(found[key])}")
    for letter, folder, count in zip("AB", found["folders"], found["bytes"], strict=True):
        print(f"{letter} = {folder}: {size(count)} of weights")
