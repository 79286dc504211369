"""The site for language models: llms.txt lists its pages, llms-full.txt has them in one file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# A page includes a file, or a section of one.
INCLUDE = re.compile(r'^( *)-+8<-+ "([^":]+)(?::(\w+))?"$', re.MULTILINE)
# A page shows the docstring of a name.
DOCSTRING = re.compile(r"^::: (\S+)$", re.MULTILINE)

# The pages of a build by their paths, as Markdown.
PAGES: dict[str, tuple[Page, str]] = {}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """Keep the text of a page."""
    PAGES[page.file.src_uri] = (page, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write both files."""
    site = Path(config.site_dir)
    head = f"# fp4pass\n\n> {config.site_description}\n"
    sections: dict[str, list[str]] = {}
    full = [head]
    for page, markdown in ordered(config):
        text = whole(markdown)
        title, link = page.title or page.file.name, page.file.url
        section = page.parent.title if page.parent is not None else "Start"
        sections.setdefault(str(section), []).append(f"- [{title}]({link}): {summary(text)}")
        full.append(f"<!-- {link} -->\n\n{text.strip()}\n")
    lists = [f"## {name}\n\n" + "\n".join(lines) + "\n" for name, lines in sections.items()]
    notes = "All pages in one file: [llms-full.txt](llms-full.txt).\n"
    (site / "llms.txt").write_text("\n".join([head, notes, *lists]), "utf-8")
    (site / "llms-full.txt").write_text("\n".join(full), "utf-8")
    PAGES.clear()


def ordered(config: MkDocsConfig) -> Iterator[tuple[Page, str]]:
    """Yield pages in the order of the navigation."""

    def paths(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from paths(value) if isinstance(value, list) else [value]

    for path in paths(config.nav or []):
        if path in PAGES:
            yield PAGES[path]


def summary(text: str) -> str:
    """Return the first sentence of a page that is none of a heading, a list, a table or code."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n", text):
        if part.strip() and not re.match(r"\s*([#|<!:$]|[-*] |\d+\. |    )", part):
            line = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
            return re.split(r"(?<=[.?])\s", line)[0].rstrip(":")
    return "reference."


def whole(markdown: str) -> str:
    """Return a page with what it includes, and with the docstrings that it shows."""
    markdown = re.sub(r"<svg.*?</svg>", "", markdown, flags=re.DOTALL)
    return DOCSTRING.sub(lambda found: described(found[1]), INCLUDE.sub(included, markdown))


def included(found: re.Match[str]) -> str:
    """Return what stands in place of an include, as pymdownx.snippets reads it."""
    indent, path, section = found.groups()
    text = (ROOT / path).read_text("utf-8")
    if section:
        start, end = (f"--8<-- [{word}:{section}]" for word in ("start", "end"))
        text = text.split(start)[1].split("\n", 1)[1].split(end)[0].rpartition("\n")[0]
    lines = [line for line in text.rstrip().split("\n") if "--8<--" not in line]
    return "\n".join(f"{indent}{line}" for line in lines)


def described(name: str) -> str:
    """Return a heading, the signature and the docstring of a public name."""
    found = package()[name.removeprefix("fp4pass.")]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    text = found.docstring.value if found.docstring else ""
    shown = ""
    if isinstance(found, griffe.Function):
        shown = f"```python\n{found.signature()}\n```\n\n"
    return f"## {name}\n\n{shown}{text}"


def package() -> griffe.Module:
    """Return fp4pass as griffe reads it, without importing it."""
    if not LOADED:
        loader = griffe.GriffeLoader(search_paths=[ROOT])
        LOADED.append(loader.load("fp4pass"))
        loader.resolve_aliases()
    return LOADED[0]


LOADED: list[Any] = []
