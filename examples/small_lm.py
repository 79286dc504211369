"""Share what the scripts that train small language models need: tokens, the loop, the report."""

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from python_texts import load_corpus, split
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS = "<|doc|>"
CONTEXT = 512
SEPARATOR = f"\n{BOS}\n"

# GPT-2's pre-tokenizer, with at most three digits a token.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Steps that tell how long one takes, the first few apart.
TIMED = range(10, 50)

# Mean loss of a model of inputs and targets [n, CONTEXT].
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Training:
    """How a model is trained; every field is a flag.

    `weight_decay` is far above the usual 0.1, and `noise` is the share of input tokens that are
    replaced by random ones: without them, so many epochs over so small a corpus overfit.
    `seconds` is for as many of the steps as fit; 0 for all.
    """

    vocab_size: int = 2048
    steps: int = 3500
    batch: int = 64
    lr: float = 6e-3
    warmup: int = 200
    weight_decay: float = 3.0
    noise: float = 0.1
    evaluate_every: int = 100
    seconds: float = 0.0
    seed: int = 0


# ---- tokens -----------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose token 0 starts a document."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """Return the tokens [tokens] int64 of all documents, each behind its `<|doc|>`."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([i for ids in encoded for i in (tokenizer.bos_token_id, *ids)])


def windows(stream: Tensor, start: int = 0) -> Tensor:
    """Cut a token stream into windows [n, CONTEXT] that do not overlap; drop the rest."""
    n = (len(stream) - start) // CONTEXT
    return stream[start : start + n * CONTEXT].view(n, CONTEXT)


# ---- training ---------------------------------------------------------------------------------


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all targets [n, CONTEXT] but the first."""
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten())


def corrupt(batch: Tensor, recipe: Training) -> Tensor:
    """Replace a share `noise` of the tokens of a batch by random ones."""
    hit = torch.rand(batch.shape, device=batch.device) < recipe.noise
    return torch.where(hit, torch.randint_like(batch, recipe.vocab_size), batch)


@torch.no_grad()
def evaluate(
    model: nn.Module, held_out: Tensor, loss_of: Loss = token_loss, batch: int = 16
) -> float:
    """Return the mean loss of held_out [n, CONTEXT], in nats per scored token."""
    model.eval()
    losses = [loss_of(model, part, part).double() * len(part) for part in held_out.split(batch)]
    return float(sum(losses) / len(held_out))


def train(
    model: nn.Module,
    stream: Tensor,
    held_out: Tensor,
    recipe: Training,
    loss_of: Loss = token_loss,
    compiled: bool = True,
) -> list[dict]:
    """Train in place, keep the weights of the lowest held-out loss, return the loss curve.

    stream: [tokens]. held_out: [n, CONTEXT]. Both on the model's device; `compiled` is for a GPU.
    """
    on_gpu = stream.device.type == "cuda"
    autocast = torch.autocast(stream.device.type, torch.bfloat16, enabled=on_gpu)
    step_loss = torch.compile(loss_of) if on_gpu and compiled else loss_of
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=on_gpu)
    steps = recipe.steps

    def rate(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(1, steps - recipe.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = shuffled_batches(stream, recipe)
    curve: list[dict] = []
    best: dict[str, Tensor] = {}
    recent = []
    began = 0.0
    for step in itertools.count(1):
        model.train()
        batch = next(batches)
        with autocast:
            loss = step_loss(model, corrupt(batch, recipe), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(loss.detach())
        if step == TIMED.start:
            loss.item()
            began = time.perf_counter()
        if step == TIMED.stop:
            loss.item()
            each = (time.perf_counter() - began) / len(TIMED)
            if recipe.seconds:
                steps = max(step, min(steps, int(recipe.seconds / each)))
            print(f"{batch.numel() / each:,.0f} tokens/s, {steps} steps", flush=True)
        if step % recipe.evaluate_every and step != steps:
            continue
        with autocast:
            point = {"step": step, "calib_loss": evaluate(model, held_out, loss_of)}
        point["train_loss"] = float(torch.stack(recent).mean())
        recent.clear()
        if point["calib_loss"] <= min((p["calib_loss"] for p in curve), default=math.inf):
            best = {name: value.clone() for name, value in model.state_dict().items()}
        curve.append(point)
        losses = f"train {point['train_loss']:.4f} calib {point['calib_loss']:.4f}"
        print(f"step {step}: {losses} perplexity {math.exp(point['calib_loss']):.3f}", flush=True)
        if step == steps:
            break
    model.load_state_dict(best)
    return curve


def shuffled_batches(stream: Tensor, recipe: Training) -> Iterator[Tensor]:
    """Yield batches of windows without end; every epoch cuts the stream at other places."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        start = int(torch.randint(CONTEXT, (), generator=generator))
        cut = windows(stream, start)
        order = torch.randperm(len(cut), generator=generator).to(stream.device)
        yield from (cut[rows] for rows in order.split(recipe.batch) if len(rows) == recipe.batch)


# ---- what is written --------------------------------------------------------------------------


def measure(model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str) -> dict:
    """Measure perplexity and bits per byte over a held-out text file."""
    stream = pack(tokenizer, text.removesuffix("\n").split(SEPARATOR))
    held_out = windows(stream)
    loss = evaluate(model, held_out.to(model.device))
    return {
        "documents": text.count(SEPARATOR) + 1,
        "bytes": len(text.encode()),
        "tokens": len(stream),
        "windows": len(held_out),
        "scored_tokens": held_out[:, 1:].numel(),
        "perplexity": round(math.exp(loss), 3),
        "bits_per_byte": round(loss / math.log(2) * len(stream) / len(text.encode()), 4),
    }


def make(
    args: argparse.Namespace,
    recipe: Training,
    build: Callable[[], nn.Module],
    loss_of: Loss = token_loss,
    compiled: bool = True,
) -> tuple[dict, dict[str, str]]:
    """Train a model and save it into `args.out`, with its tokenizer and the held-out texts.

    Returns a report of the training, and the held-out texts by "calib" and "eval".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    corpus_python, documents = load_corpus(args.corpus)
    texts = split(documents)
    held_out_texts = {part: SEPARATOR.join(texts[part]) + "\n" for part in ("calib", "eval")}
    for part, text in held_out_texts.items():
        (args.out / f"{part}.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer(texts["train"], recipe.vocab_size)
    tokenizer.save_pretrained(args.out)
    stream = pack(tokenizer, texts["train"]).to(device)
    held_out = windows(pack(tokenizer, texts["calib"])).to(device)

    torch.manual_seed(recipe.seed)
    model = build().to(device)
    begin = time.perf_counter()
    curve = train(model, stream, held_out, recipe, loss_of, compiled)
    seconds = time.perf_counter() - begin
    model.to(torch.bfloat16).save_pretrained(args.out)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(args.out)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "corpus_python": corpus_python,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_documents": len(texts["train"]),
        "train_bytes": sum(len(text.encode()) for text in texts["train"]),
        "train_tokens": len(stream),
        "steps": curve[-1]["step"],
        "epochs": curve[-1]["step"] * recipe.batch * CONTEXT / len(stream),
        "seconds": round(seconds, 1),
        "best_step": min(curve, key=lambda p: p["calib_loss"])["step"],
        "curve": curve,
    }
    return report, held_out_texts


def write_report(out: Path, report: dict) -> None:
    """Keep the report beside the model, and show its measures."""
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["results"], indent=1))


def parse_args(description: str | None, recipe: type[Training], out: Path) -> argparse.Namespace:
    """Read the paths, and every field of a recipe."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--corpus", type=Path, help="JSON file that keeps the documents")
    for field in fields(recipe):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    return parser.parse_args()


def recipe_of(args: argparse.Namespace, recipe: type[Training]) -> Training:
    """Return the recipe that the flags give."""
    return recipe(**{field.name: getattr(args, field.name) for field in fields(recipe)})
