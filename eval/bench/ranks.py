"""Several GPUs of one host: how long quantizing takes on them, and what sharded models need.

    torchrun --nproc-per-node 2 -m eval.bench.ranks [PART ...] [--layers 18] [--json FILE] [--tiny]
    python -m eval.bench.ranks convert [--json FILE]

The second is the same on one GPU. Models are shaped as Qwen3-4B, with heavy-tailed random weights
in bf16; inputs are 64k random tokens, in batches of 4 x 2048. Parts:

- reduce: microseconds of an all-reduce in a CUDA graph, by the memory that the GPUs share and by
  NCCL, of rows of 4096 numbers in bf16; and whether both give the same sums.
- convert: seconds of calibrating and converting by `hessian`, and by `gptq` layer by layer, each
  after a model of two such layers, which compiles; and a digest of all packed weights.
- phases: of `gptq`, the seconds in each step, every one behind a synchronization.
- decode: microseconds of a step of Llama-3-8B's shape in nvfp4a16, one sequence, as
  eval.bench.decode measures it, and a prefill without a cache, compiled and not; each on one GPU
  and split, with 1 and with 5 layers, which all 32 are reckoned from. What Python does between
  steps is left out: `eval.bench.generate --gpus 2` has it.
- stream: seconds of quantize_checkpoint for layers of Qwen3-32B's shape, 64k tokens.
- fsdp: bytes of a converted model before and after `fully_shard`, its logits, a training step of
  LoRA adapters (of norms, without PEFT) and `save`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4pass
from eval.bench.decode import timed
from eval.bench.generate import LLAMA3_8B, PREFILL, PROMPT, SMALL
from eval.bench.harness import (
    QWEN3_4B,
    TINY,
    parser_for,
    random_model,
    seconds,
    synchronize,
    weight_bytes,
)
from eval.bench.stream import QWEN3_32B, drop_cached, write_model
from eval.record import Results, Row, facts
from fp4pass import ops
from fp4pass.parallel import fully_shard, reach_peers

RANK, SIZE = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
FLOWS = {"hessian": False, "gptq": True}
BATCHES, BATCH = 8, (4, 2048)
# Layers of models that decode.
DEPTHS = (1, 5)
# Layers that come from files.
STREAMED = 6
# Reductions in one CUDA graph.
CALLS = 200


def main() -> None:
    args = parse_args()
    where = torch.device("cuda", RANK) if torch.cuda.is_available() else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if SIZE > 1:
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend)
    path = args.json[0] if RANK == 0 else None
    results = Results(path, facts() | {"gpus": SIZE, "layers": args.layers}, again=True)
    for part in args.parts:
        for row in PARTS[part](args, where):
            results.put({"part": part, **row})
            if RANK == 0:
                print(results.rows[-1], flush=True)
    if SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = parser_for(__doc__, "ranks.json")
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=["convert"])
    parser.add_argument("--layers", type=int, default=18)
    return parser.parse_args()


def settled() -> float:
    """Return the time at which all processes are done with what they did."""
    synchronize()
    if SIZE > 1:
        dist.barrier()
    return time.perf_counter()


def build(args: argparse.Namespace, where: torch.device, layers: int) -> Any:
    small = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
    sizes = QWEN3_4B | (small if args.tiny else {}) | {"num_hidden_layers": layers}
    return random_model("qwen3", sizes, where)


def tokens(args: argparse.Namespace, vocabulary: int, where: torch.device) -> list[Tensor]:
    """Return the batches of this process."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 32) if args.tiny else BATCH
    rows = [torch.randint(vocabulary, shape, generator=generator) for _ in range(BATCHES)]
    return [each.to(where) for each in rows[RANK::SIZE]]


def digest(model: nn.Module) -> str:
    """Return a digest of the packed weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.itemsize == 1:
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def reduces(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    mesh = dist.init_device_mesh(where.type, (SIZE,))
    name, near = mesh.get_group().group_name, reach_peers(mesh)
    for rows in (1, 4, 16, 32):
        generator = torch.Generator(where).manual_seed(RANK)
        x = torch.randn(rows, 4096, generator=generator, device=where, dtype=torch.bfloat16)
        own, other = ops.all_reduce(x, name, False), x.clone()
        dist.all_reduce(other)
        largest, all_largest = ops.all_reduce(x.float(), name, True), x.float()
        dist.all_reduce(all_largest, dist.ReduceOp.MAX)
        row: Row = {"rows": rows, "shared_memory": near}
        row["differs"] = float((own.float() - other.float()).abs().max())
        row["max_equal"] = torch.equal(largest, all_largest)
        for by, call in (
            ("own", partial(ops.all_reduce, x, name, False)),
            ("nccl", partial(dist.all_reduce, other)),
        ):
            row[f"{by}_us"] = together_us(call)
        yield row


def together_us(call: Callable[[], object]) -> float:
    """Return the microseconds of a call that all processes make, as often as each other."""
    if not torch.cuda.is_available():
        return 1e6 * seconds(call)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    settled()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(6):
        settled()
        times.append(1e6 * seconds(graph.replay) / CALLS)
    return statistics.median(times[1:])


def calibrated(args: argparse.Namespace, where: torch.device, method: str, layers: int) -> Any:
    model = fp4pass.prepare(build(args, where, layers), method, sequential=FLOWS[method])
    batches = tokens(args, model.config.vocab_size, where)
    begin = settled()
    fp4pass.calibrate(model, batches, progress=False)
    return model, settled() - begin


def converts(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    for method in FLOWS:
        # What compiles, and makes the connections of NCCL.
        fp4pass.convert(calibrated(args, where, method, 2)[0], progress=False)
        model, calibrating = calibrated(args, where, method, args.layers)
        begin = settled()
        fp4pass.convert(model, progress=False)
        converting = settled() - begin
        row = {"method": method, "calibrate_seconds": calibrating, "convert_seconds": converting}
        yield row | {"seconds": calibrating + converting, "digest": digest(model)}
        del model
        gc.collect()


STEPS = {
    "fp4pass.engine.layer_runner.Runner": ("observe", "advance"),
    "fp4pass.quantization.plan": ("summed_statistics", "collect"),
    "fp4pass.quantization.quantize": ("search_parts", "shared_tensors", "with_shared_scales"),
    "fp4pass.distributed.Ranks": ("gather", "exchange", "broadcast"),
}


@contextmanager
def spans() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Yield the seconds and the calls of each step. Steps may be within others."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    undo: list[Callable[[], None]] = []

    def wrap(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            synchronize()
            begin = time.perf_counter()
            try:
                return before(*given, **named)
            finally:
                synchronize()
                spent[name] += time.perf_counter() - begin
                calls[name] += 1

        setattr(owner, name, call)
        undo.append(lambda: setattr(owner, name, before))

    for place, names in STEPS.items():
        module, _, last = place.rpartition(".")
        owner = sys.modules.get(place) or getattr(sys.modules[module], last)
        for name in names:
            wrap(owner, name)
    try:
        yield spent, calls
    finally:
        for each in undo:
            each()


def phases(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    for method in FLOWS:
        model, _ = calibrated(args, where, method, min(args.layers, 4))
        begin = settled()
        with spans() as (spent, calls):
            fp4pass.convert(model, progress=False)
        row = {"method": method, "convert_seconds": settled() - begin}
        own = {name: (round(each, 4), calls[name]) for name, each in spent.items()}
        every: list[Any] = [None] * SIZE
        if SIZE > 1:
            dist.all_gather_object(every, own)
        yield row | {"steps": every if SIZE > 1 else [own]}


def decodes(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    prompt, prefill = (16, (2, 32)) if args.tiny else (PROMPT, PREFILL)
    found: dict[bool, list[Row]] = {False: [], True: []}
    for layers, split in itertools.product(DEPTHS, (False, True) if SIZE > 1 else (False,)):
        sizes = LLAMA3_8B | (SMALL if args.tiny else {}) | {"num_hidden_layers": layers}
        model = random_model("llama", sizes, where)
        fp4pass.convert(model, "nvfp4a16", "naive", progress=False)
        if split:
            fp4pass.parallelize(model, dist.init_device_mesh(where.type, (SIZE,)))
        gc.collect()
        torch.compiler.reset()
        is_profiled = where.type == "cuda" and layers == DEPTHS[-1]
        with torch.no_grad(), redirect_stdout(sys.stdout if RANK == 0 else io.StringIO()):
            step = timed(model, (1, prompt, 1), is_profiled)["step_seconds"]
            ids = torch.randint(256, prefill, device=where)
            row = {"step_us": 1e6 * step}
            for name, each in (("eager_", model), ("", torch.compile(model, fullgraph=True))):
                call = partial(each, ids, logits_to_keep=1, use_cache=False)
                reading = statistics.median([seconds(call) for _ in range(4)][1:])
                row[f"{name}prefill_ms"] = 1e3 * reading
        found[split].append(row)
        yield {"layers": layers, "gpus": SIZE if split else 1} | row
        del model, each, call
    for split, (few, more) in ((split, each) for split, each in found.items() if each):
        count = (LLAMA3_8B["num_hidden_layers"] - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
        row = {name: few[name] + count * (more[name] - few[name]) for name in few}
        step = row.pop("step_us")
        row |= {"all_layers_us": step, "tokens_per_second": 1e6 / step}
        yield {"gpus": SIZE if split else 1} | row


def streams(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    config, length = QWEN3_32B, 2048
    if args.tiny:
        small = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
        config, length = config | small | {"tie_word_embeddings": False}, 32
    with tempfile.TemporaryDirectory() as made:
        shared: list[Any] = [made]
        if SIZE > 1:
            dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        if RANK == 0:
            write_model(folder / "model", config, STREAMED)
        settled()
        generator = torch.Generator().manual_seed(1)
        windows = torch.randint(config["vocab_size"], (32, length), generator=generator)
        batches = list(windows.split(4))[RANK::SIZE]
        options: Row = {"method": "hessian", "data": batches, "device": where, "progress": False}
        for name in ("warm", "from the disk", "from memory"):
            if RANK == 0 and name == "from the disk":
                drop_cached(folder / "model")
            begin = settled()
            fp4pass.quantize_checkpoint(folder / "model", folder / "out", overwrite=True, **options)
            yield {"read": name, "layers": STREAMED, "seconds": settled() - begin}


def with_adapters(model: Any) -> tuple[Any, Any]:
    """Return a model with adapters of PEFT, or whose norms alone are trained, and its layers."""
    torch.manual_seed(5)
    if importlib.util.find_spec("peft") is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model, model.model.layers
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, init_lora_weights=False, target_modules="all-linear")
    model = get_peft_model(model, lora)
    return model, model.base_model.model.model.layers


def allocated(where: torch.device) -> int:
    """Return the bytes of tensors on a GPU, or 0."""
    gc.collect()
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else 0


def shards(args: argparse.Namespace, where: torch.device) -> Iterator[Row]:
    model = build(args, where, args.layers)
    fp4pass.convert(model, "nvfp4a16", "sse", progress=False)
    ids = tokens(args, model.config.vocab_size, where)[0][:1, :512]
    found: Row = {"bytes_whole": weight_bytes(model)}
    with torch.no_grad():
        whole = model(ids).logits.cpu()
    before = allocated(where)
    mesh = dist.init_device_mesh(where.type, (SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # A forward leaves what no layer holds whole, as embeddings, until a backward.
    found["bytes_sharded"] = weight_bytes(model)
    if where.type == "cuda":
        found |= {"allocated_whole": before, "allocated_sharded": allocated(where)}
    with torch.no_grad():
        found["forward_seconds"] = [seconds(lambda: model(ids)) for _ in range(3)][-1]
        found["equal"] = torch.equal(model(ids).logits.cpu(), whole)
    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared)
        found["save_seconds"] = seconds(lambda: fp4pass.save(model, Path(shared[0]) / "out"))
        dist.barrier()
    del model
    model = build(args, where, args.layers)
    model, layers = with_adapters(fp4pass.convert(model, "nvfp4a16", "sse", progress=False))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    losses = []

    def step() -> None:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    found["step_seconds"] = [seconds(step) for _ in range(4)][-1]
    yield found | {"losses": losses}


PARTS: dict[str, Callable[[argparse.Namespace, torch.device], Iterator[Row]]] = {
    "reduce": reduces,
    "convert": converts,
    "phases": phases,
    "decode": decodes,
    "stream": streams,
    "fsdp": shards,
}

if __name__ == "__main__":
    main()
