"""The documents of a text file, questions about one, and pairs of sentences, as tasks of lm-eval.

    python eval/quality/tasks/documents.py

makes tiny_lm_next.json of the held-out text of examples/tiny_lm. A question is some lines of a
document up to the middle of a line of prose, and the rest of that line; the three wrong answers are
rests of lines of other documents, of about the same length.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

TINY_LM = Path(__file__).parents[3] / "examples" / "tiny_lm" / "eval.txt"
QUESTIONS = Path(__file__).with_name("tiny_lm_next.json")

# Before the title of an article of WikiText, ` = Title = `; a section has more of the signs.
BEFORE_TITLE = re.compile(r"\n(?=[ \t]*= (?!=)[^\n]* =[ \t]*(?:\n|$))")

# Questions of tiny_lm, answers of each, and the seed of what is drawn.
COUNT, CHOICES, SEED = 100, 4, 0

# Characters of a document before the gap; enough for the topic, and the file stays small.
CONTEXT = 200

# A line of prose: words and their punctuation, and no signs of code.
PROSE = re.compile(r"[A-Za-z][\w ,.;:'()\"-]+")
WORDS = 8


def load(text: str | None = None, **_: Any) -> DatasetDict:
    """One row {"page": ...} a document. text: a file; the held-out text of tiny_lm if absent."""
    content = (Path(text) if text else TINY_LM).read_text(encoding="utf-8")
    return DatasetDict({"test": Dataset.from_list([{"page": page} for page in pages(content)])})


def load_wikitext(text: str | None = None, **_: Any) -> DatasetDict:
    """The same of a file that has to be named."""
    return load(str(_named(text, "wiki.test.raw")))


def load_questions(**_: Any) -> DatasetDict:
    """One row {"context", "choices", "label"} a question."""
    questions = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    return DatasetDict({"test": Dataset.from_list(questions)})


def load_gaps(text: str | None = None, **_: Any) -> DatasetDict:
    """The same of a file that has to be named: a thousand questions, if its lines give so many."""
    found = questions(pages(_named(text, "documents.txt").read_text(encoding="utf-8")), 1000)
    if not found:
        raise ValueError(f"{text}: there is no line of prose of eight words in it")
    return DatasetDict({"test": Dataset.from_list(found)})


def load_pairs(text: str | None = None, **_: Any) -> DatasetDict:
    """The same of the pairs in a file that has to be named; the first choice is right."""
    lines = _named(text, "blimp.jsonl").read_text(encoding="utf-8").splitlines()
    choices = [[pair["good"], pair["bad"]] for pair in map(json.loads, lines)]
    rows = [{"context": "", "choices": pair, "label": 0} for pair in choices]
    return DatasetDict({"test": Dataset.from_list(rows)})


def _named(text: str | None, example: str) -> Path:
    if text is None:
        raise ValueError(f"a file is needed: --metadata text={example}")
    return Path(text)


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


def main() -> None:
    """Write the questions of tiny_lm."""
    QUESTIONS.write_text(make(), encoding="utf-8")


def make() -> str:
    """Return JSON with a line for each question of tiny_lm."""
    found = questions(pages(TINY_LM.read_text(encoding="utf-8")), COUNT)
    return "[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n"


def questions(texts: list[str], count: int) -> list[dict[str, Any]]:
    """Return at most so many questions of documents, of all in turn."""
    gaps = [gap for i, text in enumerate(texts) for gap in find_gaps(i, text)]
    rng = random.Random(SEED)
    return [ask(gap, gaps, rng) for gap in spread(gaps, len(texts), rng)[:count]]


def find_gaps(document: int, text: str) -> list[dict[str, Any]]:
    """Every line of prose, cut after half of its words."""
    gaps = []
    for line in re.finditer(r"^[ #*]*(.+)$", text, re.MULTILINE):
        words = line[1].split(" ")
        if len(words) < WORDS or "" in words or not PROSE.fullmatch(line[1]):
            continue
        before = line.start(1) + len(" ".join(words[: len(words) // 2]))
        start = text.find("\n", max(0, before - CONTEXT), line.start()) + 1
        gaps.append(
            {
                "document": document,
                "context": text[start or line.start() : before].lstrip("\n"),
                "rest": " ".join(words[len(words) // 2 :]),
            }
        )
    return gaps


def spread(gaps: list[dict[str, Any]], documents: int, rng: random.Random) -> list[dict[str, Any]]:
    """Gaps in random order, of all documents in turn."""
    queues = [[gap for gap in gaps if gap["document"] == i] for i in range(documents)]
    for queue in queues:
        rng.shuffle(queue)
    rounds = range(max(map(len, queues)))
    in_turn = [queue[i] for i in rounds for queue in queues if i < len(queue)]
    return in_turn


def ask(gap: dict[str, Any], gaps: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """A question whose wrong answers are drawn of the nearest in length."""
    others = [other for other in gaps if other["document"] != gap["document"]]
    others.sort(key=lambda other: abs(len(other["rest"]) - len(gap["rest"])))
    near = sorted({other["rest"] for other in others[: 8 * CHOICES]} - {gap["rest"]})
    choices = [gap["rest"], *rng.sample(near, CHOICES - 1)]
    rng.shuffle(choices)
    label = choices.index(gap["rest"])
    return {"context": gap["context"], "choices": choices, "label": label}


if __name__ == "__main__":
    main()
