"""Study how far distillation brings a converted model: tokens, rates, batches, and what learns.

    python -m eval.quality.distillation --model FOLDER --json OUT --own OWN.pt --minutes 8 \
        --text WikiText-2=FILE --text documents=FILE [--text code=FILE] [--runs A B C.005 ...]

The original writes text, half of it plain and half conversations, and a model that is converted on
a part of it is trained on the whole by `fp4pass.lab.distill.Training`. Each run of `RUNS` begins
with the same model. KL is measured on windows of texts that nobody trains on, and on conversations
that the original writes from another seed ("chats"). The windows are those of every run, so that
the interval of a change, a bootstrap over windows, is of pairs.

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
from dataclasses import dataclass
from pathlib import Path

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

WINDOWS, EVALUATIONS, CALIBRATED = 24, 6, 1 << 15
K, M = 1 << 10, 1 << 20

# A run whose KL rises by more than this part of its start's is given up.
RUINED = 0.5


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

# In the order of importance.
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
            row["texts"] = self.measured(packed)
            self.results.put(row)
            print(line(name, row), flush=True)
        return self.starts[key]

    @torch.no_grad()
    def measured(self, model: nn.Module, start: Row | None = None) -> Row:
        """Return KL and agreement on each text, and the change of KL from a start.

        The change is a part of the start's KL, with its interval of 95 %.
        """
        found: Row = {}
        for name, windows in self.texts.items():
            kl, same = list[Tensor](), list[Tensor]()
            for ids in windows.split(8):
                own, other = (each(ids, use_cache=False).logits for each in (model, self.original))
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

    def train(self, name: str, run: Run) -> None:
        """Train a copy of the start, and put what came of it into the results."""
        model = trainable(copy.deepcopy(self.start(run)[0]), self.original, share=run.share)
        training = Training(model, run.rate, run.norms, betas=(0.9, 0.95), eps=run.eps)
        first, window = training.numbers(), self.args.window
        size = max(run.step // self.args.shrink // window, 1)
        steps = max(1, run.tokens // self.args.shrink // (size * window))
        marks = {math.ceil(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
        row: Row = {"run": name, "seed": self.args.seed, "of": dataclasses.asdict(run)}
        row |= {"steps": steps, "epochs": steps * size * window / self.own.numel()}
        row["travel"] = run.rate * sum(run.factor(step, steps) for step in range(steps))
        print(f"{name}: {steps} steps, latents can go {row['travel']:.2f}", flush=True)
        start: Row = {"step": 0, "tokens": 0, "texts": self.measured(model)}
        rows, seconds, losses = [start], 0.0, list[Tensor]()
        batches = draw(list(self.own.split(1)), size, 1000 * run.seed)
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
            print(line(name, {"texts": row["written"]}), flush=True)
        if steps > 2:
            self.seconds_a_token[run.scheme or self.args.scheme] = seconds / training.tokens
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
    cells = [f"{name:12} {row.get('tokens', 0):9}"]
    cells.append(f"{row.get('seconds', 0):6.1f} s")
    for text, found in row["texts"].items():
        change = ""
        if "change" in found:
            low, high = found["interval"]
            change = f" {100 * found['change']:+.1f} ({100 * low:+.1f} {100 * high:+.1f}) %"
        cells.append(f"{text} {found['kl']:.4f}{change} {100 * found['top1']:.1f}")
    if "codes_changed" in row:
        cells.append(f"codes {100 * row['codes_changed']:.3f} %")
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
