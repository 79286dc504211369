"""The report page in a real browser: it renders, it is quiet, and its numbers are the JSON's."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import EVAL, run
from small_models import TINY

for package in ("transformers", "typer", "jinja2"):
    pytest.importorskip(package)
written = pytest.importorskip("fp4pass.reporting.render").written

pytestmark = pytest.mark.usefixtures("offline")

PHONE, DESK = (375, 700), (1200, 900)

# Every number on the page, with its place in the JSON and the style that its text shows.
NUMBERS = "[...document.querySelectorAll('data')].map(e => [e.dataset.at, e.value, e.textContent])"

# Of every cell of the heat maps: the ratio of text to background, as WCAG 2 has it.
CONTRASTS = """
[...document.querySelectorAll('td[class^=h]')].map(cell => {
  const light = text => {
    const paint = document.createElement('canvas').getContext('2d');
    paint.fillStyle = text; paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(byte => {
      const c = byte / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(cell);
  const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
})
"""


def unavailable(what: str) -> None:
    """In CI a failure: there the page is not to go untested."""
    text = f"{what} is missing: pip install playwright, and a Chromium of the system is wanted"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        unavailable("a browser (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`full` has all that a page can have; `mixed` has several formats; `theirs` least.

    The names that `full` shows are longer than a phone is wide, and break nowhere by themselves.
    """
    folder = tmp_path_factory.mktemp("pages")
    long = "x" * 100
    (folder / f"{long}.txt").symlink_to(EVAL)
    (folder / f"{long}-original").symlink_to(TINY)
    (folder / f"{long}-model").symlink_to(made / "inputs")
    text = ("--text", folder / f"{long}.txt", "--windows", 4, "--length", 64)
    original = ("--reference", folder / f"{long}-original")
    run("report", folder / f"{long}-model", "-o", folder / "full.html", *original, *text)
    run("report", made / "mixed", "-o", folder / "mixed.html", "--reference", TINY, "--no-png")
    shutil.copytree(made / "inputs", folder / "theirs")
    (folder / "theirs" / "fp4pass.json").unlink()
    run("report", folder / "theirs", "-o", folder / "theirs.html", "--no-png")
    return folder


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[Any]:
    """A page in the browser. Whatever it says, or asks of a network, fails the test."""
    width, height = options.pop("size", DESK)
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    said: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert [text for text in said if text not in (path.as_uri(), "data:,")] == []
    context.close()


def at(data: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


NAMES = ("full", "mixed", "theirs")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_on_the_page_are_those_of_the_json(browser: Any, pages: Path, name: str) -> None:
    data = json.loads((pages / f"{name}.json").read_text())
    with opened(browser, pages / f"{name}.html") as page:
        assert page.evaluate("JSON.parse(document.getElementById('data').textContent)") == data
        found = page.evaluate(NUMBERS)
        # Nothing that looks like a number of a table stands there without its place.
        loose = "[...document.querySelectorAll('td')].map(cell => cell.textContent.trim())"
        bare = "[...document.querySelectorAll('td:has(data)')].map(c => c.textContent.trim())"
        plain = set(page.evaluate(loose)) - set(page.evaluate(bare))
        numbers = [text for text in plain if text and text[0].isdigit()]
        assert all(text.startswith("4 bit") for text in numbers)
    assert len(found) > 100
    styles = ("count", "two", "four", "five", "short", "percent", "heat", "change", "size")
    for pointer, value, text in found:
        number = at(data, pointer)
        assert float(value) == number, pointer
        shown = {written(number, style) for style in styles if style != "count"}
        shown |= {written(number, "signed_four")}
        shown |= {written(number, "count")} if isinstance(number, int) else set()
        assert text in shown, (pointer, text)
    places = {pointer for pointer, *_ in found}
    assert {"/summary/bits_per_weight", "/summary/bytes", "/sizes/0/bytes"} <= places
    for index, layer in enumerate(data["layers"]):
        for error in ("weight_error", "output_error"):
            assert (layer[error] is not None) == (f"/layers/{index}/{error}" in places)
    if name == "full":
        wanted = {f"/evaluations/0/{each}" for each in ("perplexity", "kl", "top_p_kl", "top1")}
        ends = {f"/evaluations/0/intervals/{each}/1" for each in ("perplexity", "kl")}
        assert wanted | ends <= places


def test_rows_say_what_their_layer_has(browser: Any, pages: Path) -> None:
    """A number at its place is worth nothing beside another layer's name."""
    data = json.loads((pages / "mixed.json").read_text())
    rows = "[...document.querySelectorAll('#layers ~ .box tbody tr')].map(row => row.innerText)"
    with opened(browser, pages / "mixed.html") as page:
        found = page.evaluate(rows)
        outside = page.locator("#map ~ .box tbody tr").inner_text()
    for text, layer in zip(found, data["layers"], strict=True):
        cells = text.split("\t")
        assert cells[0].strip() == layer["name"]
        assert cells[7].strip() == written(layer["weight_error"], "percent")
        assert cells[10].strip() == layer["reason"]
    cells = [cell.strip() for cell in outside.split("\t")]
    assert cells == [
        "lm_head",
        "\N{EN DASH}",
        "\N{EN DASH}",
        "output embedding; a rule can take it",
    ]


def test_heat_maps_say_which_layer_a_cell_is(browser: Any, pages: Path) -> None:
    data = json.loads((pages / "mixed.json").read_text())
    (each,) = data["maps"]
    script = """
    [...document.querySelectorAll('.map')].map(map => [...map.tBodies[0].rows].map(
      row => [...row.cells].slice(1).map(cell => [cell.title, cell.textContent, cell.className])))
    """
    with opened(browser, pages / "mixed.html") as page:
        (found,) = page.evaluate(script)
    for cells, shown in zip(each["cells"], found, strict=True):
        for cell, (title, text, colour) in zip(cells, shown, strict=True):
            layer = data["layers"][cell["layers"][0]]
            assert title.startswith(f"{layer['name']}: ")
            if layer["reason"]:
                assert title.endswith(f"left alone, {layer['reason']}") and colour == "left"
                assert text == "\N{EN DASH}"
            else:
                assert written(layer["weight_error"], "percent") in title
                assert text == written(layer["weight_error"], "heat") and colour[0] == "h"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_screen(
    browser: Any, pages: Path, name: str, size: tuple[int, int]
) -> None:
    with opened(browser, pages / f"{name}.html", size=size) as page:
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == size[0]
        # What is wider scrolls in a box that the keyboard reaches, too.
        boxes = "[...document.querySelectorAll('.box')].filter(b => b.scrollWidth > b.clientWidth)"
        assert page.evaluate(f"{boxes}.every(b => b.tabIndex === 0)")
        texts = "[...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')]"
        texts += ".map(t => [t.getBoundingClientRect(), s.getBoundingClientRect(), t.textContent]))"
        cut = f"{texts}.filter(([t, s]) => t.left < s.left - 1 || t.right > s.right + 1)"
        assert page.evaluate(f"{cut}.map(each => each[2])") == []


def test_ticks_do_not_touch_each_other(browser: Any, pages: Path) -> None:
    script = """
    [...document.querySelectorAll('.chart svg')].flatMap(svg => {
      const boxes = [...svg.querySelectorAll('.tick, .unit, .row')].map(
        text => [text.getBoundingClientRect(), text.textContent]);
      return boxes.flatMap(([a, first], i) => boxes.slice(i + 1).filter(([b]) =>
        a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom
      ).map(([, second]) => [first, second]));
    })
    """
    for name in NAMES:
        with opened(browser, pages / f"{name}.html", size=PHONE) as page:
            assert page.evaluate(script) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Any, pages: Path, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, pages / "full.html", color_scheme=scheme) as page:
        bright = sum(map(int, page.evaluate(ground)[4:-1].split(",")))
        assert (bright > 600) == (scheme == "light") and (bright < 100) == (scheme == "dark")
        assert min(page.evaluate(CONTRASTS)) >= 4.5
        first = page.screenshot()
        page.get_by_role("button", name=other.title()).click()
        switched = sum(map(int, page.evaluate(ground)[4:-1].split(",")))
        assert abs(switched - bright) > 500 and page.screenshot() != first
        assert min(page.evaluate(CONTRASTS)) >= 4.5
        page.get_by_role("button", name=scheme.title()).click()
        assert sum(map(int, page.evaluate(ground)[4:-1].split(","))) == bright
        # Nothing is kept of it.
        assert page.evaluate("document.cookie") == ""


def test_the_table_sorts(browser: Any, pages: Path) -> None:
    data = json.loads((pages / "mixed.json").read_text())
    names = "[...document.querySelectorAll('[data-sort] tbody tr')].map(r => r.cells[0].innerText)"
    known = [layer for layer in data["layers"] if layer["weight_error"] is not None]
    with opened(browser, pages / "mixed.html") as page:
        assert page.evaluate(names) == [layer["name"] for layer in data["layers"]]
        head = page.get_by_role("button", name="Weight error")
        for down in (False, True):
            head.click()
            found = page.evaluate(names)
            wanted = sorted(known, key=lambda layer: layer["weight_error"], reverse=down)
            errors = {layer["name"]: layer["weight_error"] for layer in known}
            # What has no number comes last.
            assert not {*found[: len(known)]} - {*errors}
            shown = [errors[name] for name in found[: len(known)]]
            assert shown == [layer["weight_error"] for layer in wanted]
        page.get_by_role("button", name="Layer", exact=True).click()
        assert page.evaluate(names) == sorted(page.evaluate(names))


def test_without_scripts_everything_is_there(browser: Any, pages: Path) -> None:
    with opened(browser, pages / "full.html", java_script_enabled=False) as page:
        assert page.locator("button").count() == 0
        headings = page.locator("h2").all_inner_texts()
        assert headings == [
            *("Summary", "Size", "Errors by depth", "Error and bits", "Block scales"),
            *("Perplexity", "Layers", "Recipe and versions"),
        ]
        data = json.loads((pages / "full.json").read_text())
        for index in (0, len(data["layers"]) - 1):
            assert page.get_by_text(data["layers"][index]["name"], exact=True).first.is_visible()
        bars = sum(len(row["counts"]) for row in (*data["scales"], *data["offsets"]))
        dots = 2 * sum(not layer["reason"] for layer in data["layers"])
        assert page.locator(".chart rect title").count() == bars
        assert page.locator(".chart circle.dot title").count() == dots
        assert page.locator(".chart .whisker").count() == 7


def test_a_screen_reader_has_names_for_things(browser: Any, pages: Path) -> None:
    with opened(browser, pages / "full.html") as page:
        assert page.evaluate("document.documentElement.lang") == "en"
        unnamed = "[...document.querySelectorAll('svg:not([aria-hidden])')]"
        unnamed += ".filter(s => s.getAttribute('role') !== 'img' || !s.ariaLabel).length"
        assert page.evaluate(unnamed) == 0
        unnamed = "[...document.querySelectorAll('section')].filter(s => !document.getElementById("
        assert page.evaluate(f"{unnamed}s.getAttribute('aria-labelledby'))).length") == 0
        assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
        assert len(ids) == len(set(ids))
        targets = page.evaluate("[...document.querySelectorAll('a')].map(a => a.hash.slice(1))")
        assert targets and set(targets) <= set(ids)
