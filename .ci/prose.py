"""Judge the prose of pages, docstrings and comments; .ci/run calls it, and it fails on findings."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Phrases that have a plainer form, and that form; spaces match line breaks.
PLAINER = {
    "of whose": "whose, or a sentence of its own",
    "as ever": "leave it out",
    "had to be": "the present tense: what happens today",
    "turn(s|ed) out": "is",
    "by now": "leave it out",
    "it is worth noting": "leave it out",
    "please note": "leave it out",
    "simply": "leave it out",
    "in order to": "to",
    "(was|were|not) tried": "tested",
    "of one's own": "your own",
    "in silence|without a word": "silently",
    "is wanted": "expected",
    "knows no": "does not support",
    "brings? along": "has",
}
# "What is left ..." has no subject: the sentence has to be read twice.
QUESTION = re.compile(r"(?:^|[.:;]\s+)(What|Who|How)\b(?!.*\?)", re.MULTILINE)


def pages() -> Iterator[tuple[Path, int, str]]:
    """Yield the text of each page outside of code."""
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for path in (*tops, *sorted((ROOT / "docs").rglob("*.md"))):
        if "development" not in path.parts:
            text = path.read_text("utf-8")
            blank = lambda code: "\n" * code[0].count("\n")  # noqa: E731
            yield path, 1, re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.S | re.M)


def words_of_code() -> Iterator[tuple[Path, int, str]]:
    """Yield each docstring and comment of the package."""
    for path in sorted((ROOT / "fp4pass").rglob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and node.body:
                yield path, node.body[0].lineno, ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield path, token.start[0], token.string.lstrip("# ")


def findings() -> Iterator[str]:
    """Yield a line for each phrase that has a plainer form."""
    plainer = {re.compile(rf"\b({p})\b".replace(" ", r"\s+"), re.I): p for p in PLAINER}
    for source in (pages, words_of_code):
        for path, line, text in source():
            place = path.relative_to(ROOT).as_posix()
            for pattern, phrase in plainer.items():
                for found in pattern.finditer(text):
                    at = line + text.count("\n", 0, found.start())
                    yield f"{place}:{at}: {' '.join(found[0].split())!r}: {PLAINER[phrase]}"
            if source is words_of_code and QUESTION.search(text):
                yield f"{place}:{line}: a sentence begins with a question word"


if __name__ == "__main__":
    found = list(findings())
    print("\n".join(found))
    sys.exit(bool(found))
