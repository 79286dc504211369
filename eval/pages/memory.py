"""The tables of docs/memory-and-time.md: memory and seconds by formula, beside what was measured.

python -m eval.pages.memory --table docs/memory-and-time.md
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.pages.tables import ROOT, table, write_between

RESULTS = ROOT / "eval" / "results"

# Bits of a weight; what is not quantized has DENSE.
BITS = {"nvfp4a16": 4.5, "mxfp4a16": 4.25, "fp8a16": 8.0}
DENSE = 16.0
# 128 windows of 512 tokens, 8 at once: what `quantize` takes by default.
TOKENS, BATCH = 128 * 512, 8 * 512
# Bytes of the memory of `gptq` beside a weight and its Hessian, by K^2.
SEARCH = 44
# Bytes that a layer takes for each token of a batch and each column of its widest product.
FORWARD = 16


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, as its config has them."""

    name: str
    like: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = False
    ffn: int = 0  # of a dense MLP, and of what all tokens share in a mixture
    experts: int = 0
    expert_ffn: int = 0
    chosen: int = 0
    mixtures: int = 0  # layers that have experts
    shared_ffn: int = 0

    @property
    def attention(self) -> int:
        """Weights of the attention of a layer."""
        return self.hidden * self.head * 2 * (self.heads + self.kv_heads)

    @property
    def dense_layer(self) -> int:
        """Weights of a layer without experts."""
        return self.attention + 3 * self.hidden * self.ffn

    @property
    def mixture_layer(self) -> int:
        """Weights of a layer with experts."""
        experts = self.experts * self.expert_ffn + self.shared_ffn
        return self.attention + 3 * self.hidden * experts

    @property
    def quantized(self) -> int:
        """Weights that are quantized."""
        dense = (self.layers - self.mixtures) * self.dense_layer
        return dense + self.mixtures * self.mixture_layer

    @property
    def kept(self) -> int:
        """Weights of embeddings and routers, which are not."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.mixtures * self.hidden * self.experts

    @property
    def inputs(self) -> list[int]:
        """The widths of what the linear layers of a dense layer read: qkv, o, gate and up, down."""
        return [self.hidden, self.heads * self.head, self.hidden, self.ffn]

    def packed(self, bits: float) -> float:
        """Return the bytes of the model with so many bits a weight."""
        return (self.quantized * bits + self.kept * DENSE) / 8

    def at_once(self) -> float:
        """Return the GPU memory of `good`, all layers at once: model and block Hessians."""
        dense = (self.layers - self.mixtures) * sum(self.inputs)
        experts = self.mixtures * (self.hidden + self.expert_ffn) * self.experts
        return self.packed(DENSE) + 128 * (dense + experts)

    def gptq_at_once(self) -> float:
        """Return the GPU memory of `gptq`, all layers of a dense model at once."""
        hessians = sum(4 * columns**2 for columns in self.inputs)
        largest = SEARCH * max(self.inputs) ** 2
        return self.packed(DENSE) + self.layers * hessians + largest

    def by_layer(self, tokens: int, batch: int, *, best: bool = False) -> float:
        """Return the GPU memory of `good` or `best`, layer by layer."""
        layer = self.mixture_layer if self.mixtures else self.dense_layer
        states = 2 * tokens * self.hidden
        widest = max(self.ffn, self.chosen * self.expert_ffn + self.shared_ffn)
        found = 2 * layer * DENSE / 8 + states + FORWARD * batch * widest
        if best:
            hessians = sum(4 * columns**2 for columns in self.inputs)
            found += states + 2 * hessians + SEARCH * max(self.inputs) ** 2
        return found


SHAPES = (
    Shape("1B", "Llama-3.2-1B", 2048, 16, 32, 8, 64, 128256, True, 8192),
    Shape("3B", "Llama-3.2-3B", 3072, 28, 24, 8, 128, 128256, True, 8192),
    Shape("8B", "Llama-3.1-8B", 4096, 32, 32, 8, 128, 128256, False, 14336),
    Shape("14B", "Qwen3-14B", 5120, 40, 40, 8, 128, 151936, False, 17408),
    Shape("32B", "Qwen3-32B", 5120, 64, 64, 8, 128, 151936, False, 25600),
    Shape("70B", "Llama-3.1-70B", 8192, 80, 64, 8, 128, 128256, False, 28672),
    Shape("120B-MoE", "gpt-oss-120b", 2880, 36, 64, 8, 64, 201088, False, 0, 128, 2880, 4, 36),
    Shape(
        "400B-MoE", "Llama-4-Maverick", 5120, 48, 40, 8, 128, 202048, False, 16384, 128, 8192, 1,
        24, 8192,
    ),
)  # fmt: skip
# Those that were measured.
QWEN3_4B = Shape("", "Qwen3-4B", 2560, 36, 32, 8, 128, 151936, True, 9728)
QWEN3_30B = Shape(
    "", "Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 151936, False, 0, 128, 768, 8, 48
)  # fmt: skip


def main() -> None:
    """Write the tables into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True)
    write_between(parser.parse_args().table, "eval/pages/memory.py", text())


def text() -> str:
    """Return the tables."""
    return "\n".join((sizes(), quantizing(), compared()))


def gb(value: float) -> str:
    """Return bytes in GB, with a place below ten."""
    return f"{value / 1e9:.{1 if value < 1e10 else 0}f}"


def sizes() -> str:
    """Return what packed models take."""
    header = ["model", "shape of", "weights, 10^9", "bf16, GB", *(f"`{s}`, GB" for s in BITS)]
    rows = [
        [
            shape.name,
            shape.like,
            f"{(shape.quantized + shape.kept) / 1e9:.1f}",
            gb(shape.packed(DENSE)),
            *(gb(shape.packed(bits)) for bits in BITS.values()),
        ]
        for shape in SHAPES
    ]
    return f"Computed: the packed model.\n\n{table(header, rows, left=2)}"


def quantizing() -> str:
    """Return what quantizing takes."""
    rate = rates()
    flows = ("`good`, at once", "`gptq`, at once", "`good`, by layer", "`best`, by layer")
    rows = []
    for shape in SHAPES:
        dense = not shape.mixtures
        good = rate["good" if dense else "good, mixture"]
        rows.append(
            [
                shape.name,
                gb(shape.at_once()),
                gb(shape.gptq_at_once()) if dense else "-",
                gb(shape.by_layer(TOKENS, BATCH)),
                gb(shape.by_layer(TOKENS, BATCH, best=True)) if dense else "-",
                duration(rate["fast"] * shape.quantized),
                duration(good * shape.quantized),
                duration(rate["gptq"] * shape.quantized) if dense else "-",
            ]
        )
    header = ["model", *(f"{name}, GB" for name in flows), "`fast`", "`good`", "`gptq`"]
    return (
        f"Computed: GPU memory to quantize with {TOKENS:,} tokens, {BATCH:,} at once, and time on "
        "an H200 at the measured rates. A dash\nmeans that no measured run is near enough.\n\n"
        f"{table(header, rows, left=1)}"
    )


def duration(value: float) -> str:
    """Return seconds, or minutes from two on."""
    if value >= 120:
        return f"{value / 60:.0f} min"
    return f"{value:.{1 if value < 10 else 0}f} s"


def read(name: str) -> dict[str, Any]:
    """Return a file of results."""
    return dict(json.loads((RESULTS / name).read_text("utf-8")))


def row(name: str, **keys: Any) -> dict[str, Any]:
    """Return the row of a file of results that has these values."""
    return next(
        dict(each)
        for each in read(name)["rows"]
        if all(each.get(key) == value for key, value in keys.items())
    )


def rates() -> dict[str, float]:
    """Return measured seconds for each quantized weight."""
    fast = row("convert-h200.json", method="sse", weight_only=True)["seconds"]
    whole = row("gptq-model-h200.json", flow="at once")
    mixture = row("mixture-h200.json", by="hessian")
    return {
        "fast": fast / QWEN3_4B.quantized,
        "good": row("stream-h200.json", step="total")["seconds"] / (32 * SHAPES[4].dense_layer),
        "good, mixture": (mixture["calibrate_seconds"] + mixture["convert_seconds"])
        / QWEN3_30B.quantized,
        "gptq": (whole["calibrate_seconds"] + whole["convert_seconds"]) / QWEN3_4B.quantized,
    }


def compared() -> str:
    """Return what the formulas give where it was measured."""
    layer, llama = SHAPES[4], SHAPES[2]
    streamed = read("stream-h200.json")
    windows, length = streamed["calibration"]
    found = [
        (
            f"{shape.like}, `nvfp4a16`, packed",
            shape.packed(4.5),
            row(name, by=by, **model)["weight_bytes"],
            name,
        )
        for shape, name, by, model in (
            (QWEN3_4B, "generate-peers-h200.json", "fp4pass nvfp4", {"model": "Qwen3-4B"}),
            (llama, "generate-peers-h200.json", "fp4pass nvfp4", {"model": "Llama-3-8B"}),
            (QWEN3_30B, "mixture-h200.json", "hessian", {}),
        )
    ]
    name = "mixture-h200.json"
    peak = row(name, by="hessian")["peak_bytes"]
    found.append(("Qwen3-30B-A3B, `good`, at once, GPU", QWEN3_30B.at_once(), peak, name))
    name = "gptq-model-h200.json"
    peak = row(name, flow="at once")["peak_bytes"]
    found.append(("Qwen3-4B, `gptq`, at once, GPU", QWEN3_4B.gptq_at_once(), peak, name))
    name = "gptq-h200.json"
    peak = row(name, shape=[4096, 14336], format="nvfp4")["peak_bytes"]
    found.append(("one weight of 4096 x 14336, `gptq`", SEARCH * 14336**2, peak, name))
    name = "stream-h200.json"
    peak = row(name, step="total")["gpu_bytes"]
    computed = layer.by_layer(windows * length, streamed["batch"] * length)
    found.append(("32 layers of Qwen3-32B, `good`, by layer, GPU", computed, peak, name))
    lines = [
        [
            what,
            f"{value / 1e9:.2f} GB",
            f"{measured / 1e9:.2f} GB",
            f"[{name}](../eval/results/{name})",
        ]
        for what, value, measured, name in found
    ]
    name = "mixture-h200.json"
    seconds = row(name, by="sse")["convert_seconds"]
    lines.append(
        [
            "Qwen3-30B-A3B, `fast`",
            f"{rates()['fast'] * QWEN3_30B.quantized:.1f} s",
            f"{seconds:.1f} s",
            f"[{name}](../eval/results/{name})",
        ]
    )
    return (
        "Measured: random weights of these shapes on an NVIDIA H200. The commands are in the "
        f"files.\n\n{table(['', 'computed', 'measured', 'from'], lines, left=1)}"
    )


if __name__ == "__main__":
    main()
