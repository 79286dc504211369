"""Study how far distillation brings a converted model: tokens, rates, batches, and what learns.

    python -m eval.quality.distillation --model FOLDER --json OUT --own OWN.pt --minutes 8 \
        --text WikiText-2=FILE --text documents=FILE [--text code=FILE] [--runs A B C.005 ...]

The original writes text, half of it plain and half conversations, and a model that is converted on
a part of it is trained on the whole: KL(original || model) over all tokens. A latent is a weight in
units of its block's step, so it rounds to a magnitude of E2M1; rounding is straight-through. Each
run of `RUNS` begins with the same model. KL is measured on windows of texts that nobody trains on,
and on conversations that the original writes from another seed ("chats"). The windows are those of
every run, so that the interval of a change, a bootstrap over windows, is of pairs.

A run begins only if it should end within `--minutes`. What is measured is printed at once, and each
run is in OUT when it ends. `--own` keeps the written text, two bytes a token, for the next call.
`--shrink N` divides the tokens and the batches of all runs by N, to try the script.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.real_model import CHARACTERS, named
from eval.record import Results, Row, command, device_name
from fp4pass import ops
from fp4pass.calibration import sample
from fp4pass.calibration.sample import scripts_of
from fp4pass.core.elements import element_table
from fp4pass.core.packing import pack_codes, unpack_codes
from fp4pass.evaluation import token_windows
from fp4pass.lab.learning import kl_loss
from fp4pass.lab.learning.latent import from_cells, latent_weight, steps_of
from fp4pass.nn.linear import QuantizedLinear, quantize_input

WINDOWS, EVALUATIONS, CALIBRATED = 24, 6, 1 << 15
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
K, M = 1 << 10, 1 << 20

# A latent stays this close to the last magnitude, so that it can come back.
LAST = 7.0

# A run whose KL rises by more than this part of its start's is given up.
RUINED = 0.5

# LSQ divides the gradient of a step by sqrt(numbers * largest magnitude). Adam knows no size of a
# gradient, so it is the rate that is divided.
LSQ = (16 * 6) ** -0.5


@dataclass(frozen=True)
class Run:
    """The settings of a run.

    Attributes:
        tokens: that are read, in several epochs if fewer were written.
        step: tokens of a step of the optimizer.
        rate: peak rate of Adam on latents, in units of the block's step.
        decay: of the rate: linear or cosine to 0, or constant.
        warmup: steps in which the rate rises, as a part of all.
        norms: peak rate on norms and biases, as a part of their root mean square; 0 leaves them.
        scales: rate on log2 of the block scales, as a part of `rate`; 0 leaves them.
        pull: of latents to magnitudes in the last third, `rate * pull` of the way in each step.
        share: how far latents begin on the way to the float weight, inside the cells of the codes.
        eps: of Adam. The gradient of a latent is far smaller than that of a weight.
        scheme: None for that of the command.
        quality: what the start is converted with.
        seed: of the order of the windows.
    """

    tokens: int = M
    step: int = 16 * K
    rate: float = 0.010
    decay: str = "linear"
    warmup: float = 0.0
    norms: float = 1e-4
    scales: float = 0.0
    pull: float = 0.0
    share: float = 0.0
    eps: float = 1e-12
    scheme: str | None = None
    quality: str = "best"
    seed: int = 0

    def factor(self, step: int, steps: int) -> float:
        """Return the rate of a step as a part of the peak."""
        warmup = round(self.warmup * steps)
        if step < warmup:
            return (step + 1) / warmup
        left = 1 - (step - warmup) / max(1, steps - warmup)
        factors = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "constant": 1.0}
        return factors[self.decay]


# In all steps latents can go .96. The next code is .25 to 1 away from the middle of a cell: with 64
# steps at .010 they reach none.
BASE = Run(step=8 * K, rate=0.015)

# In the order of importance. Every run measures its last latents and the mean of the last quarter.
RUNS = {
    "A": Run(),
    "A.8k": Run(step=8 * K),
    "B": Run(4 * M),
    "C.005": dataclasses.replace(BASE, rate=0.005),
    "C.007": dataclasses.replace(BASE, rate=0.007),
    "C.015": BASE,
    "C.030": Run(rate=0.030),
    "D": Run(4 * M, 64 * K, rate=0.020),
    "D.040": Run(4 * M, 64 * K, rate=0.040),
    "E": Run(step=8 * K, decay="constant"),
    "F": dataclasses.replace(BASE, scales=LSQ),
    "F.3": dataclasses.replace(BASE, scales=0.3),
    "G.30": dataclasses.replace(BASE, pull=30.0),
    "G.100": dataclasses.replace(BASE, pull=100.0),
    "H.25": dataclasses.replace(BASE, share=0.25),
    "H.5": dataclasses.replace(BASE, share=0.5),
    "I": dataclasses.replace(BASE, quality="good"),
    "I.B": Run(4 * M, quality="good"),
    "J.nvfp4": dataclasses.replace(BASE, scheme="nvfp4"),
    "J.mxfp4a16": dataclasses.replace(BASE, scheme="mxfp4a16"),
    "B.16M": Run(16 * M),
    "B.005": Run(4 * M, rate=0.005),
    "B.020": Run(4 * M, rate=0.020),
    "D.128k": Run(4 * M, 128 * K, rate=0.060),
    "eps-7": dataclasses.replace(BASE, eps=1e-7),
    "eps-6": dataclasses.replace(BASE, rate=0.030, eps=1e-6),
    "cosine": dataclasses.replace(BASE, decay="cosine", warmup=0.05),
    "frozen": dataclasses.replace(BASE, norms=0.0),
    "order": dataclasses.replace(BASE, seed=1),
    # Only norms move.
    "norms": dataclasses.replace(BASE, rate=0.0),
    "norms.1e-3": dataclasses.replace(BASE, rate=0.0, norms=1e-3),
    # Nothing moves: the student computes what the converted model does.
    "still": Run(32 * K, rate=0.0, norms=0.0),
}


class Rounded(torch.autograd.Function):
    """The weight of latents; its gradient counts as that of the latents times the steps."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(latent, steps)
        return times(magnitudes_of(latent), steps).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        latent, steps = ctx.saved_tensors
        (grad,) = grads
        of_steps = None
        if ctx.needs_input_grad[1]:
            of_steps = magnitudes_of(latent).mul_(grad).unflatten(-1, (steps.shape[-1], -1)).sum(-1)
        return times(grad.float(), steps), of_steps, None


class Straight(torch.autograd.Function):
    """Another tensor in place of one; its gradient counts as that of the one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def magnitudes_of(latent: Tensor) -> Tensor:
    """Return the nearest values of E2M1; ties go to the even code, and a zero keeps its sign."""
    size = latent.abs()
    half, double = size < 2, size >= 4
    # Values are whole numbers of .5 below 2, of 1 below 4, and of 2 behind it.
    size.mul_(1.0 + half.float() - 0.5 * double.float()).round_()
    size.mul_(1.0 - 0.5 * half.float() + double.float()).clamp_(max=MAGNITUDES[-1])
    return size.copysign_(latent)


def times(numbers: Tensor, steps: Tensor) -> Tensor:
    """Return numbers [N, K] times the steps of their blocks [N, K / block]."""
    return (numbers.unflatten(-1, (steps.shape[-1], -1)) * steps.unsqueeze(-1)).flatten(-2)


class Learned(nn.Module):
    """A quantized linear layer with latents in place of codes.

    Attributes:
        latent: float32 [N, K], in units of the block's step.
        log_scale: log2 of the block scales, float32 [N, K / block]; None if they do not learn.
    """

    def __init__(self, layer: QuantizedLinear, weight: Tensor, run: Run) -> None:
        """Begin with the codes of a layer whose float weight is given."""
        super().__init__()
        self.config, self.stored = layer.config, layer.packed_weight
        fmt = self.config.format
        if fmt.element.magnitudes != MAGNITUDES or layer.transposed or self.config.is_rotated:
            raise SystemExit(f"{layer}: only plain layers in E2M1 are trained here.")
        if run.share and not self.config.weight_only:
            raise SystemExit("share: the weights of a smoothed model are not those of the original")
        self.fixed = steps_of(self.stored, fmt)
        codes = unpack_codes(self.stored.packed, 4)
        latent = element_table(fmt.element, codes.device)[codes.int()]
        if run.share:
            cells = latent_weight(self.stored.packed, self.fixed, weight, fmt, run.share)
            latent = from_cells(cells, fmt.element)
        self.start = magnitudes_of(latent)
        self.latent = nn.Parameter(latent)
        self.log_scale = None
        if run.scales:
            if layer.weight_scale.dtype != torch.float8_e4m3fn:
                raise SystemExit(f"{layer}: only scales in E4M3 learn here.")
            scale, number = layer.weight_scale.float(), layer.weight_global_scale.item()
            self.factor = number if fmt.multiplies else 1 / number
            self.log_scale = nn.Parameter(scale.clamp(min=2.0**-9).log2())
        self.bias = layer.bias

    def scale(self) -> Tensor:
        """Return the block scales that `log_scale` rounds to, straight-through."""
        scale = self.log_scale.exp2()
        return Straight.apply(scale, scale.detach().clamp(max=448).to(torch.float8_e4m3fn).float())

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias; weight and input are rounded as the quantized layer does."""
        steps = self.fixed if self.log_scale is None else self.scale() * self.factor
        if not self.config.weight_only:
            with torch.no_grad():
                codes, scale, number = quantize_input(x, self.stored, self.config)
                other = ops.dequantize(codes, scale, number, self.config.format.key, x.dtype)
            x = Straight.apply(x, other)
        return F.linear(x, Rounded.apply(self.latent, steps, x.dtype), self.bias)

    @torch.no_grad()
    def write(self, layer: QuantizedLinear) -> None:
        """Write the codes and scales of the latents into a quantized layer."""
        values = magnitudes_of(self.latent)
        table = torch.tensor(MAGNITUDES, device=values.device)
        codes = torch.bucketize(values.abs(), table).to(torch.uint8)
        codes |= values.signbit().to(torch.uint8) << 3
        layer.weight_packed.copy_(pack_codes(codes, 4))
        if self.log_scale is not None:
            layer.weight_scale.copy_(self.scale())


class Student:
    """A copy of a converted model that learns."""

    def __init__(self, packed: nn.Module, original: nn.Module, run: Run) -> None:
        self.packed, self.run = packed, run
        self.model = copy.deepcopy(packed).requires_grad_(False)
        found = [(n, m) for n, m in self.model.named_modules() if isinstance(m, QuantizedLinear)]
        self.layers = {n: Learned(m, original.get_parameter(f"{n}.weight"), run) for n, m in found}
        for name, layer in self.layers.items():
            self.model.set_submodule(name, layer)
        # By name: the module, the attribute, its root mean square, and the float32 part of that.
        self.small: dict[str, tuple[nn.Module, str, Tensor, nn.Parameter]] = {}
        for name, each in [*self.model.named_parameters()]:
            if run.norms and each.ndim == 1:
                owner, _, key = name.rpartition(".")
                size = each.float().square().mean().sqrt().clamp(min=1e-8)
                module = self.model.get_submodule(owner)
                del module._parameters[key]
                part = nn.Parameter(each.float() / size)
                self.small[name] = (module, key, size, part)
        self.dtype = next(original.parameters()).dtype
        latents = [layer.latent for layer in self.layers.values()]
        scales = [layer.log_scale for layer in self.layers.values() if layer.log_scale is not None]
        norms = [part for *_, part in self.small.values()]
        rates = ((latents, run.rate), (scales, run.rate * run.scales), (norms, run.norms))
        self.groups = [{"params": own, "lr": rate} for own, rate in rates if own]
        self.latents, self.parameters = latents, [p for g in self.groups for p in g["params"]]
        for each in self.parameters:
            each.requires_grad_(True)

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits [..., V] of token ids, with norms rounded as they are stored."""
        for module, key, size, part in self.small.values():
            setattr(module, key, (part * size).to(self.dtype))
        return self.model(ids, use_cache=False).logits

    @torch.no_grad()
    def changed(self) -> float:
        """Return the share of codes that are not those of the start."""
        pairs = [(layer.start, magnitudes_of(layer.latent)) for layer in self.layers.values()]
        return sum((a != b).sum() for a, b in pairs).item() / sum(a.numel() for a, _ in pairs)

    @torch.no_grad()
    def written(self) -> nn.Module:
        """Return a converted model with the codes, scales and norms as they are now."""
        model = copy.deepcopy(self.packed)
        for name, layer in self.layers.items():
            layer.write(model.get_submodule(name))
        for name, (_, _, size, part) in self.small.items():
            model.get_parameter(name).copy_(part * size)
        return model


class Study:
    """The original, its text, and what is measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        loaded = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        self.original = loaded.eval().requires_grad_(False).to(args.device)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        about = {
            "command": command(args.model),
            "machine": device_name(args.device),
            "versions": {
                "fp4pass": fp4pass.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "model": args.model.name,
            "scheme": args.scheme,
            "seed": args.seed,
            "windows": WINDOWS,
            "window": args.window,
        }
        self.results = Results(args.json, about, key=("run", "seed"), again=True)
        self.own, chats = self.written_text()
        self.texts = {}
        for name, path in args.text:
            text = path.read_text("utf-8")[:CHARACTERS]
            found = token_windows(self.tokenizer, text, window=args.window)
            places = torch.linspace(0, len(found) - 1, min(WINDOWS, len(found))).long()
            self.texts[name] = found[places].to(args.device)
        self.texts["chats"] = chats.to(args.device)
        self.starts: dict[tuple[str, str], tuple[nn.Module, float]] = {}
        # By the scheme; those of the first guess.
        self.seconds_a_token = {"": 0.3 / (16 * K)}

    def left(self) -> float:
        """Return the seconds that are left."""
        return 60 * self.args.minutes - (time.perf_counter() - self.began)

    def written_text(self) -> tuple[Tensor, Tensor]:
        """Return windows of the original's text to train on, on the device, and conversations."""
        args = self.args
        if args.own and args.own.exists():
            kept = torch.load(args.own)
            print(f"own text: {kept['own'].numel()} tokens of {args.own}", flush=True)
            return kept["own"].long().to(args.device), kept["chats"].long()
        began, found = time.perf_counter(), list[Tensor]()
        rest = max(1, args.own_tokens // args.window)
        options = {"seq_len": args.window, "batch_size": args.rows, "progress": False}
        while rest > 0 and (not found or time.perf_counter() - began < args.own_seconds):
            # Half of them are written at once: one kind.
            size = min(rest, 2 * args.rows)
            seed = 1000 * args.seed + len(found)
            tokens = size * args.window
            found.append(sample(self.original, self.tokenizer, tokens=tokens, seed=seed, **options))
            rest -= size
        own, seconds = torch.cat(found), time.perf_counter() - began
        scripts = scripts_of(self.original, self.tokenizer, args.window, len(own))
        chats = sample(
            self.original,
            self.tokenizer,
            tokens=WINDOWS * args.window,
            chat_share=1.0,
            seed=1000 * args.seed + 999,
            **options,
        )
        row = {
            "run": "own text",
            "seed": args.seed,
            "tokens": own.numel(),
            "seconds": seconds,
            "tokens_a_second": own.numel() / seconds,
            "chats": sum(number for script, number in scripts if script.turns) / len(own),
            "distinct_windows": len(own.unique(dim=0)),
        }
        self.results.put(row)
        print(row, flush=True)
        if args.own:
            small = torch.uint16 if self.original.config.vocab_size <= 1 << 16 else torch.int32
            torch.save({"own": own.to(small), "chats": chats.to(small)}, args.own)
        return own.to(args.device), chats

    def start(self, run: Run) -> tuple[nn.Module, float]:
        """Return the converted model that a run begins with, and how long that took."""
        key = (run.scheme or self.args.scheme, run.quality)
        if key not in self.starts:
            began = time.perf_counter()
            packed = copy.deepcopy(self.original)
            data = self.own[: max(1, self.args.calibrated // self.args.window)].cpu()
            fp4pass.convert(packed, key[0], quality=key[1], data=data, progress=False)
            seconds = time.perf_counter() - began
            self.starts[key] = (packed.eval(), seconds)
            name = " ".join(("start", *key))
            row = {"run": name, "seed": self.args.seed, "seconds": seconds}
            row["texts"] = self.measured(lambda ids: packed(ids, use_cache=False).logits)
            self.results.put(row)
            print(line(name, row), flush=True)
        return self.starts[key]

    @torch.no_grad()
    def measured(self, logits: Callable[[Tensor], Tensor], start: Row | None = None) -> Row:
        """Return KL and agreement on each text, and the change of KL from a start.

        The change is a part of the start's KL, with its interval of 95 %.
        """
        found: Row = {}
        for name, windows in self.texts.items():
            kl, same = list[Tensor](), list[Tensor]()
            for ids in windows.split(8):
                own, other = logits(ids), self.original(ids, use_cache=False).logits
                same.append((own.argmax(-1) == other.argmax(-1)).float().mean(-1))
                for a, b in zip(own, other, strict=True):
                    kl.append(kl_loss(a, b).double())
            each = torch.stack(kl).cpu()
            found[name] = {"kl": each.mean().item(), "top1": torch.cat(same).mean().item()}
            if start is not None:
                before = torch.tensor(start[name]["each"], dtype=torch.float64)
                generator = torch.Generator().manual_seed(0)
                drawn = torch.randint(len(each), (2000, len(each)), generator=generator)
                ratios = each[drawn].sum(1) / before[drawn].sum(1) - 1
                found[name]["change"] = (each.sum() / before.sum() - 1).item()
                found[name]["interval"] = ratios.quantile(torch.tensor([0.025, 0.975]).double())
                found[name]["interval"] = found[name]["interval"].tolist()
            found[name]["each"] = each.tolist()
        return found

    def batches(self, run: Run, tokens: int) -> Iterator[Tensor]:
        """Yield the windows of each step; each epoch has its own order."""
        size = tokens // self.args.window
        order, epoch = torch.empty(0, dtype=torch.int64), 0
        while True:
            while len(order) < size:
                generator = torch.Generator().manual_seed(1000 * run.seed + epoch)
                order = torch.cat([order, torch.randperm(len(self.own), generator=generator)])
                epoch += 1
            yield self.own[order[:size].to(self.own.device)]
            order = order[size:]

    def train(self, name: str, run: Run) -> None:
        """Train a copy of the start, and put what came of it into the results."""
        packed, _ = self.start(run)
        student = Student(packed, self.original, run)
        step_tokens = max(run.step // self.args.shrink, self.args.window)
        steps = max(1, run.tokens // self.args.shrink // step_tokens)
        fused = self.own.device.type == "cuda"
        adam = torch.optim.AdamW(
            student.groups, betas=(0.9, 0.95), eps=run.eps, weight_decay=0.0, fused=fused
        )
        peaks = [group["lr"] for group in adam.param_groups]
        marks = {math.ceil(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
        means, averaged = list[Tensor](), 0
        row: Row = {"run": name, "seed": self.args.seed, "of": dataclasses.asdict(run)}
        row |= {"steps": steps, "epochs": steps * step_tokens / self.own.numel()}
        row["travel"] = run.rate * sum(run.factor(step, steps) for step in range(steps))
        print(f"{name}: {steps} steps, latents can go {row['travel']:.2f}", flush=True)
        rows: list[Row] = []
        began, losses, seconds, gradient = time.perf_counter(), list[Tensor](), 0.0, 0.0

        def measure(kind: str, step: int) -> Row:
            nonlocal seconds, began
            loss = torch.stack(losses).mean().item() if losses else None
            losses.clear()
            if kind == "latents" and step:
                seconds += time.perf_counter() - began
            first = rows[0]["texts"] if rows else None
            found: Row = {"of": kind, "step": step, "tokens": step * step_tokens, "loss": loss}
            found |= {"seconds": seconds, "codes_changed": student.changed(), "gradient": gradient}
            found["texts"] = self.measured(student.logits, first)
            rows.append(found)
            print(line(name, found), flush=True)
            began = time.perf_counter()
            return found

        measure("latents", 0)
        batches = self.batches(run, step_tokens)
        for step in range(steps):
            parts = next(batches).split(self.args.micro)
            for ids in parts:
                with torch.no_grad():
                    other = self.original(ids, use_cache=False).logits
                loss = kl_loss(student.logits(ids), other)
                (loss * (ids.numel() / step_tokens)).backward()
                losses.append(loss.detach())
            if step == 0:
                squares = [each.grad.double().square().mean() for each in student.latents]
                gradient = torch.stack(squares).mean().sqrt().item()
            factor = run.factor(step, steps)
            for group, peak in zip(adam.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            adam.step()
            adam.zero_grad()
            with torch.no_grad():
                late = (step + 1) / steps * 3 - 2
                if run.pull and late > 0:
                    part = min(1.0, run.rate * factor * run.pull * late)
                    for each in student.latents:
                        each.lerp_(magnitudes_of(each), part)
                torch._foreach_clamp_min_(student.latents, -LAST)
                torch._foreach_clamp_max_(student.latents, LAST)
                if (step + 1) / steps > 0.75:
                    averaged += 1
                    if means:
                        torch._foreach_lerp_(means, student.parameters, 1 / averaged)
                    else:
                        means = [each.detach().clone() for each in student.parameters]
            if step + 1 in marks:
                found = measure("latents", step + 1)
                worst = max(each["change"] for each in found["texts"].values())
                if not worst < RUINED or self.left() < -20:
                    row["cut"] = "out of time" if worst < RUINED else "ruined"
                    break
        if means and "cut" not in row:
            with torch.no_grad():
                for each, mean in zip(student.parameters, means, strict=True):
                    each.copy_(mean)
            measure("mean", steps)
            model = student.written()
            row["written"] = self.measured(lambda ids: model(ids, use_cache=False).logits)
            print(line(name, {"of": "written back", "texts": row["written"]}), flush=True)
        if steps > 2:
            key = run.scheme or self.args.scheme
            self.seconds_a_token[key] = seconds / (step_tokens * rows[-1]["step"])
        row |= {"seconds": seconds, "seconds_a_step": seconds / rows[-1]["step"]}
        row["evaluations"] = rows
        self.results.put(row)

    def expected_seconds(self, run: Run) -> float:
        """Return how long a run should take, its start and its evaluations included."""
        known = [seconds for _, seconds in self.starts.values()]
        scheme = run.scheme or self.args.scheme
        convert = 0.0 if (scheme, run.quality) in self.starts else max(known, default=60.0)
        each = self.seconds_a_token.get(scheme, max(self.seconds_a_token.values()))
        return 10 + convert + run.tokens / self.args.shrink * each


def line(name: str, row: Row) -> str:
    """Return a measurement for whoever waits."""
    cells = [f"{name:12} {row.get('of', ''):12} {row.get('tokens', 0):9}"]
    cells.append(f"{row.get('seconds', 0):6.1f} s")
    for text, found in row["texts"].items():
        change = ""
        if "change" in found:
            low, high = found["interval"]
            change = f" {100 * found['change']:+.1f} ({100 * low:+.1f} {100 * high:+.1f}) %"
        cells.append(f"{text} {found['kl']:.4f}{change} {100 * found['top1']:.1f}")
    if "codes_changed" in row:
        cells.append(f"codes {100 * row['codes_changed']:.3f} %  gradient {row['gradient']:.1e}")
    if row.get("loss") is not None:
        cells.append(f"loss {row['loss']:.4f}")
    return "  ".join(cells)


def main() -> None:
    """Do the runs for which there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=named, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--own", type=Path, help="keeps the written text")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--scheme", default="nvfp4a16")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--seed", type=int, default=0, help="of the written text")
    parser.add_argument("--own-tokens", type=int, default=2 * M)
    parser.add_argument("--own-seconds", type=float, default=100.0)
    parser.add_argument("--rows", type=int, default=1024, help="windows that are written at once")
    parser.add_argument("--micro", type=int, default=32, help="windows of a forward")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--calibrated", type=int, default=CALIBRATED, help="tokens of the start")
    parser.add_argument("--shrink", type=int, default=1)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    study = Study(args)
    for name in args.runs:
        seconds = study.expected_seconds(RUNS[name])
        if seconds > study.left():
            print(f"{name}: skipped, {seconds:.0f} s, {study.left():.0f} s are left", flush=True)
            continue
        study.train(name, RUNS[name])
    print(f"{study.left():.0f} s are left", flush=True)


if __name__ == "__main__":
    main()
