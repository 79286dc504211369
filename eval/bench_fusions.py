"""What the passes around products of few rows save: layers of a decoder, compiled, on a GPU.

    python eval/bench_fusions.py [--output FILE] [--compile CASE]

Layers of the shapes of Qwen3-4B and Llama-3-8B without attention, whose output projection reads the
queries: RMSNorm, q, k and v, o, a sum, RMSNorm, gate, up, down, a sum. Their linears are converted,
weights only, and torch.compile runs the passes that a variant names and all others that there were
before. One CUDA graph has them all; the time is that of a layer, the median of rounds in which the
variants take turns, with the least and the most.

Before it is timed each variant is compared with eager: in bfloat16, compiled code that fuses
nothing is a rounding here and there away. --compile N compiles case N and times nothing, so that
processes side by side can fill Inductor's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import command, machine
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4pass
from fp4pass._compat import inductor as compat
from fp4pass.graph.inductor import install

# Columns of the residual, of queries, and of keys or values; columns between gate and down.
SHAPES = {"Qwen3-4B": (2560, 4096, 1024, 9728), "Llama-3-8B": (4096, 4096, 1024, 14336)}
LAYERS = 3
CASES = [
    ("Qwen3-4B", "nvfp4", 1),
    ("Llama-3-8B", "nvfp4", 1),
    ("Qwen3-4B", "nvfp4", 8),
    ("Llama-3-8B", "nvfp4", 8),
    ("Qwen3-4B", "mxfp4", 1),
    ("Qwen3-4B", "nvfp4", 4),
]

AROUND = ("fuse_gates", "fuse_norms")
# The passes of a variant, and whether Inductor's kernels start early.
VARIANTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "none": ((), False),
    "early": ((), True),
    "early, gates": (AROUND[:1], True),
    "early, gates, norms": (AROUND, True),
}
ROUNDS, REPLAYS = 9, 10


class RMSNorm(nn.Module):
    """Llama's."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(columns) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of rows."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """A decoder's layer that attends to nothing."""

    def __init__(self, columns: int, queries: int, keys: int, between: int) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(columns), RMSNorm(columns)
        self.q, self.k = nn.Linear(columns, queries, False), nn.Linear(columns, keys, False)
        self.v, self.o = nn.Linear(columns, keys, False), nn.Linear(queries, columns, False)
        self.gate_proj, self.up_proj = (nn.Linear(columns, between, False) for _ in range(2))
        self.down_proj = nn.Linear(between, columns, False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what goes on, keys and values."""
        y = self.first(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        x = x + self.o(q)
        y = self.second(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), k, v


class Layers(nn.Module):
    """Layers one behind the other, and a norm."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*SHAPES[shape]) for _ in range(LAYERS))
        self.norm = RMSNorm(SHAPES[shape][0])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the last output, and the keys and values of all layers."""
        kept = []
        for layer in self.layers:
            x, k, v = layer(x)
            kept += [k, v]
        return [self.norm(x), *kept]


def kernels_in_turn(graph: fx.Graph) -> int:
    """Change nothing, but the key of Inductor's cache."""
    return 0


@contextmanager
def passes_of(variant: str) -> Iterator[None]:
    """Compile with the passes of a variant."""
    names, early = VARIANTS[variant]
    passes = [p for p in install.PASSES if p.__name__ in names or p.__name__ not in AROUND]
    with patch.object(install, "PASSES", (*passes, *[kernels_in_turn] * (not early))):
        if early:
            yield
        else:
            with patch.object(compat, "_can_start_early", lambda *_: False):
                yield


def measure(shape: str, fmt: str, rows: int, only_compile: bool) -> dict[str, Any]:
    """Return a row of results."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Layers(shape).bfloat16()
        x = torch.randn(rows, SHAPES[shape][0]).bfloat16()
    fp4pass.convert(model, fmt, "naive", weight_only=True)
    expected = torch.cat([each.flatten() for each in model(x)]).float()
    row: dict[str, Any] = {"shape": shape, "format": fmt, "rows": rows, "us": {}, "error": {}}
    calls: dict[str, Callable[[], Any]] = {}
    for variant in VARIANTS:
        torch._dynamo.reset()
        with passes_of(variant):
            compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
            found = torch.cat([each.flatten() for each in compiled(x)]).float()
            if not only_compile:
                graph, kept = captured(compiled, x)
        error = ((found - expected).norm() / expected.norm()).item()
        row["error"][variant] = error
        if error > 0.02:
            raise SystemExit(f"{variant} of {shape}: expected eager's numbers, got {error} off")
        if only_compile:
            print(variant, fp4pass.compile_report())
            continue
        graph.replay()
        replayed = torch.cat([each.flatten() for each in kept]).float()
        if not torch.equal(replayed, found):
            raise SystemExit(f"{variant} of {shape}: a replay gives other numbers")
        calls[variant] = graph.replay
    times: dict[str, list[float]] = {variant: [] for variant in calls}
    for _ in range(ROUNDS):
        for variant, replay in calls.items():
            times[variant].append(_time(replay))
    row["us"] = {
        variant: [round(each, 2) for each in (statistics.median(t), min(t), max(t))]
        for variant, t in times.items()
    }
    return row


def captured(compiled: Callable[[Tensor], Any], x: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of a call, and what it writes."""
    for _ in range(2):
        compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = compiled(x)
    return graph, kept


def _time(replay: Callable[[], Any]) -> float:
    """Return the microseconds of a layer."""
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / REPLAYS / LAYERS


@torch.no_grad()
def main() -> None:
    """Measure all cases, or compile one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", type=int, metavar="CASE")
    given = parser.parse_args()
    if given.compile is not None:
        print(measure(*CASES[given.compile], True))
        return
    results: dict[str, Any] = {"command": command(None), **machine("cuda"), "rows": []}
    for case in CASES:
        results["rows"].append(measure(*case, False))
        print(json.dumps(results["rows"][-1]), flush=True)
        if given.output:
            given.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
