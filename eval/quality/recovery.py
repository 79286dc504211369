"""What tasks of lm-eval are left of a model once it is quantized, beside the noise.

    python -m eval.quality.recovery --model FOLDER --json OUT \
        --task blimp_local=FILE --task next_local=FILE --task wikitext_local=FILE [--device cuda]

The original, and `quality="good"` and "best" with weights only and with inputs in 4 bits, each
calibrated three times on 32,768 tokens of the model's own with another seed. The tasks are those of
eval/quality/tasks, each on its file. A row has each metric, the standard error that lm-eval gives,
and how many answers are other than the original's, which the accuracy does not show.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from torch import nn

from eval.quality.grids import GRIDS, SEEDS, Run
from eval.quality.real_model import Stand, named
from eval.record import Results, Row, facts
from fp4pass.integrations.lm_eval import Fp4PassLM

TASKS = Path(__file__).with_name("tasks")
BATCH = 64


def main() -> None:
    """Measure what is missing in a file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", type=named, action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--seed", type=int, action="append", choices=SEEDS, help="default: all")
    parser.add_argument("--limit", type=int, help="of the documents of each task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    stand = Stand(args.model, {}, {}, None, args.device)
    tasks = dict(args.task)
    original, answers = scored(stand.model, stand.tokenizer, tasks, args.limit)
    about = {
        **facts(args.device, "lm-eval", model=args.model),
        "model": args.model.name,
        "parameters": stand.model.num_parameters(),
        "files": {name: path.name for name, path in tasks.items()},
        "limit": args.limit,
        "original": original,
    }
    results = Results(args.json, about, key=Run.KEY)
    there = {tuple(row[name] for name in Run.KEY) for row in results.rows}
    for run in GRIDS["recovery"]:
        if run.key in there or run.seed not in (args.seed or SEEDS):
            continue
        packed, took = stand.convert(run)
        found, own = scored(packed, stand.tokenizer, tasks, args.limit)
        for name, task in found.items():
            if own[name][0] is not None:
                pairs = zip(own[name], answers[name], strict=True)
                task["changed"] = sum(a != b for a, b in pairs) / len(own[name])
        results.put({**run.row(), **took, "tasks": found})
        print(run.scheme, run.by, run.seed, found, flush=True)


def scored(
    model: nn.Module, tokenizer: Any, tasks: dict[str, Path], limit: int | None
) -> tuple[dict[str, Row], dict[str, list[Any]]]:
    """Return the metrics of each task, and the answer to each of its documents."""
    import lm_eval

    found: dict[str, Row] = {}
    answers: dict[str, list[Any]] = {}
    for name, path in tasks.items():
        manager = TaskManager(
            include_path=str(TASKS), include_defaults=False, metadata={"text": str(path)}
        )
        lm = Fp4PassLM(model, tokenizer=tokenizer, batch_size=BATCH)
        result = lm_eval.simple_evaluate(
            lm, tasks=[name], task_manager=manager, limit=limit, log_samples=True, verbosity="ERROR"
        )
        metrics = result["results"][name]
        found[name] = {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
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


if __name__ == "__main__":
    main()
