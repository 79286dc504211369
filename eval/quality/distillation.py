"""Study how far distillation brings a converted model: text, tokens, rates, and what learns.

    python -m eval.quality.distillation write --model FOLDER --out OWN.pt --seconds 90 \
        --chat-share 0 [--seed 1]
    python -m eval.quality.distillation train --model FOLDER --json OUT --minutes 6 \
        --own plain=OWN.pt --own chats=OWN2.pt [--mix FILE] --runs NAME:FIELD=VALUE,... ... \
        --text WikiText-2=FILE --text documents=FILE ...

`write` has the original write text. `train` trains converted models on it by
`fp4pass.lab.distill.Training`; the fields of a run are those of `Run`. Runs with one scheme,
quality and text of calibration begin with the same model. KL is measured on windows of texts that
nobody trains on, and on the last windows of each text of `--own`, which are left out for it. The
windows are those of every run, so that the interval of a change, a bootstrap over windows, is of
pairs.

A run begins only if it should end within `--minutes`. What is measured is printed at once, and each
run is in OUT when it ends. `--shrink N` divides the tokens and the batches of all runs by N, to try
the script.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import lzma
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass
from eval.quality.real_model import CHARACTERS, named
from eval.record import Results, Row, command, device_name
from fp4pass.calibration import sample
from fp4pass.evaluation import token_windows
from fp4pass.lab import freeze, kl_loss, trainable
from fp4pass.lab.distill import Training, draw

WINDOWS, EVALUATIONS, CALIBRATED = 24, 4, 1 << 15
K, M = 1 << 10, 1 << 20

# A run whose KL rises by more than this part of its start's is given up.
RUINED = 0.5

THIRDS = (("plain", 0.33), ("chats", 0.33), ("mix", 0.34))
MOSTLY_OWN = (("plain", 0.42), ("chats", 0.42), ("mix", 0.16))


@dataclass(frozen=True)
class Run:
    """The settings of a run.

    Attributes:
        tokens: that are read, in several epochs if fewer were written.
        step: tokens of a step of the optimizer.
        rate: peak rate of Adam on latents, in units of the block's step.
        decay: of the rate: linear or cosine to 0, or constant.
        warmup: steps in which the rate rises, as a part of all.
        others: peak rate of parameters in floating point, as a part of their root mean square.
        eps: of Adam. The gradient of a latent is far smaller than that of a weight.
        text: the kinds of text to train on, and their shares.
        scheme: None for that of the command.
        quality: what the start is converted with, or "naive".
        calibrated: the kinds of text that the start is calibrated on, and their shares; () for what
            `convert` takes by itself.
        calibration_tokens: of the start.
        seed: of the order of the windows, and of the calibration windows.
    """

    tokens: int = 4 * M
    step: int = 16 * K
    rate: float = 0.010
    decay: str = "cosine"
    warmup: float = 0.05
    others: float = 1e-4
    eps: float = 1e-12
    text: tuple[tuple[str, float], ...] = MOSTLY_OWN
    scheme: str | None = None
    quality: str = "best"
    calibrated: tuple[tuple[str, float], ...] = THIRDS
    calibration_tokens: int = CALIBRATED
    seed: int = 0

    def factor(self, step: int, steps: int) -> float:
        """Return the rate of a step as a part of the peak."""
        warmup = round(self.warmup * steps)
        if step < warmup:
            return (step + 1) / warmup
        left = 1 - (step - warmup) / max(1, steps - warmup)
        factors = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "constant": 1.0}
        return factors[self.decay]


def parsed(text: str) -> tuple[str, Run]:
    """Return a run by its description, "NAME:field=value,field=value" of `Run`; M is 2^20."""
    name, _, fields = text.partition(":")
    values: Row = {}
    kinds = {each.name: each.type for each in dataclasses.fields(Run)}
    for part in filter(None, fields.split(",")):
        key, _, value = part.partition("=")
        kind = kinds[key]
        if "tuple" in kind:
            shares = [each.split("*") for each in filter(None, value.split("+"))]
            values[key] = tuple((of, float(share)) for share, of in shares)
        elif kind == "int":
            sizes = {"K": K, "M": M}
            values[key] = int(value.rstrip("KM")) * sizes.get(value[-1], 1)
        elif kind == "float":
            values[key] = float(value)
        else:
            values[key] = value
    return name, Run(**values)


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
            "windows": WINDOWS,
            "window": args.window,
        }
        self.results = Results(args.json, about, key=("run",), again=True)
        self.own = {name: torch.load(path).long() for name, path in args.own}
        self.texts: dict[str, Tensor] = {}
        for name, path in args.text:
            text = path.read_text("utf-8")[:CHARACTERS]
            found = token_windows(self.tokenizer, text, window=args.window)
            places = torch.linspace(0, len(found) - 1, min(WINDOWS, len(found))).long()
            self.texts[name] = found[places].to(args.device)
        for name, windows in self.own.items():
            self.texts[name] = windows[-WINDOWS:].to(args.device)
            self.own[name] = windows[:-WINDOWS]
        if args.mix is not None:
            self.own |= self.mixed(args.mix)
        for name, windows in self.own.items():
            print(f"{name}: {windows.numel()} tokens", flush=True)
        self.predicted = {name: self.logits(ids) for name, ids in self.texts.items()}
        self.starts: dict[Any, tuple[nn.Module, float]] = {}
        # By the scheme; those of the first guess.
        self.seconds_a_token = {"": 0.15 / (16 * K)}

    def mixed(self, path: Path) -> dict[str, Tensor]:
        """Return windows of texts, {"kind": ..., "text": ...} a line: by kind, "mix", "no-KIND"."""
        found: dict[str, list[Tensor]] = {}
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                ids = self.tokenizer(row["text"], add_special_tokens=False)["input_ids"]
                found.setdefault(row["kind"], []).append(torch.tensor(ids))
        window = self.args.window
        each = {name: torch.cat(parts) for name, parts in found.items()}
        kinds = {
            name: ids[: len(ids) // window * window].view(-1, window) for name, ids in each.items()
        }
        without = {
            f"no-{name}": torch.cat([own for kind, own in kinds.items() if kind != name])
            for name in kinds
        }
        return kinds | without | {"mix": torch.cat(list(kinds.values()))}

    def left(self) -> float:
        """Return the seconds that are left."""
        return 60 * self.args.minutes - (time.perf_counter() - self.began)

    def drawn(self, shares: tuple[tuple[str, float], ...], count: int, seed: int) -> Tensor:
        """Return windows of kinds of text, mixed; those of a kind again where it has too few."""
        found = []
        for i, (name, share) in enumerate(shares):
            windows, wanted = self.own[name], round(share * count)
            generator = torch.Generator().manual_seed(100 * seed + i)
            orders = [
                torch.randperm(len(windows), generator=generator)
                for _ in range(math.ceil(wanted / len(windows)))
            ]
            if wanted:
                found.append(windows[torch.cat(orders)[:wanted]])
        windows = torch.cat(found)
        generator = torch.Generator().manual_seed(seed)
        return windows[torch.randperm(len(windows), generator=generator)]

    def start(self, run: Run) -> tuple[nn.Module, float]:
        """Return the converted model that a run begins with, and how long that took."""
        scheme = run.scheme or self.args.scheme
        key = (scheme, run.quality, run.calibrated, run.calibration_tokens, run.seed)
        if key not in self.starts:
            given: Row = {"tokenizer": self.tokenizer}
            if run.calibrated:
                count = run.calibration_tokens // self.args.window
                given["data"] = self.drawn(run.calibrated, count, run.seed)
            given |= {"method": "naive"} if run.quality == "naive" else {"quality": run.quality}
            packed = copy.deepcopy(self.original).requires_grad_(True)
            began = time.perf_counter()
            fp4pass.convert(packed, scheme, progress=False, **given)
            seconds = time.perf_counter() - began
            self.starts[key] = (packed.eval(), seconds)
            name = " ".join(["start", *map(str, key)])
            row = {"run": name, "seconds": seconds, "texts": self.measured(packed)}
            self.results.put(row)
            print(line(name, row), flush=True)
        return self.starts[key]

    @torch.no_grad()
    def logits(self, windows: Tensor, model: nn.Module | None = None) -> Tensor:
        """Return the logits of a model, or of the original, for all windows."""
        model = self.original if model is None else model
        return torch.cat([model(ids, use_cache=False).logits for ids in windows.split(8)])

    @torch.no_grad()
    def measured(self, model: nn.Module, start: Row | None = None) -> Row:
        """Return KL and agreement on each text, and the change of KL from a start.

        The change is a part of the start's KL, with its interval of 95 %.
        """
        found: Row = {}
        for name, windows in self.texts.items():
            own, other = self.logits(windows, model), self.predicted[name]
            same = (own.argmax(-1) == other.argmax(-1)).double().mean()
            kl = [kl_loss(a, b).double() for a, b in zip(own, other, strict=True)]
            each = torch.stack(kl).cpu()
            found[name] = {"kl": each.mean().item(), "top1": same.item()}
            if start is not None:
                before = torch.tensor(start[name]["each"], dtype=torch.float64)
                generator = torch.Generator().manual_seed(0)
                drawn = torch.randint(len(each), (2000, len(each)), generator=generator)
                ratios = each[drawn].sum(1) / before[drawn].sum(1) - 1
                found[name]["change"] = (each.sum() / before.sum() - 1).item()
                found[name]["interval"] = ratios.quantile(torch.tensor([0.025, 0.975]).double())
                found[name]["interval"] = found[name]["interval"].tolist()
            found[name]["each"] = [round(value, 6) for value in each.tolist()]
        return found

    def train(self, name: str, run: Run) -> None:
        """Train a copy of the start, and put what came of it into the results."""
        packed, converted = self.start(run)
        if run.tokens == 0:
            self.save(name, packed)
            return
        student = copy.deepcopy(packed)
        model = trainable(student, self.original, others=run.others > 0)
        adam = {"betas": (0.9, 0.95), "eps": run.eps}
        training = Training(model, run.rate, run.others, **adam)
        first, window = training.numbers(), self.args.window
        size = max(run.step // self.args.shrink // window, 1)
        steps = max(1, run.tokens // self.args.shrink // (size * window))
        marks = {math.ceil(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
        row: Row = {"run": name, "of": dataclasses.asdict(run), "steps": steps}
        row["travel"] = run.rate * sum(run.factor(step, steps) for step in range(steps))
        row["start_seconds"] = converted
        print(f"{name}: {steps} steps, latents can go {row['travel']:.2f}", flush=True)
        start: Row = {"step": 0, "tokens": 0, "texts": self.measured(model)}
        rows, seconds, losses = [start], 0.0, list[Tensor]()
        windows = self.drawn(run.text, steps * size, run.seed).to(self.args.device)
        batches = draw(list(windows.split(1)), size, 1000 * run.seed)
        began = time.perf_counter()
        done = training.train(self.original, batches, steps, run.factor)
        for step, loss in enumerate(done, 1):
            losses.append(loss)
            if step not in marks:
                continue
            seconds += time.perf_counter() - began
            found: Row = {"step": step, "tokens": training.tokens, "seconds": seconds}
            found |= {"loss": torch.stack(losses).mean().item()}
            found |= {"codes_changed": training.changed(first)}
            found["texts"] = self.measured(model, start["texts"])
            rows.append(found)
            losses.clear()
            print(line(name, found), flush=True)
            worst = max(each["change"] for each in found["texts"].values())
            if not worst < RUINED or self.left() < -20:
                row["cut"] = "out of time" if worst < RUINED else "ruined"
                break
            began = time.perf_counter()
        if "cut" not in row:
            row["written"] = self.measured(freeze(model))
            self.save(name, model)
        if steps > 2:
            self.seconds_a_token[run.scheme or self.args.scheme] = seconds / training.tokens
        row |= {"seconds": seconds, "seconds_a_step": seconds / rows[-1]["step"]}
        if torch.cuda.is_available():
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        for each in rows[:-1]:
            for text in each["texts"].values():
                text.pop("each", None)
        row["evaluations"] = rows
        self.results.put(row)

    def save(self, name: str, model: nn.Module) -> None:
        """Write the model of a run to its folder, if it has one."""
        folder = dict(self.args.save).get(name)
        if folder is not None:
            fp4pass.save(model, folder, tokenizer=self.tokenizer)

    def expected_seconds(self, run: Run) -> float:
        """Return how long a run should take, its start and its evaluations included."""
        scheme = run.scheme or self.args.scheme
        each = self.seconds_a_token.get(scheme, max(self.seconds_a_token.values()))
        return 20 + run.tokens / self.args.shrink * each


def line(name: str, row: Row) -> str:
    """Return a measurement for whoever waits."""
    cells = [f"{name:12} {row.get('tokens', 0):9}"]
    cells.append(f"{row.get('seconds', 0):6.1f} s")
    for text, found in row["texts"].items():
        change = f" {100 * found['change']:+.1f}" if "change" in found else ""
        cells.append(f"{text} {found['kl']:.4f}{change}")
    if "codes_changed" in row:
        cells.append(f"codes {100 * row['codes_changed']:.2f}%")
    if row.get("loss") is not None:
        cells.append(f"loss {row['loss']:.4f}")
    return "  ".join(cells)


def write(args: argparse.Namespace) -> None:
    """Have the original write text for so many seconds, and keep it."""
    began, found = time.perf_counter(), list[Tensor]()
    loaded = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = loaded.eval().requires_grad_(False).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    longest = 0.0
    while not found or time.perf_counter() - began + longest < args.seconds:
        started = time.perf_counter()
        windows = sample(
            model,
            tokenizer,
            tokens=args.rows * args.window,
            seq_len=args.window,
            batch_size=args.rows,
            chat_share=args.chat_share,
            seed=1000 * args.seed + len(found),
            progress=False,
        )
        found.append(windows.to(torch.uint16))
        torch.save(torch.cat(found), args.out)
        seconds = time.perf_counter() - started
        longest = seconds if len(found) > 1 else 0.0
        print(f"{windows.numel()} tokens in {seconds:.1f} s", flush=True)


def main() -> None:
    """Write text, or do the runs for which there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    writing, training = verbs.add_parser("write"), verbs.add_parser("train")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    for each in (writing, training):
        each.add_argument("--model", type=Path, required=True)
        each.add_argument("--window", type=int, default=512)
        each.add_argument("--device", default=default)
    writing.set_defaults(do=write)
    writing.add_argument("--out", type=Path, required=True)
    writing.add_argument("--chat-share", type=float, default=0.0)
    writing.add_argument("--seconds", type=float, default=90.0)
    writing.add_argument("--rows", type=int, default=1024, help="windows that are written at once")
    writing.add_argument("--seed", type=int, default=0)
    training.set_defaults(do=train)
    training.add_argument("--text", type=named, action="append", default=[], metavar="NAME=FILE")
    training.add_argument("--own", type=named, action="append", default=[], metavar="NAME=FILE")
    training.add_argument("--mix", type=Path)
    training.add_argument("--json", type=Path, required=True)
    training.add_argument("--minutes", type=float, default=8.0)
    training.add_argument("--scheme", default="nvfp4a16")
    training.add_argument("--runs", nargs="+", type=parsed, required=True, metavar="NAME:FIELDS")
    training.add_argument("--save", type=named, action="append", default=[], metavar="RUN=FOLDER")
    training.add_argument("--shrink", type=int, default=1)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    args.do(args)


def train(args: argparse.Namespace) -> None:
    """Do the runs."""
    study = Study(args)
    for name, run in args.runs:
        seconds = study.expected_seconds(run)
        if seconds > study.left():
            print(f"{name}: skipped, {seconds:.0f} s, {study.left():.0f} s are left", flush=True)
            continue
        try:
            study.train(name, run)
        except Exception as error:  # the other runs need not end with it
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(f"{study.left():.0f} s are left", flush=True)


if __name__ == "__main__":
    main()
