"""Single layers quantized, measured: what eval/layer_error.py makes tables of.

Weight error is |W - Q| / |W|, output error |W x - Q x| / |W x|, and W4A4 error the same with Q x4,
x4 being x in the format of Q, with the global scale of calibration.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fp4pass import ops
from fp4pass.config import LinearConfig
from fp4pass.core.formats import Format
from fp4pass.core.quant_state import QuantState
from fp4pass.kernels.statistics.naive import HESSIAN_BLOCK, weight_amax
from fp4pass.linear import GLOBAL, PACKED, SCALE, stored_tensors
from fp4pass.methods import Method, Stats, squared_errors
from fp4pass.ops.checks import weight_problem
from fp4pass.quantization.batches import call_arguments
from fp4pass.quantization.observer import Observer, collect
from fp4pass.quantization.plan import LayerPlan, plan_layers
from fp4pass.quantization.quantize import dense_weight, with_shared_scales
from fp4pass.quantization.scale_stats import scale_offsets
from fp4pass.quantization.scan import SkippedLayer

# Bytes of layers that one pass over both texts measures: their weights in float32, and packed as
# every candidate. Hessians come on top. More layers are more passes.
_GROUP = 1 << 32

# Elements of an input or output in float32 at a time, 256 MB; only sums are kept of them.
_CHUNK = 1 << 26

# Synthetic tokens that are made at a time.
_TOKENS = 8192

Sink = Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight [N, K], what calibration saw of its input, and its global scale by format key."""

    name: str
    weight: Tensor
    stats: Stats
    global_scales: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A weight quantized in one way, and the seconds of the search."""

    method: Method
    state: QuantState
    seconds: float


@dataclass(frozen=True)
class Row:
    """One layer in one format by one method; errors are relative.

    predicted_error: the output error that the block Hessians of calibration promise, None without
    them; tokens: that reached the layer; offsets: {steps above the naive scale: blocks}. An error
    is None where there is nothing to be relative to, as with a weight of zeros.
    """

    layer: str
    shape: tuple[int, ...]
    format: str
    block: int
    method: str
    bits: float
    weight_error: float | None
    predicted_error: float | None
    output_error: float | None
    w4a4_error: float | None
    seconds: float
    calibration_tokens: int
    heldout_tokens: int
    offsets: Mapping[int, int]


@dataclass(frozen=True)
class LeftOut:
    """A layer without rows in some formats, or in "all" of them, and why."""

    layer: str
    formats: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What is tried on every layer."""

    formats: Sequence[Format]
    methods: Sequence[Method]
    repeats: int = 3

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of Stats that calibration collects."""
        return tuple(sorted({need for method in self.methods for need in method.needs}))

    @property
    def candidates(self) -> list[tuple[Format, Method]]:
        """What is tried: all formats by all methods that can."""
        pairs = itertools.product(self.formats, self.methods)
        return [(fmt, method) for fmt, method in pairs if not self._refusal(fmt, method)]

    @property
    def left_out(self) -> list[LeftOut]:
        """What is tried on no layer."""
        pairs = itertools.product(self.formats, self.methods)
        return [
            LeftOut("all", f"{fmt.key} {method.name}", reason)
            for fmt, method in pairs
            if (reason := self._refusal(fmt, method))
        ]

    def _refusal(self, fmt: Format, method: Method) -> str:
        if "block_hessian" in method.needs and fmt.block > HESSIAN_BLOCK:
            return f"Hessians are of blocks of {HESSIAN_BLOCK} columns"
        return ""

    @property
    def bytes_per_weight(self) -> float:
        """Of a weight in float32 and packed as every candidate."""
        return 4 + sum(fmt.bits_per_weight for fmt, _ in self.candidates) / 8


class OutputErrors:
    """Sums over the inputs of a layer: |W x|^2, and |W x - Q x|^2, |W x - Q x4|^2 of candidates."""

    def __init__(self, layer: Layer, candidates: Sequence[Candidate]) -> None:
        self.weight = layer.weight.float()
        self.input_amax = layer.stats.input_amax
        self.candidates = candidates
        self.tokens = 0
        device = self.weight.device
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self.lost = torch.zeros(len(candidates), 2, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """x: [..., K] float, an input of the layer."""
        tokens = x.flatten(0, -2)
        self.tokens += len(tokens)
        for part in tokens.split(max(1, _CHUNK // max(self.weight.shape))):
            self._add(part)

    def _add(self, x: Tensor) -> None:
        dense = x.float()
        self.energy += (dense @ self.weight.t()).square_().sum(dtype=torch.float64)
        rounding: dict[str, Tensor] = {}
        for sums, candidate in zip(self.lost, self.candidates, strict=True):
            fmt = candidate.state.format
            if fmt.key not in rounding:
                rounding[fmt.key] = dense - self._quantized(x, fmt)
            quantized = ops.dequantize(*stored(candidate.state), fmt.key, torch.float32)
            y = dense @ (self.weight - quantized).t()
            sums[0] += y.square().sum(dtype=torch.float64)
            # W x - Q x4 = (W - Q) x + Q (x - x4): no difference of two large products.
            y.addmm_(rounding[fmt.key], quantized.t())
            sums[1] += y.square_().sum(dtype=torch.float64)

    def _quantized(self, x: Tensor, fmt: Format) -> Tensor:
        """x as a converted layer rounds it, in float32."""
        divisor = divisor_of(fmt.global_scale_for(self.input_amax), fmt, x.device)
        return ops.dequantize(*ops.quantize(x, divisor, fmt.key), divisor, fmt.key, torch.float32)

    def result(self) -> list[tuple[float | None, float | None]]:
        """The output error and the W4A4 error of each candidate."""
        size = self.energy.sqrt().item()
        return [
            (ratio(alone, size), ratio(both, size)) for alone, both in self.lost.sqrt().tolist()
        ]


def ratio(lost: float, size: float) -> float | None:
    return lost / size if size else None


def divisor_of(global_scale: float, fmt: Format, device: torch.device) -> Tensor | None:
    """The global scale of an input as operators take it: [1] float32, None for formats without."""
    if not fmt.has_global_scale:
        return None
    return torch.tensor([1.0 / global_scale], dtype=torch.float32, device=device)


def stored(state: QuantState) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed codes, scale bits and global scale of a weight, as operators take them."""
    tensors = stored_tensors([state], None)
    return tensors[PACKED], tensors[SCALE].view(torch.uint8), tensors[GLOBAL]


def search(layer: Layer, plan: Plan) -> Iterator[Candidate]:
    """The layer in each of its formats by each method, timed."""
    for fmt, method in plan.candidates:
        if fmt.key not in layer.global_scales:
            continue
        arguments = (layer.weight, layer.stats, fmt, layer.global_scales[fmt.key])
        # The first compiles kernels and fills caches.
        state = method.quantize(*arguments, method.options()).state
        times = []
        for _ in range(plan.repeats):
            synchronize(layer.weight.device)
            began = time.perf_counter()
            method.function(*arguments, method.options())
            synchronize(layer.weight.device)
            times.append(time.perf_counter() - began)
        yield Candidate(method, state, statistics.median(times))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_rows(layer: Layer, errors: OutputErrors) -> list[Row]:
    """The rows of a layer, once its held-out inputs are added."""
    rows = []
    for candidate, (output, w4a4) in zip(errors.candidates, errors.result(), strict=True):
        state = candidate.state
        fmt, blocks = state.format, Stats(layer.stats.block_hessian)
        squares = squared_errors(layer.weight, state, blocks)
        lost, size, output_lost, output_size = map(math.sqrt, (*squares, 0.0, 0.0)[:4])
        rows.append(
            Row(
                layer.name,
                state.shape,
                fmt.name,
                fmt.block,
                candidate.method.name,
                bits=8 * state.nbytes / layer.weight.numel(),
                weight_error=ratio(lost, size),
                predicted_error=ratio(output_lost, output_size),
                output_error=output,
                w4a4_error=w4a4,
                seconds=candidate.seconds,
                calibration_tokens=layer.stats.tokens,
                heldout_tokens=errors.tokens,
                offsets=scale_offsets(layer.weight, state),
            )
        )
    return rows


@torch.no_grad()
def run_with(model: nn.Module, sinks: Mapping[nn.Module, Sink], batches: Iterable[Any]) -> None:
    """Run batches through a model and give the inputs of some of its linears to their sinks."""

    def read(sink: Sink, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        sink(args[0] if args else next(iter(kwargs.values())))

    handles = [
        module.register_forward_pre_hook(partial(read, sink), with_kwargs=True)
        for module, sink in sinks.items()
    ]
    device = next(model.parameters()).device
    try:
        for batch in batches:
            args, kwargs = call_arguments(batch, device)
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def find_layers(
    model: nn.Module, globs: Sequence[str], formats: Sequence[Format]
) -> tuple[dict[str, dict[str, LayerPlan]], list[LeftOut]]:
    """The linears to measure, {name: {format key: layer}}, and why others are left out.

    Without globs: what `convert` takes. Globs may name more, as an output embedding. Global scales
    are those of `convert`, which linears of one parent share.
    """
    found: dict[str, dict[str, LayerPlan]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    rules = [(glob, {}) for glob in globs]
    for fmt in formats:
        planned = plan_layers(model, LinearConfig(fmt.name, "naive", block=fmt.block), rules)
        for entry in with_shared_scales(planned).entries:
            if globs and not any(fnmatch.fnmatchcase(entry.name, glob) for glob in globs):
                continue
            if isinstance(entry, SkippedLayer):
                reasons.setdefault((entry.name, entry.skip_reason), []).append(fmt.key)
            else:
                found.setdefault(entry.name, {})[fmt.key] = entry
    left_out = [
        LeftOut(name, "all" if 1 < len(keys) == len(formats) else ", ".join(keys), reason)
        for (name, reason), keys in reasons.items()
    ]
    return found, left_out


def measure_model(
    model: nn.Module,
    calibration: Sequence[Any],
    heldout: Sequence[Any],
    plan: Plan,
    globs: Sequence[str] = (),
) -> Iterator[Row | LeftOut]:
    """The rows of every layer of a float model that `find_layers` finds, and what it does not.

    calibration, heldout: batches, as for fp4pass.calibrate.
    """
    found, left_out = find_layers(model, globs, plan.formats)
    yield from (*plan.left_out, *left_out)
    linears = [next(iter(by_format.values())) for by_format in found.values()]
    for group in in_groups(linears, _GROUP / plan.bytes_per_weight):
        observers = {linear.name: Observer(plan.needs, linear.columns) for linear in group}
        sinks = {linear.module: observers[linear.name] for linear in group}
        run_with(model, sinks, tqdm(calibration, desc="calibrate", unit="batch"))
        measured = []
        for linear in tqdm(group, desc="search", unit="layer"):
            stats = collect([observers.pop(linear.name)], linear.name)
            if not stats.tokens:
                yield LeftOut(linear.name, "all", "the calibration text never reached it")
                continue
            scales = {key: each.global_scales[0] for key, each in found[linear.name].items()}
            with dense_weight(linear) as weight:
                layer = Layer(linear.name, weight, stats, scales)
            measured.append((linear.module, layer, OutputErrors(layer, list(search(layer, plan)))))
        adding = {module: errors.add for module, _, errors in measured}
        run_with(model, adding, tqdm(heldout, desc="held-out text", unit="batch"))
        for _, layer, errors in measured:
            if errors.tokens:
                yield from make_rows(layer, errors)
            else:
                yield LeftOut(layer.name, "all", "the held-out text never reached it")


def in_groups(linears: Sequence[LayerPlan], most: float) -> Iterator[list[LayerPlan]]:
    """Neighbours with at most so many weights together, and at least one of them."""
    group: list[LayerPlan] = []
    for linear in linears:
        if group and sum(math.prod(each.shape) for each in (*group, linear)) > most:
            yield group
            group = []
        group.append(linear)
    yield group


class SyntheticLayer:
    """Random weights in bfloat16, and inputs that are made when they are read, of any number.

    Weights and inputs are normal times log-normal, with a kurtosis of 8, near Student's t with 5
    degrees of freedom. Inputs are low rank plus noise with correlated neighbours, in channels of
    log-normal scales.
    """

    def __init__(self, rows: int, columns: int, device: torch.device, seed: int = 0) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        self.weight = (0.02 * self._heavy_tailed((rows, columns), generator)).bfloat16()
        rank = min(64, columns)
        options = {"generator": generator, "device": device}
        self.mixing = torch.randn(rank, columns, **options) / rank**0.5
        self.channels = torch.randn(columns, **options).mul_(0.7).exp_()

    def _heavy_tailed(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        normal, spread = (
            torch.randn(shape, generator=generator, device=self.device) for _ in range(2)
        )
        return normal.mul_(spread.mul_(0.5).exp_())

    def inputs(self, tokens: int, seed: int) -> Iterator[Tensor]:
        """Tokens [up to _TOKENS, K] in bfloat16; another seed gives others of the same kind."""
        generator = torch.Generator(self.device).manual_seed(seed)
        rank, columns = self.mixing.shape
        starts = range(0, tokens, _TOKENS)
        for start in tqdm(starts, desc=f"tokens of seed {seed}", unit="batch"):
            count = min(_TOKENS, tokens - start)
            x = self._heavy_tailed((count, rank), generator) @ self.mixing
            x += self._heavy_tailed((count, columns), generator)
            x += 0.5 * x.roll(1, dims=1)
            yield x.mul_(self.channels).bfloat16()


def measure_synthetic(
    source: SyntheticLayer, tokens: int, heldout: int, plan: Plan
) -> Iterator[Row | LeftOut]:
    """The rows of a synthetic layer, calibrated on other tokens than it is measured on."""
    yield from plan.left_out
    scales = {}
    for fmt in plan.formats:
        if problem := weight_problem(source.weight, fmt):
            yield LeftOut("synthetic", fmt.key, problem)
        else:
            scales[fmt.key] = fmt.global_scale_for(weight_amax(source.weight))
    observer = Observer(plan.needs, source.weight.shape[1])
    for x in source.inputs(tokens, seed=1):
        observer(x)
    layer = Layer("synthetic", source.weight, collect([observer], "synthetic"), scales)
    candidates = list(tqdm(search(layer, plan), desc="search", unit="candidate"))
    errors = OutputErrors(layer, candidates)
    for x in source.inputs(heldout, seed=2):
        errors.add(x)
    yield from make_rows(layer, errors)
