"""What quantizing does to single layers: a row for each layer, format, block and method.

    python eval/layer_error.py [MODEL] [--layers GLOB ...] [--sensitivity] [--json FILE]
    python eval/layer_error.py --synthetic 2560 9728 --tokens 250000

Weight error is |W - Q| / |W|, output error |W x - Q x| / |W x|, and W4A4 error the same with Q x4,
x4 being x in the format of Q, with the global scale of calibration. Inputs x are those that the
layer has in the float model on held-out text. Bits are those of codes and scales; the time is the
median of `--repeats` searches after one more; offsets are steps of block scales above naive's.

--sensitivity quantizes one layer at a time: perplexity over that of the float model, and KL, with
95 % intervals over documents of the held-out text. --synthetic takes one layer of random weights
and inputs instead of a model.

A text is plain; a line `<|doc|>` separates documents. With one text its second half is held out;
documents that are in both texts are held out only.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import draw_layer_errors
from layer_measure import (
    LeftOut,
    Plan,
    Row,
    SyntheticLayer,
    find_layers,
    measure_model,
    measure_synthetic,
)
from layer_page import page
from measuring import command, machine, rounded, simplest_first
from torch import Tensor, nn
from tqdm import tqdm

import fp4pass
from fp4pass.core.formats import FORMATS, Format, get_format
from fp4pass.evaluation import Change, token_windows
from fp4pass.methods import resolve_method

TINY = Path(__file__).resolve().parent.parent / "examples" / "tiny_lm"

_DOCUMENT = "<|doc|>\n"


def main() -> None:
    args = parse_args()
    methods = [resolve_method(name)[0] for name in args.methods]
    plan = Plan([get_format(name) for name in args.formats], methods, args.repeats)
    result = {"command": command(None), **machine(args.device)}
    if args.synthetic:
        result |= of_synthetic(args, plan)
    else:
        result |= of_model(args, plan, choices_of(args.sensitivity))
    result = rounded(result)
    text = page(result)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_json(result))
    if args.table:
        args.table.write_text(text + "\n")
    if args.plot:
        draw_layer_errors(result, args.plot)


def of_synthetic(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The result of --synthetic."""
    rows, columns = args.synthetic
    source = SyntheticLayer(rows, columns, torch.device(args.device))
    heldout = args.heldout_tokens or args.tokens
    found = list(measure_synthetic(source, args.tokens, heldout, plan))
    return {
        "model": f"synthetic {rows} x {columns}",
        "dtype": "bfloat16",
        "inputs": f"{args.tokens} random tokens to calibrate on, {heldout} others held out",
        "rows": plain(found, Row),
        "sensitivity": [],
        "left_out": plain(found, LeftOut),
    }


def choices_of(sensitivity: list[str] | None) -> list[tuple[Format, str]]:
    """The formats and methods of --sensitivity; nvfp4/hessian if it names none."""
    if sensitivity is None:
        return []
    pairs = [choice.partition("/") for choice in sensitivity or ["nvfp4/hessian"]]
    return [(get_format(key), resolve_method(method)[0].name) for key, _, method in pairs]


def of_model(
    args: argparse.Namespace, plan: Plan, choices: Sequence[tuple[Format, str]]
) -> dict[str, Any]:
    """The result for the layers of a model. choices: what `sensitivities` measures."""
    import transformers

    transformers.logging.disable_progress_bar()
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=dtype).to(args.device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    paths = [args.calibration, args.heldout]
    texts = split_texts(*(path and path.read_text(encoding="utf-8") for path in paths))

    def cut(text: str, tokens: int) -> Tensor:
        windows = max(1, tokens // args.window)
        return token_windows(tokenizer, text, window=args.window, windows=windows)

    calibration = cut(texts[0], args.tokens)
    heldout = cut(texts[1], args.heldout_tokens or args.tokens)
    batches = [each.split(args.batch_size) for each in (calibration, heldout)]
    found: list[Any] = list(measure_model(model, *batches, plan, args.layers))
    if choices:
        options = {"window": args.window, "windows": len(heldout), "batch_size": args.batch_size}
        arguments = (model, tokenizer, texts[1], batches[0], args.layers, choices, options)
        found += sensitivities(*arguments)

    if not plain(found, Row):
        raise SystemExit(f"No layer can be measured: {plain(found, LeftOut)}")
    # What is left out of the rows of layers, and then of the sensitivity too, is said once.
    left_out: dict[tuple[str, str], Any] = {}
    for row in plain(found, LeftOut):
        key = row["layer"] if row["layer"] != "all" else row["formats"]
        left_out.setdefault((key, row["reason"]), row)
    names = [path.name for path in paths if path]
    return {
        "model": Path(args.model).name if Path(args.model).is_dir() else args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "inputs": f"{calibration.numel()} tokens of {names[0]} to calibrate on, {heldout.numel()} "
        f"others of {names[-1]} held out, in windows of {args.window}",
        "rows": plain(found, Row),
        "sensitivity": plain(found, Sensitivity),
        "left_out": list(left_out.values()),
    }


def plain(found: Iterable[Any], kind: type) -> list[dict[str, Any]]:
    """The records of one kind as dictionaries."""
    return [asdict(each) for each in found if isinstance(each, kind)]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one layer alone does to a model.

    perplexity_ratio: over that of the float model, a Change; kl: KL(float || quantized) in nats
    per token; original: the perplexity of the float model; units: documents of the text, or windows
    of one without.
    """

    layer: str
    format: str
    block: int
    method: str
    weight_only: bool
    original: float
    perplexity: float
    perplexity_ratio: Change
    kl: float
    kl_interval: tuple[float, float] | None
    top1: float
    tokens: int
    units: int


def sensitivities(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    calibration: Iterable[Tensor],
    globs: Sequence[str],
    choices: Sequence[tuple[Format, str]],
    options: Mapping[str, Any],
) -> Iterator[Sensitivity | LeftOut]:
    """Each layer alone in each format by each method, with float and with 4-bit inputs.

    text: held out; calibration: batches of ids; options: of fp4pass.evaluate.
    """
    # KL as a whole: the search for nuclei takes as long as all the rest.
    evaluate = partial(fp4pass.evaluate, progress=False, top_p=1, **options)
    before = evaluate(model, tokenizer, text)
    for fmt, method in choices:
        rules = [(glob, {}) for glob in globs]
        prepared = fp4pass.prepare(copy.deepcopy(model), method, rules=rules)
        fp4pass.calibrate(prepared, calibration)
        names, left_out = find_layers(model, globs, [fmt])
        yield from left_out
        settings = [(name, weight_only) for name in names for weight_only in (True, False)]
        for name, weight_only in tqdm(settings, desc=f"sensitivity, {fmt.key}/{method}"):
            converted = convert_one(prepared, name, fmt, method, weight_only)
            found = evaluate(converted, tokenizer, text, model)
            yield Sensitivity(
                name,
                fmt.name,
                fmt.block,
                method,
                weight_only,
                original=before.perplexity,
                perplexity=found.perplexity,
                perplexity_ratio=found.difference(before).perplexity_ratio,
                kl=found.kl,
                kl_interval=found.intervals.get("kl"),
                top1=found.top1,
                tokens=found.tokens,
                units=found.units,
            )


def convert_one(
    prepared: nn.Module, layer: str, fmt: Format, method: str, weight_only: bool
) -> nn.Module:
    """A copy of a calibrated model with one layer quantized."""
    rules = [(layer, {}), ("*", None)]
    options = {"block": fmt.block, "weight_only": weight_only, "rules": rules}
    return fp4pass.convert(copy.deepcopy(prepared), fmt.name, method, **options)


def split_texts(calibration: str, heldout: str | None) -> tuple[str, str]:
    """Two texts without a document in common: without a second one the halves of the first.

    A single document is cut between lines. Raises SystemExit if nothing is left of one of them.
    """
    documents = documents_of(calibration)
    if heldout is None:
        separator = _DOCUMENT if len(documents) > 1 else ""
        parts = documents if len(documents) > 1 else calibration.splitlines(keepends=True)
        half = len(parts) // 2
        if not half:
            raise SystemExit(
                "The calibration text is one line, which cannot be cut in two. Give a second text "
                "with --heldout."
            )
        return separator.join(parts[:half]), separator.join(parts[half:])
    others = {document.strip() for document in documents_of(heldout)}
    kept = [document for document in documents if document.strip() not in others]
    if not kept:
        raise SystemExit(
            "Every document of --calibration is in --heldout, too. Give the file as --calibration "
            "alone: then its second half is held out."
        )
    return _DOCUMENT.join(kept), heldout


def documents_of(text: str) -> list[str]:
    parts = re.split(r"^<\|doc\|>$\n?", text, flags=re.M)
    return [part for part in parts if part.strip()]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    blocks = [get_format(fmt.name, block).key for fmt in FORMATS.values() for block in fmt.blocks]
    methods = simplest_first()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("model", nargs="?", default=str(TINY), help="causal LM: folder or hub id")
    parser.add_argument("--layers", nargs="+", default=[], metavar="GLOB", help="all if absent")
    parser.add_argument("--calibration", type=Path, help="text; that of tiny_lm if absent")
    parser.add_argument("--heldout", type=Path, help="text to measure on")
    parser.add_argument("--tokens", type=int, default=16384, help="to calibrate on")
    parser.add_argument("--heldout-tokens", type=int, help="to measure on; as many if absent")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once")
    parser.add_argument("--formats", nargs="+", default=blocks, help=f"of {' '.join(blocks)}")
    parser.add_argument("--methods", nargs="+", default=methods, help=f"of {' '.join(methods)}")
    parser.add_argument("--repeats", type=int, default=3, help="timed searches")
    parser.add_argument("--sensitivity", nargs="*", metavar="FORMAT/METHOD", help="nvfp4/hessian")
    parser.add_argument("--synthetic", nargs=2, type=int, metavar=("N", "K"), help="no model")
    parser.add_argument("--dtype", default="auto", help="the model's own if absent")
    parser.add_argument("--device", default=device)
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--table", type=Path, help="Markdown")
    parser.add_argument("--plot", type=Path, help="PNG: errors, and offsets of scales")
    args = parser.parse_args()
    if args.synthetic and args.sensitivity is not None:
        parser.error("--sensitivity needs a model; --synthetic has none")
    if args.heldout and not args.calibration:
        parser.error("--heldout needs --calibration, which may not be the same text")
    if not args.calibration:
        args.calibration, args.heldout = TINY / "calib.txt", TINY / "eval.txt"
    return args


def as_json(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
