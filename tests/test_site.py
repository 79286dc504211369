"""The site: every page is in the navigation, every link leads somewhere, and it builds strictly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from browser import browse

import fp4pass

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / ".mkdocs.yml").read_text("utf-8")

# Pages that the hooks make: of files at the top, and of results.
MADE = {"index.md", "changelog.md", "contributing.md", "architectures.md"}


def test_every_page_is_in_the_navigation() -> None:
    """Add a new page to `nav` in .mkdocs.yml."""
    nav = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", CONFIG, re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert nav == pages | MADE


def test_the_reference_has_every_public_name() -> None:
    """What `fp4pass` exports, but for packages, which have pages of their own."""
    text = "\n".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: fp4pass\.(.+)$", text, re.MULTILINE))
    for name in {*fp4pass.__all__} - {"__version__", "functional", "nn"}:
        assert name in {each.rpartition(".")[2] for each in listed}, name


def test_the_version_is_that_of_the_package() -> None:
    for name in ("CITATION.cff", "CHANGELOG.md"):
        text = (ROOT / name).read_text("utf-8")
        assert re.search(rf"(^version: |^## ){re.escape(fp4pass.__version__)}\b", text, re.M), name


# ---- built ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "--site-dir", str(out)]
    # The theme says at every build that it will have a successor.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return out


@pytest.mark.slow
def test_pages_that_hooks_make_are_whole(site: Path) -> None:
    """Results, formulas in MathML, a page for each type of model, and all pages for models."""
    for path in site.rglob("*.html"):
        assert not re.search(
            r"<(script|img|iframe)\b[^>]*\bsrc=.(https?:)?//", path.read_text("utf-8")
        )
    page = (site / "results.html").read_text("utf-8")
    script = (site / "assets" / "results.js").read_text("utf-8")
    assert 'src="assets/results.js"' in page and 'id="results"' in page
    found = json.loads(script.removeprefix("window.RESULTS = ").rstrip(";\n"))
    assert len(found["models"]) == 2 and len(found["rows"]) > 600
    for name, least in (("search.html", 60), ("codes.html", 50), ("rotation.html", 5)):
        page = (site / name).read_text("utf-8")
        assert page.count("<math ") > least
        text = re.sub(r"<(pre|code|script)\b.*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
        assert "$" not in text and "\\(" not in text and "arithmatex" not in page
    listed = (site / "architectures.html").read_text("utf-8")
    rows = re.findall(r'<td><a href="architectures/([^"]+)\.html">', listed)
    assert len(rows) > 350 and len(rows) == len([*(site / "architectures").glob("*.html")])
    short, full = ((site / name).read_text("utf-8") for name in ("llms.txt", "llms-full.txt"))
    listed = re.findall(r"^- \[.+?\]\(([^)]+\.html)\): \S", short, re.MULTILINE)
    assert len(listed) > 50 and all((site / each).exists() for each in listed)
    assert all(f"<!-- {each} -->" in full for each in listed)
    assert "--8<--" not in full and "\n:::" not in full and "## fp4pass.convert\n" in full


# ---- the table of results, in a browser ---------------------------------------------------------

EXPLORER = ROOT / "docs" / "assets" / "explorer.js"


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
