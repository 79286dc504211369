"""Make tiny_lm_next.json of the held-out text of examples/tiny_lm.

    python eval/quality/tasks/make_tiny_lm_next.py

A question is some lines of a document up to the middle of a line of prose, and the rest of that
line; the three wrong answers are rests of lines of other documents, of about the same length.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from documents import QUESTIONS, TINY_LM, pages

COUNT, CHOICES, SEED = 100, 4, 0

# Characters of a document before the gap; enough for the topic, and the file stays small.
CONTEXT = 200

# A line of prose: words and their punctuation, and no signs of code.
PROSE = re.compile(r"[A-Za-z][\w ,.;:'()\"-]+")
WORDS = 8


def main() -> None:
    QUESTIONS.write_text(make(), encoding="utf-8")


def make() -> str:
    """JSON with a line for each question."""
    texts = pages(TINY_LM.read_text(encoding="utf-8"))
    gaps = [gap for i, text in enumerate(texts) for gap in find_gaps(i, text)]
    rng = random.Random(SEED)
    questions = [ask(gap, gaps, rng) for gap in spread(gaps, len(texts), rng)]
    return "[\n" + ",\n".join(map(json.dumps, questions)) + "\n]\n"


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
    return in_turn[:COUNT]


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
