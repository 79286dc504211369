"""Pages in Python-Markdown, which makes the site: what CommonMark reads as a list is one."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from browser import browse
from pages import ROOT

markdown = pytest.importorskip("markdown")
markdown_it = pytest.importorskip("markdown_it")
mkdocs_config = pytest.importorskip("mkdocs.config")
pytest.importorskip("material")
pytest.importorskip("latex2mathml")

ALL = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "reference" not in path.parts
)

# A box of the site, and its contents.
BOX = re.compile(r"^(?:\?\?\?|!!!|===)\+? .*\n((?:(?: {4}.*)?\n)*)", re.MULTILINE)

EXPLORER = ROOT / "docs" / "assets" / "explorer.js"


@pytest.fixture(scope="module")
def site_markdown() -> Any:
    """Python-Markdown as .mkdocs.yml sets it up."""
    config = mkdocs_config.load_config(str(ROOT / ".mkdocs.yml"))
    options = config.mdx_configs
    return markdown.Markdown(extensions=config.markdown_extensions, extension_configs=options)


class Counts(HTMLParser):
    """How many items, code blocks and tables a page has, without those that it includes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag in ("li", "table"):
            self.found[tag] += 1


def commonmark(text: str) -> Counter[str]:
    """What GitHub makes of a page, without the boxes (`???`, `===`) around their contents."""
    text = BOX.sub(lambda box: dedent(box[1]), text)
    return Counts(markdown_it.MarkdownIt("commonmark").enable("table").render(text)).found


@pytest.mark.slow
@pytest.mark.parametrize("page", ALL)
def test_lists_and_tables_are_those_of_github(page: str, site_markdown: Any) -> None:
    """The site needs an empty line before a list, and four spaces for what is in an item."""
    text = (ROOT / page).read_text("utf-8")
    html = site_markdown.reset().convert(text)
    # The bodies of tables are the same; the code of blocks is in none of the counts.
    found = Counts(re.sub(r'<table class="highlighttable">.*?</table>', "", html, flags=re.S)).found
    assert found == commonmark(text)
    prose = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", html, flags=re.DOTALL)
    assert not re.findall(r"\n *(?:[-*] |```|\$\$).*", re.sub(r"<[^>]*>", "", prose))


# ---- the table of results ----------------------------------------------------------------------

CHOOSE = """
const shown = () => [...document.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent);
const before = shown(), select = document.querySelector("select[aria-label=method]");
select.value = "sse";
select.dispatchEvent(new Event("change"));
[...document.querySelectorAll("th button")].find(each => each.textContent.startsWith("KL")).click();
document.title = JSON.stringify([before, shown(), location.search]);
"""


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("query", "before", "after", "url"),
    [
        ("?sort=-kl", "a:16 a:16 b:16", "b:16 a:16", "?sort=kl&method=sse"),
        ("?model=n&text=u", "c:16", "c:16", "?model=n&text=u&method=sse&sort=kl"),
        ("?model=gone&format=gone&sort=gone", "a:16 a:16 b:16", "b:16 a:16", "?method=sse&sort=kl"),
    ],
)
def test_filters_of_results_are_in_the_url(
    query: str, before: str, after: str, url: str, tmp_path: Path
) -> None:
    """A link shows what its sender chose; the URL follows each choice."""
    names = ("model", "text", "inputs", "format", "block", "method", "kl")
    values = [
        ("m", "t", "float", "a", 16, "naive", [3.0, None, None]),
        ("m", "t", "float", "a", 16, "sse", [2.0, None, None]),
        ("m", "t", "float", "b", 16, "sse", [1.0, None, None]),
        ("m", "t", "4 bits", "a", 16, "naive", [4.0, None, None]),
        ("n", "t", "float", "c", 16, "sse", [1.0, None, None]),
        ("n", "u", "float", "c", 16, "sse", [1.0, None, None]),
    ]
    rows = [dict(zip(names, each, strict=True)) for each in values]
    results = json.dumps({"models": [{"model": "m"}, {"model": "n"}], "rows": rows})
    scripts = (f"window.RESULTS = {results}", EXPLORER.read_text("utf-8"), CHOOSE)
    body = "".join(f"<script>{each}</script>" for each in scripts)
    text = f'<title></title><div id="results"></div>{body}'
    found = browse(text, tmp_path, query=query).stdout
    title = unescape(found.partition("<title>")[2].partition("</title>")[0])
    assert json.loads(title) == [before.split(), after.split(), url.replace(":", "%3A")]
