"""A model that is larger than memory, layer by layer: seconds and memory of quantize_checkpoint.

    python eval/bench_stream.py FOLDER [--layers 32] [--windows 64] [--seconds S] [--json FILE]

FOLDER gets a model whose layers are shaped as those of Qwen3-32B (about 1 GB each in bf16), with
heavy-tailed random weights, a file for each layer, and a vocabulary of 8192. Then, in one process:

- compute: convert with all weights on the GPU, of 2 and of 4 layers; the difference is that of two
  layers, and what all layers would take follows from it;
- reading: every layer is brought to the GPU, the next one ahead, and nothing is computed;
- total: quantize_checkpoint by `hessian`, inputs in 4 bits too, on windows of 2048 random tokens,
  8 at once, and its parts: loading, calibrate, convert, save.

Before reading and before the total the kernel is asked to drop the files from the page cache
(posix_fadvise), which it may not do: files that were just written may be read from memory. GPU
memory is the most that was allocated in the total. Host memory is that of the process beyond the
page cache (anonymous and shared pages), sampled every 20 ms. The JSON is written after each step.
--tiny is a rehearsal that also runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from bench_convert import heavy_tailed, make_batches, seconds
from measuring import command, machine
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

import fp4pass
from fp4pass import from_disk
from fp4pass.float_models import load_float
from fp4pass.quantization.placing import Places

QWEN3_32B: dict[str, Any] = {
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
TINY = QWEN3_32B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
BATCH = 8


def main() -> None:
    args = parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    config = TINY if args.tiny else QWEN3_32B
    length = 32 if args.tiny else 2048
    about = machine(device.type)
    about["versions"] |= {"triton": triton.__version__}
    result: dict[str, Any] = {
        "command": command(None),
        "machine": about["device"],
        "cpus": os.cpu_count(),
        "versions": about["versions"],
        "config": config,
        "calibration": [args.windows, length],
        "batch": BATCH,
        "steps": {},
    }
    begin = time.perf_counter()

    def note(step: str, **found: Any) -> None:
        result["steps"][step] = found
        told = "  ".join(f"{key} {value}" for key, value in found.items())
        print(f"{time.perf_counter() - begin:6.0f} s  {step}: {told}", flush=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")

    source = args.folder / "model"
    start = time.perf_counter()
    layers = write_model(source, config, args.layers, device, start + 0.3 * args.seconds)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    note("write", seconds=round(time.perf_counter() - start, 2), bytes=size, layers=layers)

    rows = make_batches(config, torch.device("cpu"), args.windows, 1, length)
    # The first alone: it runs through two layers on the CPU.
    batches = [rows[0], *(torch.cat(rows[i : i + BATCH]) for i in range(1, len(rows), BATCH))]
    in_memory(part_of(source, 2), batches[:2], device)
    two, four = (in_memory(part_of(source, count), batches, device) for count in (2, 4))
    gc.collect()
    layer = (four - two) / 2
    note("compute", two_layers=two, four_layers=four, a_layer=layer)

    dropped = drop_cached(source)
    reading = timed(lambda: read(source, device))
    note("reading", seconds=reading, cache_dropped=dropped, layers=layers)
    gc.collect()

    left = args.seconds - (time.perf_counter() - begin)
    fitting = min(layers, int(left / (1.4 * max(reading / layers, layer))))
    if fitting < layers:
        reading *= fitting / layers
        source, layers = part_of(source, fitting), fitting
    compute = two + (layers - 2) * layer
    drop_cached(source)
    out = args.folder / "out"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with parts() as spent, sampled() as memory:
        total = timed(
            lambda: fp4pass.quantize_checkpoint(
                source,
                out,
                method="hessian",
                data=batches,
                device=device,
                overwrite=True,
                progress=False,
            )
        )
    found = {"layers": layers, "seconds": total, **spent, **memory}
    found |= {"reading_alone": round(reading, 2), "compute_alone": round(compute, 2)}
    if gpu:
        found["gpu_bytes"] = torch.cuda.max_memory_allocated()
    larger = max(reading, compute)
    found["convert_to_larger"] = round(spent["convert"] / larger, 3)
    found["total_to_larger"] = round(total / larger, 3)
    written = {path.stat().st_ino: path.stat() for path in out.glob("*.safetensors")}
    found["written_bytes"] = sum(facts.st_size for facts in written.values())
    note("total", **found)
    if args.clean:
        shutil.rmtree(args.folder)


def write_model(
    folder: Path, config: dict[str, Any], layers: int, device: torch.device, until: float
) -> int:
    """Write a model, made on the device a layer at a time, and written by threads meanwhile.

    Returns how many layers it has: at most `layers`, and no more than fit the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shape = Qwen3Config(**config, num_hidden_layers=1)
        empty = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    like = dict(empty.state_dict())
    generator = torch.Generator(device).manual_seed(0)

    def made(name: str) -> torch.Tensor:
        tensor = torch.ones(like[name].shape, device=device)
        if tensor.ndim == 2:
            tensor = heavy_tailed(tensor, generator)
        return tensor.to(torch.bfloat16).cpu()

    index: dict[str, str] = {}
    within = [name for name in like if name.startswith("model.layers.0.")]
    with ThreadPoolExecutor(4) as pool:
        jobs = []
        count = 0
        for i in range(layers + 1):
            is_layer = i < layers and (i < 4 or time.perf_counter() < until)
            count += is_layer
            names = within if is_layer else [name for name in like if name not in within]
            tensors = {name.replace(".0.", f".{i}.", 1): made(name) for name in names}
            file = f"layer-{i:03}.safetensors" if is_layer else "rest.safetensors"
            index |= dict.fromkeys(tensors, file)
            jobs.append(pool.submit(save_file, tensors, folder / file, {"format": "pt"}))
            del tensors
            if len(jobs) > 6:
                jobs.pop(0).result()
            if not is_layer:
                break
        for job in jobs:
            job.result()
    write_index(folder, index)
    whole = Qwen3Config(**config, num_hidden_layers=count, architectures=["Qwen3ForCausalLM"])
    whole.save_pretrained(folder)
    return count


def write_index(folder: Path, index: dict[str, str]) -> None:
    data = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data))


def part_of(source: Path, layers: int) -> Path:
    """The same model with fewer layers, of the same files."""
    folder = source.with_name(f"first-{layers}")
    if not folder.exists():
        folder.mkdir()
        config = json.loads((source / "config.json").read_text())
        config = {key: value for key, value in config.items() if key != "layer_types"}
        config |= {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        wanted = {f"layer-{i:03}.safetensors" for i in range(layers)}
        wanted.add("rest.safetensors")
        write_index(folder, {name: file for name, file in index.items() if file in wanted})
        for file in wanted:
            (folder / file).hardlink_to(source / file)
    return folder


def in_memory(folder: Path, batches: list[torch.Tensor], device: torch.device) -> float:
    """The seconds of convert with all weights on the device."""
    model = load_float(str(folder), "auto", "cpu").to(device)
    fp4pass.prepare(model, "hessian", sequential=True)
    fp4pass.calibrate(model, batches, progress=False)
    return timed(lambda: fp4pass.convert(model, device=device))


def read(folder: Path, device: torch.device) -> None:
    """Bring every layer to the device, the next one ahead."""
    model = load_float(str(folder), "auto", "cpu")
    layers = list(model.model.layers)
    places = Places(device, keeps=False)
    for layer in layers[:2]:
        places.read(layer)
    places.fetch(layers[0])
    for i, layer in enumerate(layers):
        with places.placed(layer, str(i)):
            for following in layers[i + 1 : i + 2]:
                places.fetch(following)
            for later in layers[i + 2 : i + 3]:
                places.read(later)
    places.close()


def drop_cached(folder: Path) -> bool:
    """Ask the kernel to drop files from the page cache; whether it took the request."""
    try:
        for path in folder.glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def parts() -> Iterator[dict[str, float]]:
    """The seconds of each part of quantize_checkpoint."""
    spent: dict[str, float] = {}
    names = ("load_float", "calibrate", "convert", "save")
    before = {name: getattr(from_disk, name) for name in names}

    def measured(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return before[name](*args, **kwargs)
            finally:
                spent[name] = round(time.perf_counter() - start, 2)

        return run

    for name in names:
        setattr(from_disk, name, measured(name))
    try:
        yield spent
    finally:
        for name in names:
            setattr(from_disk, name, before[name])


@contextmanager
def sampled() -> Iterator[dict[str, Any]]:
    """The most host memory beyond the page cache, and what it was before."""
    found: dict[str, Any] = {"host_bytes_before": host_bytes(), "host_bytes": 0}
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
        found["host_memory_from"] = "status" if status_bytes() is not None else "smaps"


def host_bytes() -> int:
    found = status_bytes()
    if found is not None:
        return found
    # Kernels that do not say it at once.
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def status_bytes() -> int | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in values:
        return None
    return sum(1024 * int(values[key].split()[0]) for key in ("RssAnon", "RssShmem"))


def timed(function: Callable[[], object]) -> float:
    return round(seconds(function), 2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parent / "results"
    parser.add_argument("folder", type=Path, help="where the model and its output go")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600, help="fewer layers if need be")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--json", type=Path, default=results / "stream-h200.json")
    parser.add_argument("--tiny", action="store_true", help="a small model; any device")
    parser.add_argument("--clean", action="store_true", help="delete the folder at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
