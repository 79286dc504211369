"""Train the small causal language model in `examples/tiny_lm/`.

    python examples/train_tiny_lm.py --corpus build/tiny_lm_corpus.json

The corpus is what comes with Python itself: the language reference that `help()` shows, the
docstrings of modules written in C, and the sources of the standard library. Whole documents are
held out for calibration and for evaluation. `--corpus` names a file to keep the collected documents
in: it is written if it is missing and read if it is there, so that one Python can collect them and
another one train. A try on a CPU:

    python examples/train_tiny_lm.py --steps 3 --batch 2 --out build/tiny_lm
"""

import argparse
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import platform
import re
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

BOS = "<|doc|>"
CONTEXT = 512
SEPARATOR = f"\n{BOS}\n"

# Tests, generated tables, build settings and what pip installed: not text that a person wrote.
SKIPPED_FOLDERS = re.compile(
    r"test|tests|idle_test|encodings|pydoc_data|site-packages|dist-packages|config-.*|__.*__"
)
SKIPPED_FILES = re.compile(r"_sysconfigdata.*|stringprep|entities|this|keycert.*")
# In each held-out text, characters of each kind of document.
HELD_OUT = {"topic": 60_000, "docstrings": 15_000, "source": 115_000}
HELD_OUT_LENGTHS = range(800, 30_000)
# The held-out texts are published with the model: no addresses or absolute paths in them.
PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.\w+|/(tmp|home|root|work|Users)\b")
CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\uffff]")
# GPT-2's pre-tokenizer, with at most three digits a token.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PROMPTS = ("A module", "def read_", "class Error")


@dataclass(frozen=True)
class Recipe:
    """Shape of the model and how it is trained; every field is a flag.

    `weight_decay` is far above the usual 0.1, and `noise` is the share of input tokens that are
    replaced by random ones: without them, so many epochs over so small a corpus overfit.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    steps: int = 3500
    batch: int = 64
    lr: float = 6e-3
    warmup: int = 200
    weight_decay: float = 3.0
    noise: float = 0.1
    evaluate_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Document:
    """One text; `kind` is "topic", "docstrings" or "source"."""

    kind: str
    name: str
    text: str

    @property
    def key(self) -> str:
        return text_key(f"{self.kind}:{self.name}")


def text_key(text: str) -> str:
    """Sorting by it puts texts in a fixed random order."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- corpus -----------------------------------------------------------------------------------


def topics() -> Iterator[Document]:
    """The language reference, as `help("topic")` prints it."""
    for name, text in importlib.import_module("pydoc_data.topics").topics.items():
        yield Document("topic", name, text)


def sources() -> Iterator[Document]:
    """The standard library's modules that are written in Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if any(SKIPPED_FOLDERS.fullmatch(part) for part in place.parts[:-1]):
            continue
        if not SKIPPED_FILES.fullmatch(path.stem):
            with tokenize.open(path) as file:
                yield Document("source", place.as_posix(), file.read())


def docstrings() -> Iterator[Document]:
    """The docstrings of the modules that are written in C."""
    in_c = (importlib.machinery.BuiltinImporter, importlib.machinery.ExtensionFileLoader)
    for name in sorted(sys.stdlib_module_names):
        spec = None if "test" in name or "xx" in name else importlib.util.find_spec(name)
        if spec and (spec.loader in in_c or isinstance(spec.loader, in_c)):
            module = importlib.import_module(name)
            yield Document("docstrings", name, "\n\n".join(described(name, module)))


def described(name: str, owner: ModuleType | type) -> Iterator[str]:
    """Name, signature and docstring of a module or class, then of what it defines."""
    yield f"{name}{signature(owner)}\n\n{inspect.cleandoc(owner.__doc__ or '')}".rstrip()
    for member, value in sorted(vars(owner).items()):
        if member.startswith("__") or not isinstance(getattr(value, "__doc__", None), str):
            continue
        if inspect.isclass(value) and isinstance(owner, ModuleType):
            yield from described(member, value)
        elif inspect.isroutine(value) or inspect.isdatadescriptor(value):
            yield f"{member}{signature(value)}\n{inspect.cleandoc(value.__doc__)}"


def signature(value: object) -> str:
    """Signature of something written in C, as a caller writes it, where it has one."""
    text = getattr(value, "__text_signature__", None) or ""
    return re.sub(r"\$\w+(, /)?(, )?", "", text)


def collect() -> list[Document]:
    """All documents of this Python, without near copies, in a fixed random order."""
    documents = []
    for document in (*topics(), *docstrings(), *sources()):
        text = document.text.replace("\f", "").expandtabs().strip("\n")
        if text and not CONTROL.search(text):
            documents.append(Document(document.kind, document.name, text))
    # Longest first: topics repeat parts of longer ones, C docstrings those of a Python twin.
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=lambda d: (-len(d.text), d.key)):
        lines = {s for line in document.text.splitlines() if len(s := line.strip()) > 20}
        if lines and len(lines & seen) <= 0.3 * len(lines):
            kept.append(document)
            seen |= lines
    return sorted(kept, key=lambda d: d.key)


def split(documents: Iterable[Document]) -> dict[str, list[str]]:
    """Texts of the "train", "calib" and "eval" documents; whole documents are held out."""
    texts: dict[str, list[str]] = {"train": [], "calib": [], "eval": []}
    room = {(part, kind): n for part in ("calib", "eval") for kind, n in HELD_OUT.items()}
    for document in documents:
        part = max(("calib", "eval"), key=lambda part: room[part, document.kind])
        fits = len(document.text) <= room[part, document.kind]
        if fits and len(document.text) in HELD_OUT_LENGTHS and not PRIVATE.search(document.text):
            room[part, document.kind] -= len(document.text)
        else:
            part = "train"
        texts[part].append(document.text)
    # The short kinds fill up first, so mix again: the first windows should show every kind.
    return {part: sorted(held, key=text_key) for part, held in texts.items()}


def load_corpus(path: Path | None) -> tuple[str, list[Document]]:
    """The version of Python that the documents come from, and the documents."""
    if path and path.exists():
        stored = json.loads(path.read_text())
        return stored["python"], [Document(**d) for d in stored["documents"]]
    documents = collect()
    if path:
        stored = {"python": platform.python_version(), "documents": [asdict(d) for d in documents]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored))
    return platform.python_version(), documents


# ---- tokens -----------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose token 0 starts a document."""
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
    """The documents one after the other, each behind its `<|doc|>`. Returns [tokens] int64."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([i for ids in encoded for i in (tokenizer.bos_token_id, *ids)])


def windows(stream: Tensor, start: int = 0) -> Tensor:
    """Non-overlapping windows of a token stream, the rest left out. Returns [n, CONTEXT]."""
    n = (len(stream) - start) // CONTEXT
    return stream[start : start + n * CONTEXT].view(n, CONTEXT)


# ---- model ------------------------------------------------------------------------------------


def build_model(recipe: Recipe) -> nn.Module:
    """A Qwen3 with fresh weights."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(config)


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of every target but the first. inputs, targets: [n, CONTEXT]."""
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten())


def corrupt(batch: Tensor, recipe: Recipe) -> Tensor:
    """The batch with a share `noise` of its tokens replaced by random ones."""
    hit = torch.rand(batch.shape, device=batch.device) < recipe.noise
    return torch.where(hit, torch.randint_like(batch, recipe.vocab_size), batch)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, batch: int = 16) -> float:
    """Mean loss in nats per scored token. held_out: [n, CONTEXT]."""
    model.eval()
    losses = [token_loss(model, part, part).double() * len(part) for part in held_out.split(batch)]
    return float(sum(losses) / len(held_out))


def train(model: nn.Module, stream: Tensor, held_out: Tensor, recipe: Recipe) -> list[dict]:
    """Train in place, leave the weights of the lowest held-out loss, return the loss curve.

    stream: [tokens]. held_out: [n, CONTEXT]. Both on the model's device.
    """
    on_gpu = stream.device.type == "cuda"
    autocast = torch.autocast(stream.device.type, torch.bfloat16, enabled=on_gpu)
    step_loss = torch.compile(token_loss) if on_gpu else token_loss
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=on_gpu)

    def rate(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = shuffled_batches(stream, recipe)
    curve: list[dict] = []
    best: dict[str, Tensor] = {}
    recent = []
    for step in range(1, recipe.steps + 1):
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
        if step % recipe.evaluate_every and step != recipe.steps:
            continue
        with autocast:
            point = {"step": step, "calib_loss": evaluate(model, held_out)}
        point["train_loss"] = float(torch.stack(recent).mean())
        recent.clear()
        if point["calib_loss"] <= min((p["calib_loss"] for p in curve), default=math.inf):
            best = {name: value.clone() for name, value in model.state_dict().items()}
        curve.append(point)
        print(f"step {step}: train {point['train_loss']:.4f} calib {point['calib_loss']:.4f}")
    model.load_state_dict(best)
    return curve


def shuffled_batches(stream: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Batches of windows without end; every epoch cuts the stream at other places."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        start = int(torch.randint(CONTEXT, (), generator=generator))
        cut = windows(stream, start)
        order = torch.randperm(len(cut), generator=generator).to(stream.device)
        yield from (cut[rows] for rows in order.split(recipe.batch) if len(rows) == recipe.batch)


# ---- what is written --------------------------------------------------------------------------


def measure(model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str) -> dict:
    """Perplexity and bits per byte over a held-out text file."""
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


def continuation(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt, as the start of a document, and what the model writes next."""
    inputs = tokenizer(BOS + prompt, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=80,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


README = """# tiny_lm

A causal language model small enough for tests, the quickstart and CI: {parameters:,} parameters,
{weights_mb:.1f} MB in bfloat16. Everything in this folder was made by `examples/train_tiny_lm.py`,
this page included.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm")
```

| | |
|---|---|
| architecture | Qwen3: {num_hidden_layers} layers, hidden {hidden_size}, \
MLP {intermediate_size}, {num_attention_heads} query and {num_key_value_heads} key/value heads \
of {head_dim}, tied embeddings |
| tokenizer | byte-level BPE, vocabulary {vocab_size}; id 0 starts every document |
| context | {context} tokens |
| corpus | {train_documents} documents, {train_mb:.1f} MB, {train_tokens:,} tokens; \
Python {corpus_python} |
| training | {steps} steps of {batch} x {context} tokens ({epochs:.1f} epochs), AdamW, \
lr {lr}, weight decay {weight_decay}, \
{noise:.0%} of the input tokens random, weights of step {best_step} |
| trained on | {device}, {seconds:.0f} seconds; Python {python}, torch {torch}, \
transformers {transformers}, tokenizers {tokenizers} |

Id 0 is `<|doc|>`. The tokenizer does not add it by itself: put it before every document.

## Corpus and license

Only what comes with Python {corpus_python}: the language reference that `help()` shows,
the docstrings of the modules written in C, and the sources of the standard library without tests
and generated tables. Near copies are left out. `calib.txt` and `eval.txt` are whole documents that
the model was not trained on, separated by a line `<|doc|>`. They are parts of Python and stay under
the Python Software Foundation License, version 2 (https://docs.python.org/3/license.html).

## Held-out loss

Of the bfloat16 model, in windows of {context} tokens that do not overlap, each scored on all but
its first token. `calib.txt` also chose the settings and the step whose weights were kept;
`eval.txt` chose nothing.

| text | documents | bytes | scored tokens | perplexity | bits per byte |
|---|---|---|---|---|---|
{results}

## Samples

Of the bfloat16 model on a CPU: prompts {prompts},
each as the start of a document; temperature 0.7, top-p 0.9, seed 0.

{samples}

## Making it again

```
{command}
```

Documents were collected with Python {corpus_python}; another version of Python has other documents.
`training.json` holds the settings, the loss curve and the numbers above.
"""


def write_readme(out: Path, report: dict, samples: list[str]) -> None:
    """The folder's README, from the numbers of the run."""
    rows = [
        f"| `{name}.txt` | {r['documents']} | {r['bytes']:,} | {r['scored_tokens']:,} "
        f"| {r['perplexity']:.2f} | {r['bits_per_byte']:.3f} |"
        for name, r in report["results"].items()
    ]
    text = README.format(
        **report["recipe"],
        **report["versions"],
        **{k: v for k, v in report.items() if not isinstance(v, dict)},
        context=CONTEXT,
        weights_mb=(out / "model.safetensors").stat().st_size / 1e6,
        train_mb=report["train_bytes"] / 1e6,
        prompts=", ".join(f"`{prompt}`" for prompt in PROMPTS),
        results="\n".join(rows),
        samples="\n\n".join(f"```text\n{sample.rstrip()}\n```" for sample in samples),
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("examples/tiny_lm"))
    parser.add_argument("--corpus", type=Path, help="JSON file that keeps the documents")
    for field in fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
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

    model = build_model(recipe).to(device)
    begin = time.perf_counter()
    curve = train(model, stream, held_out, recipe)
    seconds = time.perf_counter() - begin
    model.to(torch.bfloat16).save_pretrained(args.out)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(args.out)

    # From here on the saved model speaks, on the device everybody has.
    model = AutoModelForCausalLM.from_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
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
        "epochs": recipe.steps * recipe.batch * CONTEXT / len(stream),
        "seconds": round(seconds, 1),
        "best_step": min(curve, key=lambda p: p["calib_loss"])["step"],
        "results": {part: measure(model, tokenizer, text) for part, text in held_out_texts.items()},
        "curve": curve,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    write_readme(args.out, report, [continuation(model, tokenizer, p) for p in PROMPTS])
    print(json.dumps(report["results"], indent=1))


if __name__ == "__main__":
    main()
