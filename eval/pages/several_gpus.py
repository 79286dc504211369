"""The tables of docs/large-models.md on several GPUs: what was measured, and larger models by it.

python -m eval.pages.several_gpus --table docs/large-models.md

A layer is read, calibrated, searched and sent as eval.bench.ranks does it; searches are divided by
the functions of the library. Rates are those of its results. Disk and network are assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.pages.memory import QWEN3_4B, gb, read, row
from eval.pages.tables import origin, table, write_between
from fp4pass.core.formats import NVFP4
from fp4pass.distributed import divide
from fp4pass.kernels.search.joint_reference import ROWS
from fp4pass.quantization.plan import search_seconds

ONE, TWO, REDUCE, FSDP, DECODE, *STREAM = (
    f"ranks/{name}.json"
    for name in ("one", "two", "reduce", "fsdp", "decode", "stream-one", "stream-two")
)

TOKENS = 128 * 2048
BITS = 4.5
# Assumed: bytes a second of the disk of a host, and of the network of a GPU (400 Gb/s).
DISK, NETWORK = 5e9, 5e10
# GPUs of a host.
HOST = 8
SIZES = (1, 2, 8, 16, 64)
METHODS = ("hessian", "gptq")
# What a layer's statistics are, by the width of an input.
STATISTICS = {"hessian": lambda k: 128 * k, "gptq": lambda k: 4 * k * k + 128 * k}


@dataclass(frozen=True)
class Linear:
    """Equal matrices [N, K]. A token meets some of them."""

    rows: int
    columns: int
    matrices: int = 1
    chosen: int = 1
    # Whether it is the first of those that read its input.
    observes: bool = True

    @property
    def weights(self) -> int:
        """Of all matrices."""
        return self.rows * self.columns * self.matrices

    @property
    def inputs(self) -> int:
        """The inputs with statistics of their own."""
        return self.matrices if self.observes else 0

    def seconds(self, method: str) -> tuple[float, list[float]]:
        """Return what the library reckons that the search takes."""
        parts: list[Any] = [(i, None) for i in range(self.matrices)]
        if self.matrices == 1 and method == "gptq" and self.rows > ROWS:
            starts = range(0, self.rows, ROWS)
            parts = [(0, slice(a, min(a + ROWS, self.rows))) for a in starts]
        needs = ("hessian",) if method == "gptq" else ("block_hessian",)
        layer: Any = SimpleNamespace(
            columns=self.columns, rows=self.rows, matrices=self.matrices, parts=parts,
            config=SimpleNamespace(needs=needs, format=NVFP4),
        )  # fmt: skip
        return search_seconds(layer)


def decoder(hidden: int, queries: int, keys: int, ffn: int) -> list[Linear]:
    """Return the linears of a dense layer."""
    q, k, v = Linear(queries, hidden), Linear(keys, hidden), Linear(keys, hidden)
    gate = Linear(ffn, hidden)
    return [
        q, *(Linear(x.rows, x.columns, observes=False) for x in (k, v)), Linear(hidden, queries),
        gate, Linear(ffn, hidden, observes=False), Linear(hidden, ffn),
    ]  # fmt: skip


def latent_attention() -> list[Linear]:
    """Return that of DeepSeek-V3."""
    return [
        Linear(1536, 7168), Linear(576, 7168, observes=False), Linear(24576, 1536),
        Linear(32768, 512), Linear(7168, 16384),
    ]  # fmt: skip


def mlp(hidden: int, ffn: int, matrices: int = 1, chosen: int = 1) -> list[Linear]:
    """Return a gated MLP, or experts, whose first products are one matrix."""
    return [Linear(2 * ffn, hidden, matrices, chosen), Linear(hidden, ffn, matrices, chosen)]


DENSE = [*latent_attention(), *mlp(7168, 18432)]
MIXTURE = [*latent_attention(), *mlp(7168, 2048), *mlp(7168, 2048, 256, 8)]

# By name: bytes of a weight in the source, and the layers with their number.
MODELS: dict[str, tuple[int, list[tuple[int, list[Linear]]]]] = {
    "Llama-3.1-70B": (2, [(80, decoder(8192, 8192, 1024, 28672))]),
    "Llama-3.1-405B": (2, [(126, decoder(16384, 16384, 1024, 53248))]),
    "DeepSeek-V3 (FP8)": (1, [(3, DENSE), (58, MIXTURE)]),
}
SMALL = decoder(2560, 4096, 1024, 9728)


@dataclass(frozen=True)
class Rates:
    """Measured: operations and bytes a second of a GPU, and searches beside what is reckoned."""

    forward: float
    hessian: float
    link: float
    searches: dict[str, float]

    @staticmethod
    def measured() -> Rates:
        """Return the rates of the results."""
        hessian, gptq = (row(ONE, part="convert", method=method) for method in METHODS)
        tokens, layers = 8 * 4 * 2048, read(ONE)["layers"]
        passing = 2 * layers * QWEN3_4B.dense_layer * tokens
        forward = passing / hessian["calibrate_seconds"]
        # Of four layers, each searched by one of the processes.
        steps = row(TWO, part="phases", method="gptq")["steps"]
        searching = sum(each["search_parts"][0] for each in steps) / 4
        observing = gptq["convert_seconds"] - layers * searching - 2 * passing / forward
        squares = sum(each.columns**2 for each in SMALL if each.observes)
        sent = sum(STATISTICS["gptq"](each.columns) for each in SMALL if each.observes) / 2
        searches = {"gptq": searching, "hessian": hessian["convert_seconds"] / layers}
        return Rates(
            forward,
            2 * layers * tokens * squares / observing,
            sent / (max(each["exchange"][0] for each in steps) / 4),
            {name: each / busiest(SMALL, name, 1) for name, each in searches.items()},
        )


def busiest(layer: Sequence[Linear], method: str, size: int) -> float:
    """Return the reckoned seconds of the rank that searches longest."""
    jobs = [each.seconds(method) for each in layer]
    loads = [0.0] * size
    for (first, parts), owners in zip(jobs, divide(jobs, size), strict=True):
        for rank in set(owners):
            loads[rank] += first
        for part, rank in zip(parts, owners, strict=True):
            loads[rank] += part
    return max(loads)


def layer_seconds(
    layer: Sequence[Linear], method: str, size: int, rate: Rates, source: int
) -> float:
    """Return how long a layer takes; it is read beside the work on the one before."""
    weights = sum(each.weights for each in layer)
    met = sum(each.rows * each.columns * each.chosen for each in layer)
    link = rate.link if size <= HOST else NETWORK
    work = 2 * 2 * met * TOKENS / size / rate.forward
    if method == "gptq":
        squares = sum(each.columns**2 * each.chosen for each in layer if each.observes)
        work += 2 * squares * TOKENS / size / rate.hessian
    if size > 1:
        kept = sum(sent_bytes(each, method) for each in layer)
        work += kept / link + weights * BITS / 8 / link
    work += rate.searches[method] * busiest(layer, method, size)
    hosts = -(-size // HOST)
    return max(work, weights * source / hosts / DISK)


def sent_bytes(linear: Linear, method: str) -> float:
    """Return the bytes of statistics that processes send each other; of experts, their inputs."""
    if method == "gptq" and linear.matrices > 1:
        return 2 * TOKENS * linear.columns * (1 if linear.observes else linear.chosen)
    return STATISTICS[method](linear.columns) * linear.inputs


def minutes(name: str, method: str, size: int, rate: Rates) -> float:
    source, layers = MODELS[name]
    each = ((count, layer_seconds(layer, method, size, rate, source)) for count, layer in layers)
    return sum(count * seconds for count, seconds in each) / 60


def text() -> str:
    """Return the tables."""
    return "\n".join((measured(), larger()))


def measured() -> str:
    """Return what one GPU and two take."""
    lines = []
    for method in METHODS:
        one, two = (row(name, part="convert", method=method)["seconds"] for name in (ONE, TWO))
        name = f"`{method}`, 18 layers of Qwen3-4B, 64k tokens, s"
        lines.append([name, f"{one:.2f}", f"{two:.2f}", f"{one / two:.2f}"])
    for read_from in ("from the disk", "from memory"):
        found = [row(name, part="stream", read=read_from) for name in STREAM]
        one, two = (each["seconds"] for each in found)
        layers = f"{found[0]['layers']} layers of Qwen3-32B"
        name = f"`hessian`, {layers}, 64k tokens, read {read_from}, s"
        lines.append([name, f"{one:.1f}", f"{two:.1f}", f"{one / two:.2f}"])
    # The rows of all layers have no number of them.
    split = [row(DECODE, part="decode", gpus=n, layers=None) for n in (1, 2)]
    for name, key in (
        ("a compiled step of Llama-3-8B in `nvfp4a16`, one sequence, ms", "all_layers_us"),
        ("its compiled prefill of 8 x 2048 tokens, ms", "prefill_ms"),
        ("the same, eager, ms", "eager_prefill_ms"),
    ):
        one, two = (each[key] / (1e3 if key.endswith("_us") else 1) for each in split)
        lines.append([name, f"{one:.4g}", f"{two:.4g}", f"{one / two:.2f}"])
    compared = table(["", "one GPU", "two", "ratio"], lines, left=1)
    sums = table(
        ["rows of 4096 numbers", "memory that GPUs share, µs", "NCCL, µs"],
        [
            [f"{each['rows']}", f"{each['own_us']:.1f}", f"{each['nccl_us']:.1f}"]
            for each in read(REDUCE)["rows"]
        ],
        left=1,
    )
    what = "Sums over both GPUs in a CUDA graph, bfloat16:"
    layers = " and ".join(str(each["layers"]) for each in read(DECODE)["rows"][::2][:2])
    how = f"Steps and prefills are extrapolated from {layers} layers. Prefills keep no cache.\n"
    return "\n".join([*origin(read(TWO)), compared, how, what, "", sums, sharded()])


def sharded() -> str:
    """Return what FSDP2 takes on two GPUs."""
    found, layers = row(FSDP, part="fsdp"), read(FSDP)["layers"]
    whole, half = (gb(found[f"allocated_{name}"]) for name in ("whole", "sharded"))
    times = [f"{found[f'{name}_seconds']:.1f} s" for name in ("forward", "step", "save")]
    return (
        f"`fully_shard` of {layers} layers of Qwen3-4B's shape in NVFP4: {whole} GB before, {half} "
        "GB on each of two\nGPUs after. Logits keep their bits. A forward of 512 tokens takes "
        f"{times[0]}, a training step of the norms {times[1]},\n`save` {times[2]}.\n"
    )


def larger() -> str:
    """Return what larger models would take."""
    rate = Rates.measured()
    lines = []
    for name, (source, layers) in MODELS.items():
        weights = sum(count * sum(x.weights for x in layer) for count, layer in layers)
        layer = layers[-1][1]
        kept = sum(sent_bytes(each, "gptq") for each in layer)
        facts = [gb(weights * source), gb(weights * BITS / 8), gb(kept)]
        for method in METHODS:
            each = [f"{minutes(name, method, size, rate):.1f}" for size in SIZES]
            lines.append([name, f"`{method}`", *facts, *each])
            facts = ["", "", ""]
    header = ["model", "method", "source, GB", "packed, GB", "statistics of a layer, GB"]
    header += [f"{size}" if size <= HOST else f"{size // HOST} x {HOST}" for size in SIZES]
    return (
        f"Computed: minutes by number of GPUs, layer by layer, {TOKENS:,} tokens, at the rates "
        f"above ({rate.forward / 1e12:.0f} TFLOP/s forward,\n{rate.hessian / 1e12:.0f} for whole "
        f"Hessians, {rate.link / 1e9:.0f} GB/s between GPUs). Assumed: each host reads a part at "
        f"{DISK / 1e9:.0f} GB/s, and\nGPUs of different hosts exchange "
        f"{NETWORK / 1e9:.0f} GB/s.\n\n{table(header, lines, left=2)}"
    )


def main() -> None:
    """Write the tables into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    write_between(parser.parse_args().table, "eval/pages/several_gpus.py", text())


if __name__ == "__main__":
    main()
