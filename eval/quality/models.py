"""What converting costs a causal language model: every format, block and method, on several texts.

    python -m eval.quality.models [--model DIR --calib FILE --text FILE --text FILE] [--json OUT]

Perplexity, bits per byte, KL, KL in the nucleus and top-1 agreement as `fp4pass.evaluate` has
them, with intervals, in windows that do not overlap; and what is different from each simpler
method of the same format, block and inputs, on the same tokens. Output error is |y - y'| / |y|, a
mean over the linears, on inputs from the first text: `output_error` of the weights alone,
`layer_error` of what the converted layer does, its quantized inputs included.
A text is plain; a line `<|doc|>` separates documents. Calibration takes windows spread evenly over
`--calib`, which shares no document with a text. Without arguments: the model in `examples/tiny_lm`.
What is in OUT already is not measured again, so a run that was killed goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.measuring import (
    KEY,
    calibrated,
    conversions,
    mean,
    require_apart,
    simplest_first,
    unmeasured,
)
from eval.record import Results, facts
from fp4pass.core.formats import FORMATS
from fp4pass.evaluation import Difference, Evaluation, cut_windows, output_errors, token_windows

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
MEASURES = ("perplexity", "bits_per_byte", "kl", "top1")


def opened(args: argparse.Namespace, dtype: Any = "auto") -> tuple[Any, Any]:
    """Return the model and its tokenizer, for texts that the calibration has nothing of."""
    transformers.logging.disable_progress_bar()
    for path in args.text:
        require_apart(args.calib, path)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(args.model)


def main() -> None:
    args = parse_args()
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    model, tokenizer = opened(args, dtype)
    model.to(args.device)
    calib = token_windows(tokenizer, read(args.calib), window=args.window, windows=args.samples)
    first = read(args.text[0])
    held_out = token_windows(tokenizer, first, window=args.window, windows=args.error_windows)

    reference = Remembered(model).eval() if args.remember else model
    originals = measure(model, None, tokenizer, args)
    about = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "window": args.window,
        "calibration": {
            "file": args.calib.name,
            "windows": len(calib),
            "tokens": calib.numel(),
            "digest": cut_windows(None, calib).digest,
        },
        "texts": {
            path.stem: described(path, originals[path.stem], len(cut(tokenizer, path, args)))
            for path in args.text
        },
        "output_error_tokens": held_out.numel(),
        "confidence": originals[args.text[0].stem].confidence,
        "original": {name: measures(found) for name, found in originals.items()},
    }
    results = Results(args.json, about, again=args.again, key=KEY)
    missing = unmeasured(results, model, args.formats, args.methods)
    prepared = calibrated(model, args.methods, calib.split(args.batch_size)) if missing else {}
    for group in tqdm(missing, desc="formats, blocks and inputs", unit="group"):
        simpler: dict[str, dict[str, Evaluation]] = {}
        for row, converted in conversions(prepared, group, args.methods):
            found = measure(converted, reference, tokenizer, args)
            row |= layer_errors(converted, model, held_out.split(args.batch_size), row)
            row["texts"] = {
                text: compared(
                    here, originals[text], {name: there[text] for name, there in simpler.items()}
                )
                for text, here in found.items()
            }
            simpler[row["method"]] = found
            results.put(row)
            tqdm.write(line(row))
    if args.json is None:
        print(results.text())


def measure(
    converted: nn.Module, reference: nn.Module | None, tokenizer: Any, args: argparse.Namespace
) -> dict[str, Evaluation]:
    """A model on every text, by the stem of its file."""
    return {
        path.stem: fp4pass.evaluate(
            converted,
            tokenizer,
            read(path),
            reference,
            window=args.window,
            windows=args.windows,
            batch_size=args.batch_size,
            progress=False,
        )
        for path in args.text
    }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """What is asked of every script that measures conversions of one model."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a causal LM")
    parser.add_argument("--calib", type=Path, default=TINY / "calib.txt", help="to calibrate on")
    parser.add_argument("--text", type=Path, action="append", help="to measure on")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="of each text, evenly spread; all if absent")
    parser.add_argument("--error-windows", type=int, default=8, help="for the output errors")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where results go, a row as soon as it is known")
    parser.add_argument("--again", action="store_true", help="measure what is in --json too")
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names: dict[str, Any] = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--formats", default=list(FORMATS), **names)
    parser.add_argument("--methods", default=simplest_first(), **names)
    parser.add_argument("--dtype", default="auto", help="the model's own if absent")
    parser.add_argument("--remember", action="store_true", help="the original's logits, in memory")
    args = parser.parse_args()
    args.text = args.text or [TINY / "eval.txt"]
    return args


class Remembered(nn.Module):
    """A model that is asked the same again and again, and answers from memory."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.answers: dict[bytes, Any] = {}

    def forward(self, ids: Tensor) -> Any:
        """What the model makes of ids [B, window]."""
        key = ids.numpy(force=True).tobytes()
        if key not in self.answers:
            self.answers[key] = SimpleNamespace(logits=self.model(ids, use_cache=False).logits)
        return self.answers[key]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def cut(tokenizer: Any, path: Path, args: argparse.Namespace) -> Tensor:
    """All windows of a text."""
    return token_windows(tokenizer, read(path), window=args.window)


def described(path: Path, found: Evaluation, windows: int) -> dict[str, Any]:
    return {
        "file": path.name,
        "windows": found.windows,
        "windows_of_the_file": windows,
        "tokens": found.tokens,
        "unit": found.unit,
        "units": found.units,
        "digest": found.digest,
    }


def measures(found: Evaluation) -> dict[str, Any]:
    """Each measure that there is, with the ends of its interval."""
    values = {name: getattr(found, name) for name in MEASURES}
    return {
        name: dict(zip(("value", "low", "high"), (value, *ends(found, name)), strict=True))
        for name, value in values.items()
        if value is not None
    }


def ends(found: Evaluation, name: str) -> tuple[float | None, float | None]:
    return found.intervals.get(name, (None, None))


def compared(
    found: Evaluation, original: Evaluation, simpler: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """The measures, and what changed from the original and from simpler methods."""
    return {
        **measures(found),
        "change": changes(found.difference(original)),
        "against": {name: changes(found.difference(other)) for name, other in simpler.items()},
    }


def changes(difference: Difference) -> dict[str, Any]:
    """What there is of a difference but its confidence."""
    found = difference.to_dict()
    return {name: value for name, value in found.items() if isinstance(value, dict)}


def layer_errors(
    converted: nn.Module, model: nn.Module, batches: Any, row: Mapping[str, Any]
) -> dict[str, float]:
    """Means over the linears; with float inputs a layer errs as its weights do."""
    of_weights = output_errors(converted, model, batches, progress=False)
    if row["weight_only"]:
        of_layers = of_weights
    else:
        of_layers = output_errors(converted, model, batches, activations=True, progress=False)
    return {
        "output_error": mean(list(of_weights.values())),
        "layer_error": mean(list(of_layers.values())),
    }


def line(row: Mapping[str, Any]) -> str:
    """A row for whoever waits."""
    cells = [f"{row['format']}:{row['block']}", "float" if row["weight_only"] else "quantized"]
    cells += [f"{row['method']:8}", f"{100 * row['output_error']:.2f} %"]
    for name, found in row["texts"].items():
        cells.append(
            f"{name}: ppl {found['perplexity']['value']:.4f} KL {found['kl']['value']:.5f}"
        )
    return "  ".join(cells)


if __name__ == "__main__":
    main()
