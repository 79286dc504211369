"""Train the small causal language model in `examples/tiny_lm/`.

    python examples/train_tiny_lm.py --corpus build/tiny_lm_corpus.json

The corpus comes with Python: the language reference that `help()` shows, the docstrings of modules
written in C, and the sources of the standard library. Whole documents are held out for calibration
and for evaluation. `--corpus` names a file that keeps the collected documents. It is written if it
is missing and read if it is there, so that one Python can collect them and another one train. A try
on a CPU:

    python examples/train_tiny_lm.py --steps 3 --batch 2 --out build/tiny_lm
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from small_lm import BOS, CONTEXT, Training, make, measure, parse_args, recipe_of, write_report
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

PROMPTS = ("A module", "def read_", "class Error")


@dataclass(frozen=True)
class Recipe(Training):
    """Shape of the model and how it is trained; every field is a flag."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64


def build_model(recipe: Recipe) -> nn.Module:
    """Build a Qwen3 with fresh weights."""
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
    return AutoModelForCausalLM.from_config(config)


def continuation(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the prompt, as the start of a document, and the text that the model adds."""
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
    """Return the README of the folder, from the numbers of the run."""
    rows = [
        f"| `{name}.txt` | {r['documents']} | {r['bytes']:,} | {r['scored_tokens']:,} "
        f"| {r['perplexity']:.2f} | {r['bits_per_byte']:.3f} |"
        for name, r in report["results"].items()
    ]
    plain = {k: v for k, v in report.items() if not isinstance(v, dict)}
    text = README.format(
        **{**report["recipe"], **report["versions"], **plain},
        context=CONTEXT,
        weights_mb=(out / "model.safetensors").stat().st_size / 1e6,
        train_mb=report["train_bytes"] / 1e6,
        prompts=", ".join(f"`{prompt}`" for prompt in PROMPTS),
        results="\n".join(rows),
        samples="\n\n".join(f"```text\n{sample.rstrip()}\n```" for sample in samples),
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    args = parse_args(__doc__, Recipe, Path("examples/tiny_lm"))
    recipe = recipe_of(args, Recipe)
    report, texts = make(args, recipe, lambda: build_model(recipe))
    # From here on the saved model speaks, on the device everybody has.
    model = AutoModelForCausalLM.from_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    report["results"] = {part: measure(model, tokenizer, text) for part, text in texts.items()}
    write_report(args.out, report)
    write_readme(args.out, report, [continuation(model, tokenizer, p) for p in PROMPTS])


if __name__ == "__main__":
    main()
