"""The page of steps: from the JSON alone, up to date, and right about what helps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from eval.test_results_page import NUMBER, ROOT
from made_up import ABOUT, value

pytest.importorskip("transformers")

RESULTS = ROOT / "eval" / "results" / "steps"


@pytest.fixture(scope="module")
def page(script: Any) -> Any:
    """eval/steps_page.py."""
    return script("steps_page")


@pytest.fixture(scope="module")
def written() -> str:
    return (ROOT / "docs" / "steps.md").read_text("utf-8")


def test_page_is_up_to_date(page: Any, written: str) -> None:
    assert written == page.page(page.load(RESULTS)), (
        "docs/steps.md is not that of eval/results/steps. Run python eval/steps_page.py."
    )


def test_readme_agrees(page: Any) -> None:
    """Its table of more than a method alone: the steps for weights only, and for W4A4."""
    steps = [
        ("nvfp4", None, "gptq, sse inputs"),
        ("nvfp4", "gptq, cross target", "cross target, sse inputs"),
        ("mxfp4", "gptq, rotation 64", "gptq, rotation 64"),
        ("mxfp4", "cross target, rotation 64", "cross target, rotation 64, sse inputs"),
    ]
    found = page.load(RESULTS)["doclm-qwen3-17m"]
    rows = {(row["format"], row["weight_only"], row["method"]): row for row in found["rows"]}
    expected = []
    for fmt, *names in steps:
        cells = [fmt]
        for name, weight_only in zip(names, (True, False), strict=True):
            if name is None:
                cells += ["-", "-"]
            else:
                here = rows[fmt, weight_only, name]["texts"]["eval"]
                cells += [f"{here['perplexity']['value']:.3f}", f"{here['kl']['value']:.4f}"]
        expected.append(cells)
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"^\| (\w+) \| `.+ \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", readme, re.M)
    assert [list(line) for line in lines] == expected


def test_pictures_are_there(written: str) -> None:
    pictures = set(re.findall(r"!\[[^]]+\]\((steps-[^)]+\.png)\)", written))
    assert pictures == {path.name for path in (ROOT / "docs").glob("steps-*.png")}


def test_links_lead_somewhere(written: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", written):
        assert (ROOT / "docs" / link.split("#")[0]).exists(), link


def test_every_step_is_compared_with_an_earlier_one(page: Any) -> None:
    names = [step.name for step in page.STEPS]
    assert list(page.BUILT_ON) == names[1:]
    for step, other in page.BUILT_ON.items():
        assert names.index(other) < names.index(step)


def larger(value: Any, times: float = 7, of_one: float = 0) -> Any:
    """Other numbers everywhere, as far on the same side of `of_one`, and nothing else."""
    if isinstance(value, dict):
        # A ratio of two that both grow would be the same.
        others = {"perplexity_ratio": (times, 1), "calibrated_error": (times - 1, of_one)}
        return {key: larger(item, *others.get(key, (times, of_one))) for key, item in value.items()}
    if isinstance(value, list):
        return [larger(item, times, of_one) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return of_one + times * (value - of_one)


def test_no_number_is_typed(page: Any) -> None:
    """If all numbers of the JSON grow, all of the page do, but for names and what is counted."""
    results = page.load(RESULTS)
    moved = {stem: larger(found) for stem, found in results.items()}
    pages = [page.page(each).splitlines() for each in (results, moved)]
    assert len(pages[0]) == len(pages[1])
    tables = [page.step_table(), *map(page.summary, results.values())]
    # Options of steps, and counts: test_counts.
    apart = {line for each in tables for line in each.splitlines() if line.startswith("|")}
    names = [step.name for step in sorted(page.STEPS, key=lambda step: -len(step.name))]
    names += [value for found in results.values() for value in found["versions"].values()]
    seen = 0
    for line, other in zip(*pages, strict=True):
        if line in apart:
            continue
        for name in names:
            line, other = line.replace(name, ""), other.replace(name, "")
        for number, of_other in zip(NUMBER.findall(line), NUMBER.findall(other), strict=True):
            seen += 1
            # What rounds to zero may do so still.
            assert number != of_other or not set(number) & set("123456789"), f"{number} in {line}"
    assert seen > 1000


def test_counts(page: Any) -> None:
    """Counted once more, in another way."""
    for found in page.load(RESULTS).values():
        lines = page.summary(found).splitlines()
        for step, other in page.BUILT_ON.items():
            ends = [
                text["against"][other]["kl"]
                for row in found["rows"]
                if row["method"] == step
                for text in row["texts"].values()
                if other in text["against"]
            ]
            if ends:
                below = sum(end["high"] < 0 for end in ends)
                above = sum(end["low"] > 0 for end in ends)
                counts = f"{len(ends)} | {below} | {len(ends) - below - above} | {above}"
                assert f"| {step} | {other} | {counts} |" in lines


# ---- made up results --------------------------------------------------------------------------

HELPS, UNSEEN, HARMS = -0.5, -0.125, 0.5


def difference(middle: float, same: float = 0.0) -> dict[str, Any]:
    return value(same + middle, significant=abs(middle) > 0.25)


def step(method: str, error: float, **changes: float) -> dict[str, Any]:
    """A row of nvfp4, weights only, that changes KL like this on a text, to all that came before.

    Perplexity falls by as much as KL rises.
    """
    names = ("naive", "sse", "hessian", "hessian, joint codes", "gptq, static scales")
    return {
        "format": "nvfp4",
        "block": 16,
        "weight_only": True,
        "method": method,
        "output_error": error,
        "layer_error": error,
        "texts": {
            text: {
                "perplexity": value(11.5),
                "bits_per_byte": value(1.5),
                "kl": value(0.625),
                "against": {
                    name: {
                        "kl": difference(changes[text]),
                        "perplexity_ratio": difference(-changes[text], same=1.0),
                    }
                    for name in (names[: names.index(method)] if changes else ())
                },
            }
            for text in ("one", "two")
        },
    }


def made_up() -> dict[str, Any]:
    """A step that helps, one that does on one text, one that harms, and one with a larger error."""
    text = {"windows": 3, "windows_of_the_file": 9, "tokens": 228, "unit": "document", "units": 2}
    measures = {"perplexity": value(11.5), "bits_per_byte": value(1.5)}
    naive = step("naive", 0.5)
    return {
        "command": "python eval/steps.py --made-up",
        **ABOUT,
        "texts": {"one": {"file": "one.txt", **text}, "two": {"file": "two.txt", **text}},
        "original": {"one": measures, "two": measures},
        "rows": [
            naive,
            step("sse", 0.25, one=HELPS, two=HELPS),
            step("hessian", 0.125, one=UNSEEN, two=HELPS),
            step("hessian, joint codes", 0.0625, one=HARMS, two=UNSEEN),
            step("gptq, static scales", 0.5, one=HELPS, two=HELPS),
        ],
    }


def swept(windows: int, damping: float, calibrated: float, held_out: float) -> dict[str, Any]:
    row = step(f"gptq, {windows} windows, damping {damping}", held_out)
    row |= {"sweep": {"windows": windows, "damping": damping}, "calibrated_error": calibrated}
    row["texts"]["one"]["kl"] = value(2 * held_out)
    return row


def test_made_up_results(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up()
    found["rows"] += [swept(2, 0.25, 0.25, 0.75), swept(2, 0.5, 0.375, 0.625)]
    found["rows"] += [swept(4, 0.25, 0.375, 0.75), swept(4, 0.5, 0.25, 0.5)]
    (tmp_path / "lm.json").write_text(json.dumps(found))
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "argv", ["steps_page.py", "--results", str(tmp_path), "--docs", str(out)]
    )
    page.main()
    assert {path.name for path in out.iterdir()} == {
        "steps.md",
        "steps-lm.png",
        "steps-lm-sweep.png",
    }
    text = (out / "steps.md").read_text("utf-8")
    assert "[steps/lm.json](../eval/results/steps/lm.json)" in text and "88% confidence" in text

    section = text.split("### nobody: nvfp4, weights only\n")[1].split("###")[0]
    rows = {line.split(" | ")[0].strip("| "): line for line in section.splitlines()}
    change = "**-0.5000**<br>-0.7500 to -0.2500<br>lower"
    assert rows["sse"].count(change) == 2 and rows["hessian"].count(change) == 1
    assert "-0.1250<br>-0.3750 to +0.1250<br>no difference seen" in rows["hessian"]
    assert "**+0.5000**<br>+0.2500 to +0.7500<br>higher" in rows["hessian, joint codes"]

    unhelpful, rest = section.split("Steps that do not help here:")[1].split(
        "The error on held-out"
    )
    opposite, perplexity = rest.split("Perplexity is higher:")
    joint = "- `hessian, joint codes` against `hessian` (output err 12.50 % to 6.25 %): "
    static = (
        "- `gptq, static scales` against `hessian, joint codes` (output err 6.25 % to 50.00 %): "
    )
    assert unhelpful.split("\n") == [
        "",
        "",
        "- `hessian` against `sse` (output err 25.00 % to 12.50 %): no difference of KL is seen on "
        "`one.txt`; KL is lower on `two.txt`.",
        f"{joint}KL is higher, so it is worse, on `one.txt`; no difference of KL is seen on "
        "`two.txt`.",
        "",
        "",
    ]
    assert f"{joint}KL is higher on `one.txt`." in opposite
    assert f"{static}KL is lower on `one.txt` and `two.txt`." in opposite
    assert opposite.count("against") == 2
    assert f"{static}on `one.txt` and `two.txt`." in perplexity and joint not in perplexity

    missing = "`gptq`, `gptq, sequential`, `gptq, cross target`"
    assert f"Not measured yet: {missing}.\n" in section
    names = ", ".join(f"`{each.name}`" for each in page.steps_of("mxfp4", False))
    assert f"mxfp4, weights and inputs (W4A4)\n\nNot measured yet: {names}.\n" in text

    assert "| 2 | 154 | 0.25 | 25.00 % | 75.00 % | +200.00 % |" in text
    assert (
        "- 2 windows: the error on the calibration tokens is least with damping 0.25, on held-out "
        "text with 0.5. Less damping overfits: on held-out text it has 75.00 % and not 62.50 %. "
        "KL is least with 0.5 on `one.txt`, 0.25 on `two.txt`."
    ) in text
    assert (
        "- 4 windows: the error on the calibration tokens is least with damping 0.5, on held-out "
        "text with 0.5. No overfitting by less damping is seen."
    ) in text
    assert "The gap is largest, +200.00 %, for 2 windows and damping 0.25." in text
    assert "The gap is smallest, +66.67 %, for 2 windows and damping 0.5." in text


def test_all_steps_help(page: Any) -> None:
    """And nothing was swept."""
    found = made_up()
    found["rows"] = found["rows"][:2]
    # Perplexity falls too.
    for text in found["rows"][1]["texts"].values():
        text["against"]["naive"]["perplexity_ratio"] = difference(-0.5, same=1.0)
    text = page.page({"lm": found})
    assert "Steps that do not help" not in text and "disagree" not in text
    assert "Every step that is compared helps on every text." in text
    assert "Wherever KL is lower or higher, so is the error." in text
    assert "No step has a perplexity that is higher by its interval." in text
    assert text.endswith("damping and calibration tokens\n\nNot measured yet.\n")


def test_step_whose_base_was_not_measured(page: Any) -> None:
    """It is shown and not compared, and its base is named."""
    found = made_up()
    found["rows"] = [step("gptq", 0.25)]
    text = page.page({"lm": found})
    assert "| gptq | gptq, static scales | 25.00 % |" in text
    assert "`gptq` against" not in text and "`gptq, static scales`, `gptq, sequential`" in text


def test_nothing_to_show(page: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no results. Run eval/steps\.py --json"):
        page.load(tmp_path)
