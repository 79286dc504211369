"""Time the digests by which a stream folder knows its layers, beside convert(stream=) by `sse`.

    python eval/bench_identity.py [--device cuda] [--home cpu|cuda] [--layers 4] [--width 8192]
        [--repeats 2] [--json FILE]

A layer has matrices of width x width, 3 width x width and width x 3 width in bfloat16. --device is
where layers are worked on, --home where the model lies before. Each repeat converts a fresh copy,
and the model again, whose layers are then taken from the folder. Only the first call of a process
compiles kernels. The time of identifying includes waiting for the layer to come to the device.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import command, machine
from torch import Tensor, nn

import fp4pass
from fp4pass.engine.engine import Engine


class Block(nn.Module):
    """A layer of three products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.mix(self.norm(x))))


def main() -> None:
    args = parse_args()
    spent = 0.0
    identify = Engine._identity

    def synchronize() -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()

    def timed(*given: Any) -> str:
        nonlocal spent
        synchronize()
        begin = time.perf_counter()
        found = identify(*given)
        synchronize()
        spent += time.perf_counter() - begin
        return found

    Engine._identity = timed  # type: ignore[method-assign]
    rows: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        torch.manual_seed(repeat)
        with torch.device(args.home):
            model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
        model.bfloat16().eval()
        size = sum(x.nbytes for x in model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            for is_again in (False, True):
                each = model if is_again else copy.deepcopy(model)
                spent = 0.0
                synchronize()
                begin = time.perf_counter()
                options = {"weight_only": True, "stream": folder, "device": args.device}
                fp4pass.convert(each, "nvfp4", "sse", **options)
                synchronize()
                seconds = time.perf_counter() - begin
                rows.append(
                    {
                        "repeat": repeat,
                        "taken_from_the_folder": is_again,
                        "bytes": size,
                        "seconds": round(seconds, 4),
                        "identifying": round(spent, 4),
                        "share": round(spent / seconds, 4),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    about = machine(args.device)
    result = {"command": command(None), "machine": about["device"], "versions": about["versions"]}
    if args.json:
        args.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--home", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
