"""The documents of a text file, and questions about one, as tasks of lm-eval."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

TINY_LM = Path(__file__).parents[3] / "examples" / "tiny_lm" / "eval.txt"
QUESTIONS = Path(__file__).with_name("tiny_lm_next.json")

# Before the title of an article of WikiText, ` = Title = `; a section has more of the signs.
BEFORE_TITLE = re.compile(r"\n(?=[ \t]*= (?!=)[^\n]* =[ \t]*(?:\n|$))")


def load(text: str | None = None, **_: Any) -> DatasetDict:
    """One row {"page": ...} a document. text: a file; the held-out text of tiny_lm if absent."""
    content = (Path(text) if text else TINY_LM).read_text(encoding="utf-8")
    return DatasetDict({"test": Dataset.from_list([{"page": page} for page in pages(content)])})


def load_wikitext(text: str | None = None, **_: Any) -> DatasetDict:
    """The same of a file that has to be named."""
    if text is None:
        raise ValueError("a file is needed: --metadata text=wiki.test.raw")
    return load(text)


def load_questions(**_: Any) -> DatasetDict:
    """One row {"context", "choices", "label"} a question."""
    questions = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    return DatasetDict({"test": Dataset.from_list(questions)})


def pages(content: str) -> list[str]:
    """Documents between lines `<|doc|>`, or without one between the titles of WikiText."""
    found = content.removesuffix("\n").split("\n<|doc|>\n")
    if len(found) == 1:
        found = [page for page in BEFORE_TITLE.split(content) if page.strip()]
    return found


def process_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Words and bytes are those of the document as it is."""
    (loglikelihood,) = results
    size = len(doc["page"].encode("utf-8"))
    return {
        "word_perplexity": (loglikelihood, len(doc["page"].split())),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
