"""What quantizing a mixture of experts costs: by method, by `expert_prior`, and with its routers.

    python -m eval.quality.mixture --model DIR --calib FILE --text FILE [--formats A,B] [--json OUT]
    python -m eval.quality.mixture --model DIR --calib FILE --text FILE --sweep [--json OUT]

Rows are as eval/quality/models.py has them, with the layers that are quantized: the experts alone, all,
all and the routers, or the routers alone; and with the share of the experts that tokens of the
first text still choose. Each is compared with a simpler one on the same tokens. --sweep is of the
experts alone, nvfp4 with float inputs, for less calibration and other values of `expert_prior`.
The model is examples/train_tiny_moe.py's; transformers' router is not a linear layer, so it is
made one, which fp4pass skips unless a rule takes it.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality import models as quality
from eval.quality.measuring import KEY, Results, command, machine, require_apart, sizes
from fp4pass.core.formats import get_format
from fp4pass.evaluation import Evaluation, token_windows

FORMATS = ("nvfp4", "mxfp4")

# More average tokens than any expert has of its own.
LAYER_ONLY = 1e9

ROUTERS = "*.gate.linear"
# Rules by what is quantized.
LAYERS: dict[str, list[tuple[str, dict[str, Any] | None]]] = {
    "experts": [("*.experts.*", {}), ("*", None)],
    "all": [(ROUTERS, None)],
    "all and routers": [(ROUTERS, {})],
    "routers": [(ROUTERS, {}), ("*", None)],
}

# Windows of --sweep, and values of `expert_prior` by method; None is the default.
WINDOWS = (1, 8, 32)
PRIORS = {
    "hessian": (None, 0.0, 8.0, 128.0, 512.0, LAYER_ONLY),
    "gptq": (None, 0.0, 32.0, 512.0, LAYER_ONLY),
}


@dataclass(frozen=True)
class Case:
    """A way to convert: which layers, how, and calibrated on how many windows."""

    layers: str
    method: str
    prior: float | None
    windows: int

    @property
    def name(self) -> str:
        """The method, with the prior that is not the default."""
        if self.prior is None:
            return self.method
        ends = {0.0: "own only", LAYER_ONLY: "layer only"}
        return f"{self.method}, {ends.get(self.prior, f'prior {self.prior:g}')}"

    def simpler(self) -> list[Case]:
        """What it is compared with."""
        if self.prior is not None:
            found = [Case(self.layers, self.method, None, self.windows)]
        else:
            below = {"sse": "naive", "hessian": "sse", "gptq": "hessian"}.get(self.method)
            found = [Case(self.layers, below, None, self.windows)] if below else []
        if self.layers == "all and routers":
            found.append(Case("all", self.method, self.prior, self.windows))
        return found


def main() -> None:
    args = parse_args()
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
        "command": command(args.model),
        **machine(args.device),
        "model": args.model.name,
        "parameters": model.num_parameters(),
        "dtype": "float32",
        "window": args.window,
        "calibration": {"file": args.calib.name, **bench.size(args.samples)},
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
    results = Results(args.json, about, again=True, key=(*KEY, "layers", "tokens"))
    kinds = [each == "float" for each in args.inputs]
    groups = [("nvfp4", True)] if args.sweep else itertools.product(args.formats, kinds)
    for fmt, weight_only in groups:
        chosen = sweep() if args.sweep else cases(args.samples)
        for row in bench.rows(fmt, weight_only, list(chosen)):
            results.put(row)
            kept = f"{100 * row['choices_kept']:.2f} % of choices"
            seconds = f"{row['convert_seconds']:.1f} + {row['evaluate_seconds']:.1f} s"
            print(f"{quality.line(row)}  {row['layers']}: {kept}, {seconds}", flush=True)
    if args.json is None:
        print(results.text())


def parse_args() -> Any:
    parser = quality.make_parser(__doc__)
    names: dict[str, Any] = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--formats", default=FORMATS, **names)
    parser.add_argument("--inputs", default=("float", "quantized"), **names)
    parser.add_argument("--sweep", action="store_true", help="other calibration and priors")
    args = parser.parse_args()
    args.text = args.text or [quality.TINY / "eval.txt"]
    return args


def cases(windows: int) -> Iterator[Case]:
    """What is measured of each format and kind of inputs, what others are compared with first."""
    for layers in ("experts", "all"):
        for method in ("naive", "sse", "hessian", "gptq"):
            for prior in (None, 0.0, LAYER_ONLY) if method in PRIORS else (None,):
                yield Case(layers, method, prior, windows)
    for layers in ("all and routers", "routers"):
        for method in ("naive", "sse", "hessian", "gptq"):
            yield Case(layers, method, None, windows)


def sweep() -> Iterator[Case]:
    """What is measured with less calibration; `hessian` is compared with `sse`."""
    for windows in WINDOWS:
        yield Case("experts", "sse", None, windows)
        for method, priors in PRIORS.items():
            yield from (Case("experts", method, prior, windows) for prior in priors)


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

    def size(self, count: int) -> dict[str, int]:
        found = self.windows(count)
        return {"windows": len(found), "tokens": found.numel()}

    def rows(self, fmt: str, weight_only: bool, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
        """The row of each case, compared with those before it."""
        prepared: dict[int, nn.Module] = {}
        before: dict[Case, dict[str, Evaluation]] = {}
        original = choices(self.model, self.held_out)
        batches = self.held_out.split(self.args.batch_size)
        for case in chosen:
            if case.windows not in prepared:
                prepared.clear()
                prepared[case.windows] = self.calibrated(case.windows)
            converted = copy.deepcopy(prepared[case.windows])
            began = time.perf_counter()
            fp4pass.convert(
                converted,
                fmt,
                case.method,
                weight_only=weight_only,
                expert_prior=case.prior,
                rules=LAYERS[case.layers],
            )
            converting = time.perf_counter() - began
            report = fp4pass.report(converted)
            row = dict(zip(KEY, (fmt, get_format(fmt).block, weight_only, case.name), strict=True))
            row |= {"layers": case.layers, "tokens": self.size(case.windows)["tokens"]}
            row |= sizes(report) | {"expert_tokens": spread(report)}
            row |= quality.layer_errors(converted, self.model, batches, row)
            row["choices_kept"] = kept(choices(converted, self.held_out), original)
            began = time.perf_counter()
            found = quality.measure(converted, self.reference, self.tokenizer, self.args)
            row |= {"convert_seconds": converting, "evaluate_seconds": time.perf_counter() - began}
            row["texts"] = {
                name: quality.compared(
                    here,
                    self.originals[name],
                    {
                        f"{other.layers}: {other.name}": before[other][name]
                        for other in case.simpler()
                        if other in before
                    },
                )
                for name, here in found.items()
            }
            before[case] = found
            yield row

    def calibrated(self, windows: int) -> nn.Module:
        """A copy that has seen so many windows, with all that any method asks for."""
        prepared = fp4pass.prepare(copy.deepcopy(self.model), "gptq", rules=[(ROUTERS, {})])
        batches = self.windows(windows).split(self.args.batch_size)
        return fp4pass.calibrate(prepared, batches, progress=False)


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


if __name__ == "__main__":
    main()
