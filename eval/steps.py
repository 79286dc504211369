"""What each step towards quality is worth: one model, the same tokens, one step more at a time.

    python eval/steps.py [--model DIR --calib FILE --text FILE --text FILE] [--json OUT]

Rows are as eval/quality.py has them, with the step in the place of the method: held-out output
error of the weights and of the layers, perplexity and KL on each text with intervals, and the
difference to every earlier step on the same tokens. Then, under "sweep", `gptq` for other numbers
of calibration windows and other dampings: the output error on the windows it was calibrated on
beside that on other text.
What is in OUT already is not measured again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import quality
import torch
import transformers
from measuring import KEY, Results, command, machine, mean, require_apart, sizes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.evaluation import Evaluation, token_windows
from fp4pass.methods import Gptq, Hessian

FORMATS = ("nvfp4", "mxfp4")
WINDOWS, DAMPINGS = (8, 32, 128), (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Step:
    """A way to convert: options of `convert`, those of `prepare`, and for which rows it is."""

    name: str
    method: object
    convert: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    weight_only: bool = True
    formats: tuple[str, ...] = FORMATS


SEARCHED, SEQUENTIAL = {"activation_scales": "sse"}, {"sequential": True}
CROSS = Gptq(target="cross", damping=0.5)

STEPS = (
    Step("naive", "naive"),
    Step("sse", "sse"),
    Step("hessian", "hessian"),
    Step("hessian, joint codes", Hessian(codes="joint")),
    Step("gptq, static scales", Gptq(scales="static", sweeps=0)),
    Step("gptq", "gptq"),
    Step("gptq, sequential", "gptq", prepare=SEQUENTIAL),
    Step("gptq, cross target", CROSS, prepare=SEQUENTIAL),
    Step("gptq, rotation 64", "gptq", {"rotation": 64}, formats=("mxfp4",)),
    Step("gptq, sse inputs", "gptq", SEARCHED, weight_only=False),
    Step("cross target, sse inputs", CROSS, SEARCHED, SEQUENTIAL, weight_only=False),
    Step("cross target, rotation 64", CROSS, {"rotation": 64}, SEQUENTIAL, formats=("mxfp4",)),
    Step(
        "cross target, rotation 64, sse inputs",
        CROSS,
        {"rotation": 64} | SEARCHED,
        SEQUENTIAL,
        weight_only=False,
        formats=("mxfp4",),
    ),
)


def main() -> None:
    args = parse_args()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for path in args.text:
        require_apart(args.calib, path)
    text = quality.read(args.calib)
    calib = token_windows(tokenizer, text, window=args.window, windows=args.samples)
    first = quality.read(args.text[0])
    held_out = token_windows(tokenizer, first, window=args.window, windows=args.error_windows)
    bench = Bench(model, quality.Remembered(model).eval(), tokenizer, args, held_out)
    originals = bench.measure(model, None)
    about = {
        "command": command(args.model),
        **machine(args.device),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "dtype": "float32",
        "window": args.window,
        "calibration": {"file": args.calib.name, "windows": len(calib), "tokens": calib.numel()},
        "texts": {
            path.stem: quality.described(
                path, originals[path.stem], len(quality.cut(tokenizer, path, args))
            )
            for path in args.text
        },
        "output_error_tokens": held_out.numel(),
        "confidence": originals[args.text[0].stem].confidence,
        "original": {name: quality.measures(found) for name, found in originals.items()},
    }
    results = Results(args.json, about, again=args.again)
    measure_steps(bench, results, originals, calib)
    measure_sweep(bench, results, originals, text)
    if args.json is None:
        print(results.text())


def parse_args() -> argparse.Namespace:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(windows=32)
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    return args


@dataclass(frozen=True)
class Bench:
    """A model, what remembers its answers, and what is measured of its conversions."""

    model: nn.Module
    reference: nn.Module
    tokenizer: Any
    args: argparse.Namespace
    held_out: Tensor

    def measure(self, converted: nn.Module, reference: nn.Module | None) -> dict[str, Evaluation]:
        return quality.measure(converted, reference, self.tokenizer, self.args)

    def calibrated(self, windows: Tensor, **options: Any) -> nn.Module:
        prepared = fp4pass.prepare(copy.deepcopy(self.model), "gptq", **options)
        batches = windows.split(self.args.batch_size)
        return fp4pass.calibrate(prepared, batches, progress=False)

    def row(self, converted: nn.Module, key: Sequence[Any], seconds: float) -> dict[str, Any]:
        row = {**dict(zip(KEY, key, strict=True)), "convert_seconds": seconds}
        row |= sizes(fp4pass.report(converted))
        batches = self.held_out.split(self.args.batch_size)
        return row | quality.layer_errors(converted, self.model, batches, row)


def measure_steps(
    bench: Bench, results: Results, originals: dict[str, Evaluation], calib: Tensor
) -> None:
    """Every step of every format, for weights alone and with inputs."""
    there = {tuple(row[name] for name in KEY): row for row in results.rows}
    prepared: dict[str, nn.Module] = {}
    for fmt, weight_only in itertools.product(FORMATS, (True, False)):
        before: dict[str, dict[str, Evaluation]] = {}
        for step in steps_of(fmt, weight_only):
            key = (fmt, get_format(fmt).block, weight_only, step.name)
            if key in there:
                texts = there[key]["texts"]
                before[step.name] = {name: remembered(each) for name, each in texts.items()}
                continue
            options = repr(step.prepare)
            if options not in prepared:
                prepared[options] = bench.calibrated(calib, **step.prepare)
            converted = copy.deepcopy(prepared[options])
            began = time.perf_counter()
            fp4pass.convert(converted, fmt, step.method, weight_only=weight_only, **step.convert)
            seconds = time.perf_counter() - began
            row = bench.row(converted, key, seconds)
            found = bench.measure(converted, bench.reference)
            row["texts"] = {
                name: quality.compared(
                    here, originals[name], {other: then[name] for other, then in before.items()}
                )
                | {"evaluation": here.to_dict(sums=True)}
                for name, here in found.items()
            }
            before[step.name] = found
            results.put(row)
            print(quality.line(row), flush=True)


def remembered(text: dict[str, Any]) -> Evaluation:
    """The evaluation that a row was made of."""
    plain = text["evaluation"]
    intervals = {name: tuple(ends) for name, ends in plain["intervals"].items()}
    sums = torch.tensor(plain["sums"], dtype=torch.float64)
    return Evaluation(**{**plain, "intervals": intervals, "sums": sums})


def steps_of(fmt: str, weight_only: bool) -> list[Step]:
    return [step for step in STEPS if fmt in step.formats and (step.weight_only or not weight_only)]


def measure_sweep(
    bench: Bench, results: Results, originals: dict[str, Evaluation], text: str
) -> None:
    """gptq of the weights by damping and windows, with its error where it was calibrated."""
    there = {(row["method"], row["weight_only"]) for row in results.rows}
    for windows in WINDOWS:
        prepared = None
        for damping in DAMPINGS:
            name = f"gptq, {windows} windows, damping {damping}"
            if (name, True) in there:
                continue
            if prepared is None:
                args = bench.args
                calib = token_windows(bench.tokenizer, text, window=args.window, windows=windows)
                prepared = bench.calibrated(calib)
            converted = copy.deepcopy(prepared)
            began = time.perf_counter()
            fp4pass.convert(converted, FORMATS[0], Gptq(damping=damping), weight_only=True)
            seconds = time.perf_counter() - began
            block = get_format(FORMATS[0]).block
            row = bench.row(converted, (FORMATS[0], block, True, name), seconds)
            rows = fp4pass.report(converted).converted
            row |= {
                "sweep": {"windows": windows, "damping": damping},
                "calibrated_error": mean([each.output_error or 0.0 for each in rows]),
            }
            row["texts"] = {
                each: quality.compared(here, originals[each], {})
                for each, here in bench.measure(converted, bench.reference).items()
            }
            results.put(row)
            print(quality.line(row), flush=True)


if __name__ == "__main__":
    main()
