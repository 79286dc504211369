"""Packed linears and converted language models on a CPU: how fast they run, and what they hold.

    python -m eval.bench.cpu --model examples/tiny_lm --model FOLDER [--json FILE]
    python -m eval.bench.cpu --table docs/performance.md

Times are medians of alternating repeats: the original, the converted model and its compiled code
run in turn, so that what else the machine does falls on all. Products are measured alone first, a
chain of eight linears that no core's cache holds. Memory: the bytes of parameters and buffers
after the last forward, and the most that tensors took at once during a forward beyond them, from
the profiler.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import fp4pass
from eval.bench.harness import Call, alternating, parser_for, weight_bytes, write_table
from eval.pages.tables import number, origin, table
from eval.record import Results, Row, facts

SHAPES = ((1, 1), (1, 128), (8, 512))
FORMATS = ("nvfp4", "mxfp4")
HIDDEN, DEPTH, TOKENS = (512, 2048), 8, (1, 2, 3, 4, 128, 2048)
SHOWN_TOKENS = (1, 128)
DTYPES = (torch.bfloat16, torch.float32)


def main() -> None:
    parser = parser_for(__doc__, "compiled-speed-cpu.json")
    parser.add_argument("--model", action="append", default=[], help="folder of a causal LM")
    parser.add_argument("--repeats", type=int, default=7, help="of the largest forward")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if write_table(args, "eval/bench/cpu.py", page):
        return
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    found = []
    for row in products(args.repeats, (64,) if args.tiny else HIDDEN):
        found.append(row)
        print(row, flush=True)
    results = Results(args.json[0], {**facts("cpu"), "products": found}, again=True)
    results.write()
    for folder, dtype in itertools.product(args.model, DTYPES):
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for fmt, weight_only in itertools.product(FORMATS, (True, False)):
            for row in measure(original, fmt, weight_only, args.repeats):
                results.put({"model": Path(folder).name, "dtype": str(dtype)[6:]} | row)
                print(results.rows[-1], flush=True)


@torch.no_grad()
def products(repeats: int, widths: tuple[int, ...]) -> Iterator[Row]:
    """Yield a row for each width, dtype and number of tokens: microseconds of one linear."""
    for hidden, dtype, tokens in itertools.product(widths, DTYPES, TOKENS):
        torch.manual_seed(0)
        x = torch.randn(tokens, hidden).to(dtype)
        dense = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(DEPTH)))
        calls = both("dense", dense.to(dtype), x)
        for fmt in FORMATS:
            model = fp4pass.convert(copy.deepcopy(dense), fmt, "naive", weight_only=True)
            calls |= both(fmt, model, x)
        times = alternating(calls, repeats * (1 if tokens > 16 else 8))
        us = {name: 1e6 * taken / DEPTH for name, taken in times.items()}
        yield {"hidden": hidden, "dtype": str(dtype)[6:], "tokens": tokens, "us": us}


def both(name: str, model: nn.Module, x: Tensor) -> dict[str, Call]:
    """Return the calls of a model in eager mode, and compiled."""
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
    compiled(x)
    return {name: lambda: model(x), f"{name} compiled": lambda: compiled(x)}


@torch.no_grad()
def measure(original: nn.Module, fmt: str, weight_only: bool, repeats: int) -> Iterator[Row]:
    """Yield a row for each shape of tokens."""
    model = fp4pass.convert(copy.deepcopy(original), fmt, "naive", weight_only=weight_only)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    kinds = {"original": original, "eager": model, "compiled": compiled}
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, original.config.vocab_size, shape, generator=generator)
        calls = {name: lambda m=m, ids=ids: m(ids, use_cache=False) for name, m in kinds.items()}
        # Short forwards suffer most from what else the machine does.
        times = alternating(calls, repeats if shape == SHAPES[-1] else 8 * repeats)
        row: Row = {"format": fmt, "inputs": "float" if weight_only else "4 bit"}
        row |= {"shape": list(shape)} | {f"{k}_ms": 1e3 * taken for k, taken in times.items()}
        row |= {f"{k}_extra_bytes": extra_bytes(calls[k]) for k in ("original", "eager")}
        yield row | {"original_bytes": weight_bytes(original), "bytes_after": weight_bytes(model)}


def extra_bytes(call: Call) -> int:
    """Return the most bytes of tensors at once during a call, beyond those before."""
    with warnings.catch_warnings():
        # It announces that it is not warmed up.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            call()
    changes = [event for event in found.profiler.kineto_results.events() if event.nbytes()]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes), default=0)


def page(result: Row) -> str:
    """Return the table of the page: products beside dense ones."""
    cells = []
    for row in result["products"]:
        if row["tokens"] in SHOWN_TOKENS:
            us = row["us"]
            ratios = [
                f"{us[fmt] / us['dense']:.2f}, {us[f'{fmt} compiled'] / us['dense compiled']:.2f}"
                for fmt in FORMATS
            ]
            first = [str(row["hidden"]), row["dtype"], str(row["tokens"])]
            cells.append([*first, number(us["dense"]), *ratios])
    ratio = [f"{fmt} / dense: eager, compiled" for fmt in FORMATS]
    header = ["hidden", "dtype", "tokens", "dense, us", *ratio]
    return "\n".join([*origin(result), table(header, cells, left=2)])


if __name__ == "__main__":
    main()
