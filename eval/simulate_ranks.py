"""How long calibrating and converting large models takes on several GPUs, computed, not measured.

    python eval/simulate_ranks.py [--results FOLDER]
    python eval/simulate_ranks.py --table docs/large-models.md

Rates of one H200 come from eval/results (`rates`); the disk and the links are assumed. Layer after
layer, 128 x 2048 tokens: the larger of reading it and of what is computed. That is two forwards of
all batches (to observe, and for the next layer), Hessians, the statistics of all ranks sent to
those that search, searches with their errors as `fp4pass.distributed.divide` divides them (the
slowest rank), and packed layers sent to all. Experts of a mixture are chosen evenly. Attention
itself, quantizing inputs and the host are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import write_between

from fp4pass.distributed import divide
from fp4pass.methods import METHODS

TOKENS = 128 * 2048
SIZES = (1, 2, 8)

# Assumed: bytes a second of a disk, and of what a GPU sends.
DISK, LINK = 5e9, 300e9

BF16, PACKED = 2, 4.5 / 8  # bytes of a weight


@dataclass(frozen=True)
class Weight:
    """A linear [N, K], or a stack of experts; those of one input are given once with its width."""

    rows: int
    columns: int
    reads: str  # the input: weights with the same share its Hessian
    experts: int = 0
    active: int = 1  # experts of a token

    @property
    def size(self) -> int:
        return self.rows * self.columns * max(self.experts, 1)


@dataclass(frozen=True)
class Rates:
    """What one GPU does in a second, or what it takes for it."""

    forward: float  # operations of a whole model
    hessian: dict[int, float]  # operations of whole Hessians, by columns
    exact: float  # operations of float32 products, of the errors
    factor: float  # seconds of gptq for columns^3
    visit: tuple[float, float]  # seconds of gptq for a weight, and for it times the columns
    blocks: float  # seconds of `hessian` for a weight
    linear: float  # and for a linear

    def hessian_seconds(self, tokens: float, columns: int) -> float:
        nearest = min(self.hessian, key=lambda known: abs(math.log(known / columns)))
        return 2 * tokens * columns**2 / self.hessian[nearest]


def rates(results: Path) -> Rates:
    """Read the rates from measurements of one H200."""

    def read(name: str) -> dict:
        return json.loads((results / f"{name}-h200.json").read_text())

    whole, summed = read("convert"), read("hessian")
    config = whole["config"]
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * heads * config["head_dim"] + 3 * hidden * wide
    weights = config["num_hidden_layers"] * layer
    batches, *shape = whole["tokens"]
    operations = 2 * batches * math.prod(shape) * (weights + config["vocab_size"] * hidden)
    sums = [row for row in summed["rows"] if row["dtype"] == "bfloat16"]
    work = {row["columns"]: 2 * summed["tokens"] * row["columns"] ** 2 for row in sums}
    speed = {
        (row["columns"], row["products"]): work[row["columns"]] / row["us"] * 1e6 for row in sums
    }
    gptq = [row for row in read("gptq")["rows"] if row["format"] == "nvfp4"]
    largest = max(gptq, key=lambda row: row["shape"][1])
    factor = largest["stages"]["factorization"] / largest["shape"][1] ** 3
    points = [
        (columns, (row["seconds"] - factor * columns**3) / (rows * columns))
        for row in gptq
        for rows, columns in [row["shape"]]
    ]
    search = next(
        row for row in read("kernels")["rows"] if row["row"] == "search/hessian/nvfp4/2560x9728"
    )
    blocks = search["us"] * 1e-6 / (2560 * 9728)
    found = next(
        row for row in whole["converting"] if row["method"] == "hessian" and row["weight_only"]
    )
    return Rates(
        forward=operations / whole["observing"]["plain_seconds"],
        hessian={columns: speed[columns, "bfloat16"] for columns in work},
        exact=speed[max(work), "float32"],
        factor=factor,
        visit=line_through(points),
        blocks=blocks,
        linear=(found["seconds"] - blocks * weights) / found["linears"],
    )


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return height and slope of the line of least squares."""
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return y - slope * x, slope


def dense(hidden: int, heads: int, wide: int) -> list[Weight]:
    """The linears of a decoder layer with 8 heads of 128 columns for keys and values."""
    return [
        Weight(heads * 128, hidden, "attention"),
        *[Weight(1024, hidden, "attention")] * 2,
        Weight(hidden, heads * 128, "o"),
        *[Weight(wide, hidden, "mlp")] * 2,
        Weight(hidden, wide, "down"),
    ]


def deepseek(mixture: bool) -> list[Weight]:
    """The linears of a layer of DeepSeek-V3: dense, or 256 experts of which 8 are chosen."""
    wide = 2048 if mixture else 18432
    layer = [
        Weight(1536, 7168, "attention"),
        Weight(576, 7168, "attention"),
        Weight(24576, 1536, "q"),
        Weight(32768, 512, "kv"),
        Weight(7168, 16384, "o"),
        *[Weight(wide, 7168, "mlp")] * 2,
        Weight(7168, wide, "down"),
    ]
    if mixture:
        layer += [Weight(4096, 7168, "experts", 256, 8), Weight(7168, 2048, "gated", 256, 8)]
    return layer


# Of a model: its layers, and how many there are of each.
MODELS = {
    "Qwen3-32B": [(dense(5120, 64, 25600), 64)],
    "Llama-3.1-405B": [(dense(16384, 128, 53248), 126)],
    "DeepSeek-V3": [(deepseek(False), 3), (deepseek(True), 58)],
}


def seconds(layer: Sequence[Weight], method: str, size: int, known: Rates, shared: bool) -> float:
    """Return how long a layer takes on so many GPUs; `shared`: rows and experts are divided."""
    multiplied = sum(each.size * each.active / max(each.experts, 1) for each in layer)
    computed = 2 * 2 * TOKENS * multiplied / known.forward / size
    inputs = {each.reads: each for each in layer}.values()
    if method == "gptq":
        plain = [each.columns for each in inputs if not each.experts]
        computed += sum(known.hessian_seconds(TOKENS, columns) for columns in plain) / size
    jobs = [job(each, method, known, shared) for each in layer]
    loads = [0.0] * size
    sent = 0.0
    for weight, (first, parts), owners in zip(layer, jobs, divide(jobs, size), strict=True):
        for part, rank in zip(parts, owners, strict=True):
            loads[rank] += part
        for rank in set(owners):
            loads[rank] += first
        # Of each other rank to the one that sums, and from there to who shares the weight.
        total = statistics_bytes(weight, method)
        terms = (size - 1) / size if weight.experts and method == "gptq" else size - 1
        sent += total * (terms + len(set(owners)) - 1)
    sent += PACKED * sum(each.size for each in layer) * (size > 1)
    computed += max(loads) + sent / LINK
    return max(computed, BF16 * sum(each.size for each in layer) / DISK)


def job(weight: Weight, method: str, known: Rates, shared: bool) -> tuple[float, Sequence[float]]:
    """Return what a search costs everyone who does a part, and what its parts cost."""
    matrix, columns = weight.rows * weight.columns, weight.columns
    if method != "gptq":
        parts = [known.blocks * matrix] * max(weight.experts, 1)
        return known.linear, parts if shared else [sum(parts)]
    height, slope = known.visit
    # Whole Hessians make the errors, too, of the weight and of its difference.
    visit = height + slope * columns + 4 * columns / known.exact
    factor = known.factor * columns**3
    if weight.experts:
        # Their Hessians are made where they are searched; the average is of all tokens.
        tokens = TOKENS * weight.active / weight.experts
        one = visit * matrix + factor + known.hessian_seconds(tokens, columns)
        first, parts = known.hessian_seconds(TOKENS, columns), [one] * weight.experts
    else:
        step = METHODS["gptq"].rows_at_once or weight.rows
        counts = [min(step, weight.rows - start) for start in range(0, weight.rows, step)]
        first, parts = factor, [visit * count * columns for count in counts]
    return first, parts if shared else [sum(parts)]


def statistics_bytes(weight: Weight, method: str) -> float:
    """Return the bytes of the statistics of a weight, those of all ranks where they are inputs."""
    if method != "gptq":
        return 4 * 32 * weight.columns * max(weight.experts, 1)
    if weight.experts:
        copies = weight.active if weight.reads == "gated" else 1
        return BF16 * TOKENS * weight.columns * copies
    return 4 * weight.columns**2


def minutes(model: str, method: str, size: int, known: Rates, shared: bool = True) -> float:
    """Return how long a model takes on so many GPUs."""
    kinds = MODELS[model]
    return sum(seconds(layer, method, size, known, shared) * n for layer, n in kinds) / 60


def table(known: Rates) -> str:
    """Return the rates, and the minutes of each model and method."""
    hessian = ", ".join(f"{rate / 1e12:.0f} for K = {k}" for k, rate in known.hessian.items())
    height, slope = known.visit
    lines = [
        f"Of one H200: {known.forward / 1e12:.0f} TFLOP/s in a forward; whole Hessians {hessian}, "
        f"and their errors {known.exact / 1e12:.0f} TFLOP/s; `gptq` N K ({height:.2g} + "
        f"{slope:.2g} K) + {known.factor:.3g} K^3 s; `hessian` {known.blocks:.2g} s a weight and "
        f"{1e3 * known.linear:.1f} ms a linear. Assumed: a disk of {DISK / 1e9:.0f} GB/s, links of "
        f"{LINK / 1e9:.0f} GB/s.",
        "",
        f"| minutes on {' / '.join(map(str, SIZES))} GPUs | {' | '.join(MODELS)} |",
        f"| --- |{' ---: |' * len(MODELS)}",
    ]
    for method, shared in (("hessian", True), ("gptq", True), ("gptq", False)):
        title = f"`{method}`" + ("" if shared else ", a weight to each process")
        cells = [
            " / ".join(f"{minutes(model, method, size, known, shared):.1f}" for size in SIZES)
            for model in MODELS
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parent / "results"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--table", type=Path, metavar="PAGE", help="rewrite the table of this page")
    args = parser.parse_args()
    text = table(rates(args.results))
    if args.table:
        write_between(args.table, "eval/simulate_ranks.py", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
