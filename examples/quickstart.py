"""Convert a bfloat16 model to 4 bits, measure it, save it and load it.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B --text wikitext:wikitext-2-raw-v1:test

The model is examples/tiny_lm by default. It is converted to each format by each method, and all are
measured on text that they were not calibrated on. Then one is compiled, checked with lm-eval, saved
and loaded, and it writes some text.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import fp4pass
from fp4pass.evaluation import fast_dtype, output_errors, token_windows

TINY_LM = Path(__file__).parent / "tiny_lm"
TASKS = Path(__file__).parents[1] / "eval" / "quality" / "tasks"
FORMATS, METHODS = ("nvfp4", "mxfp4"), ("naive", "sse", "hessian")

# What is compiled, saved and loaded at the end.
CHOSEN = ("nvfp4", True, "hessian")


def main() -> None:
    args = parse_args()
    require("transformers", extra="hf")
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device).eval()
    calib, held_out = texts(tokenizer, args)
    name = Path(args.model).name
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{name}: {model.num_parameters():,} parameters in {dtype}")
    print(f"calibrates on {calib.numel():,} tokens, measured on {held_out.numel():,} others")

    # 1. Collect what the methods need; this is what a user's own calibration loop would do.
    prepared = fp4pass.prepare(copy.deepcopy(model), method="hessian")
    with fast_dtype(prepared):
        print(f"computes in {str(prepared.dtype).removeprefix('torch.')}\n")
        fp4pass.calibrate(prepared, calib.split(args.batch_size))

    # 2. Convert and measure.
    original = fp4pass.evaluate(model, tokenizer, held_out, progress=False)
    lines = [
        {
            "format": "original",
            "bits": f"{8 * model.dtype.itemsize:.2f}",
            "MB": f"{megabytes(model):.2f}",
            "ppl": f"{original.perplexity:.3f}",
        }
    ]
    options = [(f, w, m) for f in FORMATS for w in (True, False) for m in METHODS]
    # What fp4pass logs stands above the bar.
    with logging_redirect_tqdm():
        for fmt, weight_only, method in tqdm(options, desc="convert and measure", unit="model"):
            converted = copy.deepcopy(prepared)
            began = time.perf_counter()
            fp4pass.convert(converted, fmt, method, weight_only=weight_only)
            seconds = time.perf_counter() - began
            lines.append(measure(converted, model, tokenizer, held_out, original, seconds))
            if (fmt, weight_only, method) == CHOSEN:
                chosen = converted
    print_table(lines)

    # 3. Use one of them.
    print(f"\nFrom here on: {CHOSEN[0]}, {CHOSEN[2]}, weights only.")
    check_compiled(chosen, held_out)
    check_with_lm_eval(chosen, tokenizer, held_out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.save or Path(scratch) / "checkpoint"
        loaded = save_and_load(chosen, tokenizer, folder, held_out)
    print(f"the loaded model writes: {continuation(loaded, tokenizer, held_out)!r}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "a file, or a dataset as path[:config]:split"
    parser.add_argument("--model", default=str(TINY_LM), help="a folder or a hub id")
    parser.add_argument("--text", help=f"to measure on: {where}")
    parser.add_argument("--calib", help=f"to calibrate on: {where}; the start of --text if absent")
    parser.add_argument("--samples", type=int, default=64, help="windows to calibrate on")
    parser.add_argument("--windows", type=int, default=16, help="windows to measure on")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="keep the checkpoint in this new folder")
    return parser.parse_args()


def require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        sys.exit(f"{package} is missing: pip install 'fp4pass[{extra}]'")


# ---- text -------------------------------------------------------------------------------------


def texts(tokenizer: Any, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return windows to calibrate on and others to measure on, both [n, window]."""
    text = args.text or str(TINY_LM / "eval.txt")
    calib = args.calib or (None if args.text else str(TINY_LM / "calib.txt"))
    ids = token_windows(tokenizer, read(text), window=args.window)
    if calib is not None and calib != text:
        first = token_windows(tokenizer, read(calib), window=args.window, windows=args.samples)
    else:
        if len(ids) < 2:
            sys.exit(f"{text} is too short to calibrate and to measure on; give --calib as well")
        first, ids = ids.tensor_split([min(args.samples, len(ids) // 2)])
    return first, token_windows(tokenizer, ids, windows=args.windows)


def read(spec: str) -> str:
    """Return the text of a file, or of `path[:config]:split` of `datasets`."""
    path = Path(spec)
    if path.is_file() and path.suffix not in (".json", ".jsonl"):
        return path.read_text(encoding="utf-8")
    require("datasets", extra="hf")
    import datasets

    datasets.disable_progress_bars()
    if path.is_file():
        rows = datasets.load_dataset("json", data_files=spec, split="train")
    else:
        *names, split = spec.split(":")
        if not names:
            sys.exit(f"{spec} is not a file. A dataset needs its split: {spec}:test")
        rows = datasets.load_dataset(*names, split=split)
    columns = [c for c, f in rows.features.items() if getattr(f, "dtype", "") == "string"]
    if not columns:
        sys.exit(f"{spec} has no column of text, only {', '.join(rows.features)}")
    # As the papers do: all rows in one stream.
    return "\n\n".join(rows["text" if "text" in columns else columns[0]])


# ---- the table --------------------------------------------------------------------------------


COLUMNS = {
    "format": "format",
    "inputs": "inputs",
    "method": "method",
    "bits": "bits",
    "MB": "MB",
    "weight": "weight err",
    "output": "output err",
    "ppl": "perplexity",
    "change": "change",
    "kl": "KL",
    "seconds": "convert",
}


def measure(
    converted: nn.Module,
    model: nn.Module,
    tokenizer: Any,
    held_out: Tensor,
    original: fp4pass.Evaluation,
    seconds: float,
) -> dict[str, str]:
    """Return the cells of one converted model."""
    rows = fp4pass.report(converted).converted
    config = rows[0].config
    assert config is not None, "rows of converted layers have a config"
    result = fp4pass.evaluate(converted, tokenizer, held_out, model, progress=False)
    errors = output_errors(converted, model, [held_out[:4]], activations=True, progress=False)
    weights = [row.weight_error for row in rows]
    sizes = [math.prod(row.shape) for row in rows]
    bits = sum(r.bits * size for r, size in zip(rows, sizes, strict=True)) / sum(sizes)
    return {
        "format": config.fmt,
        "inputs": "float" if config.weight_only else f"{config.format.element.bits} bit",
        "method": config.method_name,
        "bits": f"{bits:.2f}",
        "MB": f"{megabytes(converted):.2f}",
        "weight": f"{100 * sum(weights) / len(weights):.2f} %",
        "output": f"{100 * sum(errors.values()) / len(errors):.2f} %",
        "ppl": f"{result.perplexity:.3f}",
        "change": f"{100 * (result.perplexity / original.perplexity - 1):+.2f} %",
        "kl": f"{result.kl:.4f}",
        "seconds": f"{seconds:.1f} s",
    }


def print_table(lines: list[dict[str, str]]) -> None:
    cells = [list(COLUMNS.values())] + [[line.get(key, "-") for key in COLUMNS] for line in lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    cells.insert(1, ["-" * width for width in widths])
    print()
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        "\nbits: per weight of the converted layers, block scales included"
        "\nMB: of all tensors as they are saved, embeddings included"
        "\ninputs: float keeps them in floating point; 4 bit quantizes the input of each layer too"
        "\nerr: relative error, a mean over the layers; of the output on held-out text"
        "\nKL: of the original from the converted model, in nats per token"
    )


def megabytes(model: nn.Module) -> float:
    """Return the size of the state dict, shared tensors counted once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    return sum(sizes.values()) / 1e6


# ---- using a converted model ------------------------------------------------------------------


@torch.no_grad()
def check_compiled(model: nn.Module, held_out: Tensor) -> None:
    """Compare the compiled model with the one it was made of, on one window."""
    ids = held_out[:1].to(next(model.parameters()).device)
    print("torch.compile: compiles the model ...", flush=True)
    compiled = torch.compile(model, fullgraph=True)
    began = time.perf_counter()
    logits = compiled(ids, use_cache=False).logits.float()
    seconds = time.perf_counter() - began
    eager = model(ids, use_cache=False).logits.float()
    same = (logits.argmax(-1) == eager.argmax(-1)).float().mean().item()
    print(
        f"torch.compile: one graph, {seconds:.0f} s; same likeliest token as eager at "
        f"{100 * same:.1f} % of {ids.numel()} positions, largest difference of a logit "
        f"{(logits - eager).abs().max().item():.2g}"
    )


def check_with_lm_eval(model: nn.Module, tokenizer: Any, held_out: Tensor) -> None:
    """Print bits per byte of some held-out passages, by lm-eval and by fp4pass.evaluate."""
    if importlib.util.find_spec("lm_eval") is None:
        print("lm-eval: skipped, it is missing: pip install 'fp4pass[eval]'")
        return
    passages = tokenizer.batch_decode(held_out[:8, :200].tolist(), skip_special_tokens=True)
    # Each passage alone behind the bos token: what lm-eval does with a document.
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    bits, size = 0.0, 0
    for passage in passages:
        ids = torch.tensor([[start, *tokenizer(passage, add_special_tokens=False)["input_ids"]]])
        alone = fp4pass.evaluate(model, None, ids, progress=False)
        bits += alone.tokens * math.log2(alone.perplexity)
        size += len(passage.encode())
    with tempfile.TemporaryDirectory() as folder, silence():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        text = Path(folder) / "passages.txt"
        text.write_text("\n<|doc|>\n".join(passages), encoding="utf-8")
        found = simple_evaluate(
            # Without it lm-eval takes the softmax in the dtype of the logits.
            model=HFLM(
                pretrained=model, tokenizer=tokenizer, batch_size=4, softmax_dtype="float32"
            ),
            tasks=["tiny_lm_text"],
            task_manager=TaskManager(
                include_path=TASKS, include_defaults=False, metadata={"text": str(text)}
            ),
            bootstrap_iters=0,
            log_samples=False,
        )
    theirs = found["results"]["tiny_lm_text"]["bits_per_byte,none"]
    line = f"lm-eval: {theirs:.4f} bits per byte on {len(passages)} held-out passages; "
    line += f"fp4pass.evaluate: {bits / size:.4f}"
    if abs(theirs - bits / size) > 1e-3 * theirs:
        line += " (they differ if the tokenizer adds a bos token, which lm-eval then has twice)"
    print(line)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide the logs and progress bars of lm-eval."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def save_and_load(model: nn.Module, tokenizer: Any, folder: Path, held_out: Tensor) -> nn.Module:
    """Save and load the model, check that its logits are the same bits, and return it."""
    fp4pass.save(model, folder)
    tokenizer.save_pretrained(folder)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    device = next(model.parameters()).device
    loaded = fp4pass.load(folder).to(device)
    ids = held_out[:1].to(device)
    equal = torch.equal(model(ids).logits, loaded(ids).logits)
    if not equal:
        sys.exit("the loaded model differs from the saved one; please report this")
    print(
        f"saved {weights / 1e6:.2f} MB of tensors; the loaded model has the same logits, bit by bit"
    )
    return loaded


def continuation(model: Any, tokenizer: Any, held_out: Tensor) -> str:
    """Return what the model writes after the first words of a held-out window."""
    ids = held_out[:1, :32].to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
