"""Pages read as a native editor has them: phrases with a plainer form are found."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pages import ROOT

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [
    *TOP,
    *sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if "development" not in path.parts
    ),
]

# Phrases of pages that have a better form, and that form; spaces match line breaks.
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


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words and the better form of each phrase outside of code."""
    text = re.sub(
        r"^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M
    )
    for phrase, better in PLAINER.items():
        for found in re.finditer(rf"\b({phrase.replace(' ', chr(92) + 's+')})\b", text, re.I):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), better


def test_phrases_are_found() -> None:
    text = "A\nscale, as\never.\n```sh\nby now\n```\nIt was Tried simply; untried, byway.\n"
    found = sorted(phrases(text))
    assert [(line, words) for line, words, _ in found] == [
        *((2, "as ever"), (7, "simply"), (7, "was Tried"))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_phrase_with_a_plainer_form(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    found = [f"{page}:{line}: {words!r}: {better}" for line, words, better in phrases(text)]
    assert not found, "\n".join(["", *found])
