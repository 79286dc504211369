"""A model that is larger than memory, layer by layer: seconds and memory of quantize_checkpoint.

    python -m eval.bench.stream FOLDER [--layers 32] [--windows 64] [--json FILE] [--clean]

FOLDER gets a model whose layers are shaped as those of Qwen3-32B (about 1 GB each in bf16), with
heavy-tailed random weights, a file for each layer, and a vocabulary of 8192. Then, in one process:
convert with all weights on the GPU, of 2 and of 4 layers, whose difference says what all layers
would take; and quantize_checkpoint by `hessian`, inputs in 4 bits too, on windows of 2048 random
tokens, 8 at once. Before it the kernel is asked to drop the files from the page cache, which it may
not do. Host memory is the most of the process beyond the page cache (anonymous and shared pages),
sampled every 20 ms.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

import fp4pass
from eval.bench.harness import (
    TINY,
    device,
    heavy_tailed,
    parser_for,
    seconds,
    synchronize,
    token_batches,
)
from eval.record import Results, Row, facts

QWEN3_32B: Row = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
BATCH = 8


def main() -> None:
    parser = parser_for(__doc__, "stream-h200.json")
    parser.add_argument("folder", type=Path, help="where the model and its output go")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--clean", action="store_true", help="delete the folder at the end")
    args = parser.parse_args()
    config, length = QWEN3_32B, 2048
    if args.tiny:
        small = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
        config, length = config | small | {"tie_word_embeddings": False}, 32
    about = {"cpus": os.cpu_count(), "config": config, "calibration": [args.windows, length]}
    results = Results(args.json[0], {**facts(), **about, "batch": BATCH}, again=True)

    def note(step: str, **found: Any) -> None:
        results.put({"step": step, **found})
        print(results.rows[-1], flush=True)

    source, out = args.folder / "model", args.folder / "out"
    taken = seconds(lambda: write_model(source, config, args.layers))
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    note("write", seconds=taken, bytes=size, layers=args.layers)
    rows = [each.cpu() for each in token_batches(config["vocab_size"], args.windows, 1, length)]
    # The first alone: it runs through two layers on the CPU.
    batches = [rows[0], *(torch.cat(rows[i : i + BATCH]) for i in range(1, len(rows), BATCH))]
    in_memory(part_of(source, 2), batches[:2])
    two, four = (in_memory(part_of(source, count), batches) for count in (2, 4))
    compute = two + (args.layers - 2) * (four - two) / 2
    note("compute", two_layers=two, four_layers=four, all_layers=compute)
    gc.collect()
    drop_cached(source)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options: Row = {"method": "hessian", "data": batches, "device": device(), "progress": False}
    with sampled() as memory:
        total = seconds(lambda: fp4pass.quantize_checkpoint(source, out, overwrite=True, **options))
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    written = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    note("total", seconds=total, gpu_bytes=gpu, written_bytes=written, **memory)
    if args.clean:
        shutil.rmtree(args.folder)


def write_model(folder: Path, config: Row, layers: int) -> None:
    """Write a model, made on the device a layer at a time, and written by threads meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shape = Qwen3Config(**config, num_hidden_layers=1)
        empty = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    like, generator = dict(empty.state_dict()), torch.Generator(device()).manual_seed(0)

    def made(name: str) -> torch.Tensor:
        size = like[name].shape
        dense = heavy_tailed(size, generator) if len(size) == 2 else torch.ones(size)
        return dense.to(torch.bfloat16).cpu()

    within = [name for name in like if name.startswith("model.layers.0.")]
    index: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        jobs = []
        for i in range(layers + 1):
            names = within if i < layers else [name for name in like if name not in within]
            tensors = {name.replace(".0.", f".{i}.", 1): made(name) for name in names}
            file = f"layer-{i:03}.safetensors" if i < layers else "rest.safetensors"
            index |= dict.fromkeys(tensors, file)
            jobs.append(pool.submit(save_file, tensors, folder / file, {"format": "pt"}))
            if len(jobs) > 6:
                jobs.pop(0).result()
        for job in jobs:
            job.result()
    write_index(folder, index)
    whole = Qwen3Config(**config, num_hidden_layers=layers, architectures=["Qwen3ForCausalLM"])
    whole.save_pretrained(folder)


def write_index(folder: Path, index: dict[str, str]) -> None:
    data = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data))


def part_of(source: Path, layers: int) -> Path:
    """Return a folder of the same model with fewer layers, of the same files."""
    folder = source.with_name(f"first-{layers}")
    if not folder.exists():
        folder.mkdir()
        config = json.loads((source / "config.json").read_text())
        config = {key: value for key, value in config.items() if key != "layer_types"}
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        wanted = {*(f"layer-{i:03}.safetensors" for i in range(layers)), "rest.safetensors"}
        write_index(folder, {name: file for name, file in index.items() if file in wanted})
        for file in wanted:
            (folder / file).hardlink_to(source / file)
    return folder


def in_memory(folder: Path, batches: list[torch.Tensor]) -> float:
    """Return the seconds of convert with all weights on the device."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval().to(device())
    fp4pass.prepare(model, "hessian", sequential=True)
    fp4pass.calibrate(model, batches, progress=False)
    return seconds(lambda: fp4pass.convert(model, device=device(), progress=False))


def drop_cached(folder: Path) -> None:
    """Ask the kernel to drop files from the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextmanager
def sampled() -> Iterator[Row]:
    """Measure the most host memory beyond the page cache, and that of before."""
    found: Row = {"host_bytes_before": host_bytes(), "host_bytes": 0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            found["host_bytes"] = max(found["host_bytes"], host_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        synchronize()


def host_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return 1024 * sum(map(int, sizes))


if __name__ == "__main__":
    main()
