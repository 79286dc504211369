"""Share options, clocks, random data and models, and the table of a page, among benchmarks.

A benchmark is a list of cases. It measures them into a JSON file of eval/results, and with --table
it writes that file into a page, without a GPU. --tiny is a rehearsal that also runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eval.pages.tables import write_between
from eval.record import RESULTS, Row

Call = Callable[[], Any]

# What one H200 reaches: bytes that move, and multiplications and additions in bfloat16.
BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6

# What empties L2 before a cold call, for 0.25 ms: long enough for the host to enqueue the call.
FLUSHED_BYTES, COLD_CALLS = 1 << 30, 100

# Graphs that take so long are replayed in bursts with pauses before them: long rows are bound by
# the clock, which falls with heat, also the heat of the row before.
HOT_US, BURST, REST_SECONDS = 1000, 8, 0.1
# Seconds of other work before steps of models.
WARM_SECONDS = 0.5

# More than three times the L2 cache of an H200, 60 MB.
ROTATED_BYTES = 180_000_000

QWEN3_4B: Row = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
QWEN3_30B_A3B: Row = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
# Sizes of a rehearsal.
TINY: Row = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}


def parser_for(document: str | None, results: str) -> argparse.ArgumentParser:
    """Return the options that every benchmark has; `results` names its file in eval/results."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, nargs="+", default=[RESULTS / results])
    parser.add_argument("--table", type=Path, metavar="PAGE", help="write the table into a page")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal; any device")
    return parser


def write_table(args: argparse.Namespace, script: str, table: Callable[[Any], str]) -> bool:
    """Write the tables of the files into the page, if one was asked for; return whether it was."""
    if args.table is None:
        return False
    read = [json.loads(path.read_text("utf-8")) for path in args.json]
    write_between(args.table, script, "\n".join(map(table, read)))
    return True


# ---- clocks -----------------------------------------------------------------------------------


def device() -> torch.device:
    """Return the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Call) -> float:
    """Return the seconds of a call, until the device is done."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def cold_us(calls: Sequence[Call]) -> float:
    """Return the median microseconds of the first call with an empty L2."""
    if not torch.cuda.is_available():
        return 1e6 * seconds(calls[0])
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(3):
        calls[0]()
    for _ in range(COLD_CALLS):
        flush.zero_()
        times.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        times[-1][0].record()
        calls[0]()
        times[-1][1].record()
    synchronize()
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in times)


def graph_us(calls: Sequence[Call]) -> float:
    """Return the median microseconds of a call, in one CUDA graph that goes around `calls`."""
    if not torch.cuda.is_available():
        return 1e6 * seconds(calls[0])
    count = max(24, len(calls))

    def around() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    again = captured(around, calls[:3])

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        again()
        end.record()
        synchronize()
        return 1e3 * begin.elapsed_time(end)

    first = replay()
    times = []
    for i in range(min(40, max(7, round(1e5 / first)))):
        if first > HOT_US and i % BURST == 0:
            time.sleep(REST_SECONDS)
        times.append(replay())
    return statistics.median(times) / count


def captured(call: Call, before: Sequence[Call] = ()) -> Call:
    """Return what replays a call as one CUDA graph; without a GPU the call.

    The host does little between replays, whatever a call costs it. `before` compiles and warms what
    is captured: by default the call, three times.
    """
    if not torch.cuda.is_available():
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in before or (call,) * 3:
            each()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads go on, as that of NCCL.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    replay: Call = graph.replay
    return replay


def warm() -> None:
    """Keep a GPU busy until its clock is what it is under load: compiling left it idle."""
    if torch.cuda.is_available():
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        end = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < end:
            x @ x
            synchronize()


def alternating(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Return the median seconds of calls that run in turn, so that other work falls on all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            taken = seconds(call)
            if repeat >= 2:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def peak_bytes(call: Call) -> int | None:
    """Return the most bytes that a call allocates on the GPU beyond those before; None without."""
    if not torch.cuda.is_available():
        call()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- data -------------------------------------------------------------------------------------


def heavy_tailed(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return weights in float32: Student's t with 5 degrees of freedom, times 0.02."""

    def normal() -> Tensor:
        return torch.randn(tuple(shape), generator=generator, device=generator.device)

    chi2 = normal().square_()
    for _ in range(4):
        chi2 += normal().square_()
    return normal().mul_(0.02).mul_(chi2.div_(5).rsqrt_())


def weight_like(shape: Sequence[int]) -> Tensor:
    """Return one heavy-tailed weight in bfloat16, the same at each call."""
    return heavy_tailed(shape, torch.Generator(device()).manual_seed(0)).bfloat16()


def activations_like(shape: tuple[int, int]) -> Tensor:
    """Return inputs in bf16: low rank plus noise, correlated neighbours, log-normal channels."""
    tokens, columns = shape
    rank, where = min(64, columns), device()
    mixed = torch.randn(tokens, rank, device=where) @ torch.randn(rank, columns, device=where)
    x = torch.randn(shape, device=where) + mixed / rank**0.5
    x += 0.5 * x.roll(1, dims=1)
    return (x * torch.randn(columns, device=where).mul_(0.7).exp_()).bfloat16()


def rotated(total: int) -> int:
    """Return how many buffers of `total` bytes to go around, so that L2 holds none."""
    return max(2, math.ceil(ROTATED_BYTES / total)) if torch.cuda.is_available() else 2


def token_batches(vocabulary: int, count: int, rows: int, length: int) -> list[Tensor]:
    """Return batches of random tokens."""
    generator = torch.Generator(device()).manual_seed(1)
    shape, where = (rows, length), device()
    return [
        torch.randint(vocabulary, shape, generator=generator, device=where) for _ in range(count)
    ]


def random_model(kind: str, config: Row, where: torch.device | None = None) -> Any:
    """Return a model of transformers in bf16 whose matrices are heavy-tailed.

    Args:
        kind: the model type, as "qwen3".
        config: the fields of its config.
        where: the device; by default the GPU where there is one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    where = where or device()
    with torch.device("meta"):
        made = AutoConfig.for_model(kind, **config)
        empty = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    rotary = empty.model.rotary_emb
    model = empty.to_empty(device=where)
    # Tables that are computed, not stored.
    model.model.rotary_emb = type(rotary)(config=model.config).to(where)
    model.tie_weights()
    generator = torch.Generator(where).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            # The weights of experts one after the other: memory holds few float32 copies.
            for part in [parameter] if parameter.ndim < 3 else parameter:
                if part.ndim == 2:
                    part.copy_(heavy_tailed(part.shape, generator))
    return model.eval()


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared ones count once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(map(storage_bytes, tensors.values()))


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor here; of one that wraps others, and of bitsandbytes' scales."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(storage_bytes(getattr(tensor, each)) for each in names)
    state = getattr(tensor, "quant_state", None)
    return tensor.nbytes + (0 if state is None else state.absmax.nbytes)


# ---- cells ------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Return microseconds with three digits or so, "" if there are none."""
    if value is None:
        return ""
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
