"""Write docs/steps.md and its pictures from what eval/steps.py left behind.

    python eval/steps_page.py [--results DIR] [--docs DIR]

Every number on the page comes from a JSON of eval/results/steps, or from the options of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import draw_steps
from results_page import Found, Row, made, texts
from steps import FORMATS, STEPS, Step, steps_of
from steps_sweep import sweep
from tables import (
    ROOT,
    above,
    code,
    file,
    inputs,
    listed,
    number,
    parse_args,
    percent,
    signed,
    table,
    with_interval,
)
from verdicts import cases, verdict

INTRODUCTION = Path(__file__).with_name("steps_introduction.md")

# The step that each one builds on, which it is compared with.
BUILT_ON = {
    "sse": "naive",
    "hessian": "sse",
    "hessian, joint codes": "hessian",
    "gptq, static scales": "hessian, joint codes",
    "gptq": "gptq, static scales",
    "gptq, sequential": "gptq",
    "gptq, cross target": "gptq, sequential",
    "gptq, rotation 64": "gptq",
    "gptq, sse inputs": "gptq",
    "cross target, sse inputs": "gptq, cross target",
    "cross target, rotation 64": "gptq, cross target",
    "cross target, rotation 64, sse inputs": "cross target, rotation 64",
}

# What a paired change of KL or perplexity is called, the worst first.
WORDS = {"worse": "higher", "undecided": "no difference seen", "better": "lower"}
SENTENCES = {
    "worse": "KL is higher, so it is worse, on {}",
    "undecided": "no difference of KL is seen on {}",
    "better": "KL is lower on {}",
}


def main() -> None:
    """Write the page and its pictures."""
    args = parse_args(__doc__, ROOT / "eval" / "results" / "steps")
    results = load(args.results)
    (args.docs / "steps.md").write_text(page(results), encoding="utf-8")
    for stem, found in results.items():
        draw_steps(found, args.docs, stem, lambda row, text: outcome(row, text, "kl"))


def load(folder: Path) -> dict[str, Found]:
    """Return all results by the stem of their file, small models first.

    Raises:
        SystemExit: there is nothing.
    """
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    if not found:
        raise SystemExit(f"{folder} has no results. Run eval/steps.py --json {folder}/NAME.json.")
    return dict(sorted(found.items(), key=lambda item: item[1]["parameters"]))


def page(results: Mapping[str, Found]) -> str:
    """Return the page in Markdown."""
    parts = [INTRODUCTION.read_text(encoding="utf-8"), f"## The steps\n\n{step_table()}"]
    for stem, found in results.items():
        parts.append(f"## {found['model']}\n\n{made(f'steps/{stem}', found)}")
        parts += model(stem, found)
    return "\n".join(parts)


def model(stem: str, found: Found) -> Iterator[str]:
    """Yield the sections of a model."""
    yield from texts(found)
    yield f"![KL by step](steps-{stem}.png)\n"
    yield (
        "A hollow mark is a step that does not help on that text: its KL is not lower than that "
        "of the step it is\ncompared with, or no difference is seen.\n"
    )
    yield f"### {found['model']}: in short\n\n{summary(found)}"
    formats = dict.fromkeys([*FORMATS, *(row["format"] for row in found["rows"])])
    for fmt, weight_only in itertools.product(formats, (True, False)):
        yield f"### {found['model']}: {fmt}, {kind(weight_only)}\n"
        yield from group(found, fmt, weight_only)
    yield from sweep(stem, found)


# ---- steps ------------------------------------------------------------------------------------


def step_table() -> str:
    """Return a table of what each step calls, from eval/steps.py."""
    header = ["step", "compared with", "`prepare`", "`convert`"]
    rows = [[s.name, BUILT_ON.get(s.name, ""), *map(code, calls(s))] for s in STEPS]
    return table(header, rows, left=4)


def calls(step: Step) -> tuple[str, str]:
    """Return the arguments of `prepare` and of `convert`."""
    return (
        ", ".join(['"gptq"', *arguments(step.prepare)]),
        ", ".join(arguments({"method": step.method, **step.convert})),
    )


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as they would be typed."""
    return [f"{name}={written(value)}" for name, value in options.items()]


def written(value: Any) -> str:
    """Return a value as it would be typed; options of a method without those at their defaults."""
    if dataclasses.is_dataclass(value):
        options = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        defaults = {each.name: each.default for each in dataclasses.fields(value)}
        changed = {name: each for name, each in options.items() if each != defaults[name]}
        return f"{type(value).__name__}({', '.join(arguments(changed))})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def summary(found: Found) -> str:
    """Return a table of how often each step helps, over formats, inputs and texts."""
    rows, outcomes = [], cases(found)
    for step, other in BUILT_ON.items():
        if (step, other, "kl") in outcomes:
            here = list(outcomes[step, other, "kl"].values())
            counts = [str(here.count(each)) for each in reversed(WORDS)]
            rows.append([step, other, str(len(here)), *counts])
    header = ["step", "compared with", "cases", "KL lower", "no difference seen", "KL higher"]
    chance = 1 - found["confidence"]
    return "\n".join(
        [
            "A case is a format, weights only or W4A4, and a text.\n",
            table(header, rows, left=2),
            f"Of comparisons of what does the same, about {chance:.0%} would look different.\n",
        ]
    )


def group(found: Found, fmt: str, weight_only: bool) -> Iterator[str]:
    """Yield a table of all steps of a format and a kind of inputs, and what follows from it."""
    rows = chosen(found, fmt, weight_only)
    if rows:
        yield group_table(found, rows, weight_only)
        yield from listed(
            "Steps that do not help here:",
            unhelpful(found, rows),
            "Every step that is compared helps on every text.",
        )
        yield from listed(
            "The error on held-out inputs and KL disagree:",
            disagreements(found, rows),
            "Wherever KL is lower or higher, so is the error.",
        )
        yield from listed(
            "Perplexity is higher:",
            risen_perplexity(found, rows),
            "No step has a perplexity that is higher by its interval.",
        )
    there = {row["method"] for row in rows}
    missing = [code(s.name) for s in steps_of(fmt, weight_only) if s.name not in there]
    if missing:
        yield f"Not measured yet: {', '.join(missing)}.\n"


def group_table(found: Found, rows: Sequence[Row], weight_only: bool) -> str:
    """Return the table of some steps."""
    header = ["step", "compared with", "output err", *([] if weight_only else ["layer err"])]
    for name in found["texts"]:
        header += [
            f"perplexity, {file(found, name)}",
            "change",
            f"KL, {file(found, name)}",
            "change",
        ]
    body = []
    for row in rows:
        cells = [row["method"], BUILT_ON.get(row["method"], ""), percent(row["output_error"])]
        if not weight_only:
            cells.append(percent(row["layer_error"]))
        for name in found["texts"]:
            cells += text_cells(row, name)
        body.append(cells)
    return table(header, body, left=2)


def text_cells(row: Row, text: str) -> list[str]:
    """Return the cells of a text: perplexity and KL, each with its change."""
    here, to = row["texts"][text], change(row, text)
    cells = [
        with_interval(here["perplexity"], number),
        with_interval(to.get("perplexity_ratio"), above, bold=True),
        with_interval(here["kl"], number),
        with_interval(to.get("kl"), signed, bold=True),
    ]
    if to:
        cells[-1] += f"<br>{WORDS[verdict(to['kl'], 'kl')]}"
    return cells


def unhelpful(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each step that does not lower KL on every text."""
    for row, before in pairs(rows):
        found_on = where(found, row, "kl")
        if found_on.keys() - {"better"}:
            said = [SENTENCES[each].format(names) for each, names in found_on.items()]
            yield f"{against(row, before)}: {'; '.join(said)}."


def disagreements(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each step of which KL goes one way and the output error another."""
    for row, before in pairs(rows):
        opposite = "better" if row["layer_error"] > before["layer_error"] else "worse"
        names = where(found, row, "kl").get(opposite)
        if names and row["layer_error"] != before["layer_error"]:
            yield f"{against(row, before)}: KL is {WORDS[opposite]} on {names}."


def risen_perplexity(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each step of which perplexity is higher beyond its interval."""
    for row, before in pairs(rows):
        names = where(found, row, "perplexity_ratio").get("worse")
        if names:
            yield f"{against(row, before)}: on {names}."


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield each step with the one that it is compared with, where that was measured."""
    by_name = {row["method"]: row for row in rows}
    for row in rows:
        before = by_name.get(BUILT_ON.get(row["method"], ""))
        if before is not None:
            yield row, before


def against(row: Row, before: Row) -> str:
    """Return the names of two steps and their errors, with those of quantized inputs."""
    error = "output err" if row["weight_only"] else "layer err"
    return (
        f"{code(row['method'])} against {code(before['method'])} ({error} "
        f"{percent(before['layer_error'])} to {percent(row['layer_error'])})"
    )


def where(found: Found, row: Row, measure: str) -> dict[str, str]:
    """Return the texts of each outcome, the worst first."""
    outcomes = {name: outcome(row, name, measure) for name in found["texts"]}
    return {
        each: " and ".join(file(found, name) for name in outcomes if outcomes[name] == each)
        for each in WORDS
        if each in outcomes.values()
    }


def outcome(row: Row, text: str, measure: str) -> str:
    """Return a key of WORDS, "" if there is nothing to compare with."""
    to = change(row, text)
    return verdict(to[measure], measure) if to else ""


def change(row: Row, text: str) -> Row:
    """Return the paired differences to the step below, {} if that was not measured."""
    return row["texts"][text]["against"].get(BUILT_ON.get(row["method"]), {})


# ---- words ------------------------------------------------------------------------------------


def chosen(found: Found, fmt: str, weight_only: bool) -> list[Row]:
    """Return the rows of steps, without those of the sweep."""
    return [
        row
        for row in found["rows"]
        if row["format"] == fmt and row["weight_only"] == weight_only and "sweep" not in row
    ]


def kind(weight_only: bool) -> str:
    """Return what is quantized, in words."""
    return inputs(weight_only) if weight_only else f"{inputs(weight_only)} (W4A4)"


if __name__ == "__main__":
    main()
