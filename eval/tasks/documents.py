"""The documents of a text file as a task of lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

TINY_LM = Path(__file__).parents[2] / "examples" / "tiny_lm" / "eval.txt"


def load(text: str | None = None, **_: Any) -> DatasetDict:
    """One row {"page": ...} a document. text: a file; the held-out text of tiny_lm if absent."""
    content = (Path(text) if text else TINY_LM).read_text(encoding="utf-8")
    pages = content.removesuffix("\n").split("\n<|doc|>\n")
    return DatasetDict({"test": Dataset.from_list([{"page": page} for page in pages])})


def process_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Words and bytes are those of the document as it is."""
    (loglikelihood,) = results
    size = len(doc["page"].encode("utf-8"))
    return {
        "word_perplexity": (loglikelihood, len(doc["page"].split())),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
