"""What tasks of lm-eval are left of a model once it is quantized, beside the noise.

    python -m eval.quality.recovery --model FOLDER --json OUT [--device cuda] \
        --task blimp_local=FILE --task next_local=FILE --task wikitext_local=FILE \
        [--seed 0 1 2] [--folder NAME=FOLDER ...]

The original, the runs of the grid "recovery", each calibrated three times on 32,768 tokens of the
model's own with another seed, and packed folders. The tasks are those of eval/quality/tasks, each
on its file. A row has each metric, the standard error that lm-eval gives, and how many answers are
other than the original's, which the accuracy does not show. One process a seed uses a GPU better
than one for all; `--together` puts the rows of OUT.part*.json into OUT, and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from torch import nn

import fp4pass
from eval.quality.grids import GRIDS, SEEDS, Run
from eval.quality.real_model import Measured, Stand, named, together
from eval.record import Results, Row, facts
from fp4pass.integrations.lm_eval import Fp4PassLM

TASKS = Path(__file__).with_name("tasks")

# Texts of a batch, so that the logits of SmolLM2 take at most 10 GB, and tokens of the longest.
BATCH = {"blimp_local": 1024, "next_local": 256, "wikitext_local": 16}
LONGEST = 2048


def main() -> None:
    """Measure what is missing in a file of results."""
    args = parse_args()
    if args.together:
        together(args)
        return
    stand = Stand(args.model, {}, {}, None, args.device)
    tasks = {name: loaded(name, path) for name, path in args.task}
    original, answers = scored(stand, stand.model, tasks, args.limit)
    about = {
        **facts(args.device, "lm-eval", model=args.model),
        "model": args.model.name,
        "parameters": stand.model.num_parameters(),
        "files": {name: path.name for name, path in args.task},
        "limit": args.limit,
        "original": original,
    }
    results = Results(args.json, about, key=Run.KEY)
    there = {tuple(row[name] for name in Run.KEY) for row in results.rows}
    for row, packed in models(args, stand, there):
        with Measured(args.device) as took:
            found, own = scored(stand, packed, tasks, args.limit)
        for name, task in found.items():
            if own[name][0] is not None:
                pairs = zip(own[name], answers[name], strict=True)
                task["changed"] = sum(a != b for a, b in pairs) / len(own[name])
        results.put({**row, "tasks": found})
        print(row["scheme"], row["by"], row["seed"], found, took.row, flush=True)


def models(args: argparse.Namespace, stand: Stand, there: set[Any]) -> Iterator[tuple[Row, Any]]:
    """Yield the row of each packed model that has not been measured, and the model."""
    for name, path in args.folder:
        packed = fp4pass.load(path, device_map=args.device, progress=False)
        scheme = fp4pass.report(packed).converted[0].scheme
        run = Run(by=name, scheme=scheme, data="folder", tokens=0)
        if run.key not in there:
            yield run.row(), packed
    for run in GRIDS["recovery"]:
        if run.key not in there and run.seed in args.seed:
            yield run.row(), stand.convert(run)[0]


def loaded(name: str, path: Path) -> Any:
    """Return a task of eval/quality/tasks on a file."""
    metadata = {"text": str(path)}
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    return manager.load([name])


def scored(
    stand: Stand, model: nn.Module, tasks: dict[str, Any], limit: int | None
) -> tuple[dict[str, Row], dict[str, list[Any]]]:
    """Return the metrics of each task, and the answer to each of its documents."""
    found: dict[str, Row] = {}
    answers: dict[str, list[Any]] = {}
    longest = min(LONGEST, stand.model.config.max_position_embeddings)
    for name, task in tasks.items():
        size = BATCH.get(name, 16)
        lm = Fp4PassLM(
            model,
            tokenizer=stand.tokenizer,
            batch_size=size if stand.device == "cuda" else max(1, size // 16),
            max_length=longest,
            # The sum of a sentence in bfloat16 would have steps of .25.
            softmax_dtype="float32",
        )
        result = lm_eval.evaluate(lm, task, limit=limit)
        found[name] = {
            key.removesuffix(",none"): value
            for key, value in result["results"][name].items()
            if isinstance(value, int | float) and key.endswith(",none")
        }
        answers[name] = [_answer(sample) for sample in result["samples"][name]]
        found[name]["documents"] = len(answers[name])
    return found, answers


def _answer(sample: Row) -> Any:
    """Return the choice that is likeliest; None where there is nothing to choose from."""
    # Of a choice: how likely it is, and whether it is the likeliest of all texts.
    scores = [each[0] for each in sample["filtered_resps"] if isinstance(each, list | tuple)]
    return max(range(len(scores)), key=scores.__getitem__) if scores else None


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", type=named, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--folder", type=named, action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--seed", type=int, nargs="*", choices=SEEDS, default=SEEDS)
    parser.add_argument("--limit", type=int, help="of the documents of each task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
