"""What quantizing a mixture of experts costs, by method, and with its routers.

    python -m eval.quality.mixture --model DIR --calib FILE --text FILE [--formats A,B] [--json OUT]
    python -m eval.quality.mixture --table docs/moe.md

Rows are as eval/quality/models.py has them, with the layers that are quantized: the experts alone,
all, all and the routers, or the routers alone; and with the share of the experts that tokens of the
first text still choose. Each is compared with a simpler one on the same tokens. The model is
examples/train_tiny_moe.py's; transformers' router is not a linear layer, so it is made one, which
fp4pass skips unless a rule takes it.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.pages.tables import number, origin, percent, table, with_interval, write_between
from eval.quality import models as quality
from eval.quality.measuring import KEY, require_apart, sizes
from eval.record import RESULTS, Results, facts
from fp4pass.core.formats import get_format
from fp4pass.evaluation import Evaluation, token_windows

FORMATS = ("nvfp4", "mxfp4")
MEASURED = RESULTS / "mixture"

ROUTERS = "*.gate.linear"
# Rules by what is quantized.
LAYERS: dict[str, list[tuple[str, dict[str, Any] | None]]] = {
    "experts": [("*.experts.*", {}), ("*", None)],
    "all": [(ROUTERS, None)],
    "all and routers": [(ROUTERS, {})],
    "routers": [(ROUTERS, {}), ("*", None)],
}

# The method that each is compared with.
SIMPLER = {"sse": "naive", "hessian": "sse", "gptq": "hessian"}


class Case(NamedTuple):
    """A way to convert: which layers, and how."""

    layers: str
    method: str

    def simpler(self) -> list[Case]:
        """Return what it is compared with."""
        found = [Case(self.layers, SIMPLER[self.method])] if self.method in SIMPLER else []
        return found + ([Case("all", self.method)] if self.layers == "all and routers" else [])


def main() -> None:
    args = parse_args()
    if args.table:
        read = [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*-*.json"))]
        write_between(args.table, "eval/quality/mixture.py", page(read))
        return
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = with_linear_routers(model).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for path in args.text:
        require_apart(args.calib, path)
    calib = quality.read(args.calib)
    first = quality.read(args.text[0])
    held_out = token_windows(tokenizer, first, window=args.window, windows=args.error_windows)
    reference = quality.Remembered(model).eval()
    originals = quality.measure(model, None, tokenizer, args)
    bench = Bench(model, reference, tokenizer, args, calib, held_out, originals)
    about = {
        **facts(args.device, model=args.model),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "dtype": "float32",
        "window": args.window,
        "calibration": {"file": args.calib.name, **bench.size()},
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
    results = Results(args.json, about, again=True, key=(*KEY, "layers"))
    for fmt, inputs in itertools.product(args.formats, args.inputs):
        for row in bench.rows(fmt, inputs == "float"):
            results.put(row)
            kept = f"{100 * row['choices_kept']:.2f} % of choices"
            print(f"{quality.line(row)}  {row['layers']}: {kept}", flush=True)
    if args.json is None:
        print(results.text())


def parse_args() -> Any:
    parser = quality.make_parser(__doc__)
    names: dict[str, Any] = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--formats", default=FORMATS, **names)
    parser.add_argument("--inputs", default=("float", "quantized"), **names)
    parser.add_argument("--table", type=Path, help="the page")
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    return args


def cases() -> list[Case]:
    """Return what is measured of each format and kind of inputs, simpler ones first."""
    return [Case(layers, method) for layers in LAYERS for method in ("naive", *SIMPLER)]


@dataclass
class Bench:
    """A model, what remembers its answers, and what is measured of its conversions."""

    model: nn.Module
    reference: nn.Module
    tokenizer: Any
    args: Any
    calib: str
    held_out: Tensor
    originals: dict[str, Evaluation]

    def windows(self, count: int) -> Tensor:
        """So many windows to calibrate on, spread evenly; all if there are fewer."""
        return token_windows(self.tokenizer, self.calib, window=self.args.window, windows=count)

    def size(self) -> dict[str, int]:
        found = self.windows(self.args.samples)
        return {"windows": len(found), "tokens": found.numel()}

    def rows(self, fmt: str, weight_only: bool) -> Iterator[dict[str, Any]]:
        """Yield the row of each case, compared with those before it."""
        before: dict[Case, dict[str, Evaluation]] = {}
        original = choices(self.model, self.held_out)
        batches = self.held_out.split(self.args.batch_size)
        prepared = fp4pass.prepare(copy.deepcopy(self.model), "gptq", rules=[(ROUTERS, {})])
        calib = self.windows(self.args.samples).split(self.args.batch_size)
        fp4pass.calibrate(prepared, calib, progress=False)
        for case in cases():
            converted, rules = copy.deepcopy(prepared), LAYERS[case.layers]
            options = {"weight_only": weight_only, "rules": rules, "progress": False}
            began = time.perf_counter()
            fp4pass.convert(converted, fmt, case.method, **options)
            taken, report = time.perf_counter() - began, fp4pass.report(converted)
            key = (fmt, get_format(fmt).block, weight_only, case.method)
            row: dict[str, Any] = dict(zip(KEY, key, strict=True)) | {"layers": case.layers}
            row |= sizes(report) | {"expert_tokens": spread(report), "convert_seconds": taken}
            row |= quality.layer_errors(converted, self.model, batches, row)
            row["choices_kept"] = kept(choices(converted, self.held_out), original)
            found = quality.measure(converted, self.reference, self.tokenizer, self.args)
            there = {other: before[other] for other in case.simpler()}
            row["texts"] = {
                name: quality.compared(
                    here,
                    self.originals[name],
                    {f"{o.layers}: {o.method}": each[name] for o, each in there.items()},
                )
                for name, here in found.items()
            }
            before[case] = found
            yield row


def spread(report: fp4pass.Report) -> list[float]:
    """The fewest, the median and the most tokens of an expert, over all stacks."""
    found = [row.expert_tokens for row in report.converted if row.expert_tokens]
    if not found:
        return []
    fewest, middle, most = zip(*found, strict=True)
    return [min(fewest), statistics.median(middle), max(most)]


# ---- routers ----------------------------------------------------------------------------------


class LinearRouter(nn.Module):
    """Qwen3-MoE's router with its product in a linear layer, which can be quantized."""

    def __init__(self, router: Any):
        super().__init__()
        self.linear = nn.Linear(router.hidden_dim, router.num_experts, bias=False)
        self.linear.weight = router.weight
        self.top_k, self.normalized = router.top_k, router.norm_topk_prob

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], and the weights and ids [T, k] of the chosen experts."""
        logits = self.linear(hidden.flatten(0, -2))
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids


def with_linear_routers(model: nn.Module) -> nn.Module:
    """Return the model with a LinearRouter in the place of each router."""
    for layer in model.model.layers:
        layer.mlp.gate = LinearRouter(layer.mlp.gate)
    return model


@torch.no_grad()
def choices(model: nn.Module, windows: Tensor) -> list[Tensor]:
    """The experts [T, k] that each router chooses for the tokens of windows [n, window]."""
    found: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, LinearRouter)]
    hooks = [r.register_forward_hook(lambda *call: found.append(call[-1][-1])) for r in routers]
    model(windows.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def kept(found: Sequence[Tensor], original: Sequence[Tensor]) -> float:
    """The share of the experts [T, k] of the original that are chosen still."""
    pairs = zip(found, original, strict=True)
    shares = [(a.unsqueeze(-1) == b.unsqueeze(-2)).any(-2).double().mean() for a, b in pairs]
    return float(torch.stack(shares).mean())


# ---- the page ---------------------------------------------------------------------------------


def page(results: list[dict[str, Any]]) -> str:
    """Return the table: KL by method, with more and more of the layers quantized."""
    cells, names = [], ("experts", "all", "all and routers")
    for found in results:
        rows = {(row["layers"], row["method"]): row for row in found["rows"]}
        for method in ("naive", *SIMPLER):
            here = [rows[layers, method] for layers in names]
            first = here[0]
            (text,) = first["texts"]
            kind = "weights only" if first["weight_only"] else "weights and inputs"
            kls = [with_interval(row["texts"][text]["kl"], number) for row in here]
            kept = [percent(row["choices_kept"]) for row in here[1:]]
            cells.append([f"{first['format']}, {kind}", method, *kls, *kept])
    header = ["format", "method", *(f"KL, {name}" for name in names)]
    header += [f"choices kept, {name}" for name in names[1:]]
    return "\n".join([*origin(results[0]), table(header, cells, left=2)])


if __name__ == "__main__":
    main()
