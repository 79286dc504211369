"""What the site shows that lies outside of docs/: pages of the top, results, linked files."""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

# Pages of the site that are files at the top of the repository.
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}

# A link or an image of Markdown; code in backticks is none.
LINK = re.compile(
    r"(`[^`\n]+`)"
    r"|(!?\[(?:[^][`]|`[^`]*`|!\[[^]]*\]\([^)]*\))*\]\()"
    r"([^)\s#]+)(#[^)\s]*)?\)"
)


# Code of one word: an option, a name. A browser would break --scheme at a hyphen.
WORD = re.compile(r"<code>([^<\s]{1,24})</code>")

# A block of code. Wider lines than this are commands and messages, which may wrap; tables are not.
CODE = re.compile(r'<div class="highlight"><pre>.*?</pre>', re.DOTALL)
WIDEST = 110

# The begin or end of a part of a page, in a comment of its own.
MARK = re.compile(r"^<!-- --8<-- .* -->\n", re.MULTILINE)

# What links call a page whose name is their text: its title in the navigation.
TITLES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """Show the version, and read the titles of pages from the navigation.

    The first page of a section has the title of the section.
    """
    config.site_name = f"{config.site_name} {version()}"

    def read(entries: list[Any], section: str) -> None:
        for entry in entries:
            for title, value in entry.items() if isinstance(entry, dict) else [(section, entry)]:
                if isinstance(value, list):
                    read(value, title)
                else:
                    TITLES[value] = title

    read(config.nav or [], "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top, the numbers of the results page, and files that pages link to."""
    for source, page in TOP.items():
        if (ROOT / source).exists():
            # Marks of a part that another page includes are no text.
            text = MARK.sub("", (ROOT / source).read_text("utf-8"))
            files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "assets/results.js", content=results()))
    for name, text in local(".", "eval.pages.architectures").pages().items():
        files.append(File.generated(config, name, content=text))
    linked = {
        target
        for file in files.documentation_pages()
        for target in outside(file.content_string, folder_of(file.src_uri))
        if (ROOT / target).is_file() and not target.endswith(".md")
    }
    for target in sorted(linked):
        path = f"files/{target}"
        files.append(File.generated(config, path, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files of the repository to where the site has them."""
    if "<!-- rooms -->" in markdown:
        markdown = markdown.replace("<!-- rooms -->", local("docs", "rooms").svg())
    folder = folder_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        code, label, target, anchor = found.groups()
        if code or re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in TOP or path.startswith("docs/"):
            to = TOP.get(path, path.removeprefix("docs/"))
            if label == f"[{posixpath.basename(target)}](":
                label = f"[{TITLES.get(to, label[1:-2])}]("
        elif (ROOT / path).is_file() and not path.endswith(".md"):
            to = f"files/{path}"
        else:
            # A folder, or a page of the repository that the site lacks: its name.
            return f"{label[1:-2]} (`{path}`)"
        return f"{label}{posixpath.relpath(to, here or '.')}{anchor or ''})"

    return "".join(
        part if part.startswith("```") else LINK.sub(moved, part)
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def on_page_content(html: str, **_: Any) -> str:
    """Mark the code that wraps otherwise than the theme has it; site.css does the rest."""
    html = WORD.sub(r'<code class="word">\1</code>', html)
    return CODE.sub(lambda block: wrapped(block[0]), html)


def wrapped(block: str) -> str:
    """Return a block of code, marked if a line is wider than any page, as commands are."""
    lines = unescape(re.sub(r"<[^>]*>", "", block)).splitlines()
    if max(map(len, lines), default=0) <= WIDEST:
        return block
    return block.replace('class="highlight"', 'class="highlight wraps"', 1)


def version() -> str:
    """Return the version of the package, which the head of each page shows."""
    text = (ROOT / "fp4pass" / "_version.py").read_text("utf-8")
    return re.findall(r'__version__ = "(.+)"', text)[0]


def folder_of(page: str) -> str:
    """Return the folder in the repository that the links of a page start from."""
    return "" if page in TOP.values() else posixpath.join("docs", posixpath.dirname(page))


def outside(text: str, folder: str) -> Iterator[str]:
    """Yield the paths in the repository that the links of a page lead to, outside of docs/."""
    for code, _, target, _ in LINK.findall(text):
        if not code and not re.match(r"[a-z]+:", target):
            path = posixpath.normpath(posixpath.join(folder, target))
            if not path.startswith(("docs/", "..")):
                yield path


def results() -> str:
    """Return the script that holds the numbers of the results page."""
    table = local(".", "eval.pages.explorer")
    found = table.explorer(table.load(ROOT / "eval" / "results"))
    return f"window.RESULTS = {json.dumps(found, separators=(',', ':'))};\n"


def local(folder: str, name: str) -> ModuleType:
    """Import a module of a folder of the repository that is no package."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
