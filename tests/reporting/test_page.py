"""The page of a report and the files beside it."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import browse
from small_models import TINY, converted, language_model
from torch import nn

import fp4pass
from fp4pass.errors import CheckpointError, OptionError, StateError

for package in ("transformers", "jinja2"):
    pytest.importorskip(package)
reporting = pytest.importorskip("fp4pass.reporting")
page = pytest.importorskip("fp4pass.reporting.page")
render, written = page.render, page.written

pytestmark = pytest.mark.usefixtures("offline")

DASH = "\N{EN DASH}"


def gather(source: Any, **options: Any) -> dict[str, Any]:
    return reporting.gather(source, progress=False, **options)


@pytest.fixture(scope="module")
def mixed(folders: Path) -> tuple[dict[str, Any], str]:
    """The numbers of a page, and the page."""
    data = gather(folders / "mixed", reference=TINY)
    return data, render(data)


class Tables(HTMLParser):
    """The cells of every table of a page, and the texts of its tiles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tiles: list[str] = []
        self.into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th", "dd"):
            self.into = self.tiles if tag == "dd" else self.tables[-1][-1]
            self.into.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "dd"):
            self.into = None

    def handle_data(self, data: str) -> None:
        if self.into is not None:
            self.into[-1] += data


def test_the_tables_hold_the_numbers(mixed: tuple[dict[str, Any], str]) -> None:
    data, text = mixed
    found = Tables(text)
    groups, sizes, *maps, outside, scales, layers = (rows[1:] for rows in found.tables)
    assert [len(rows) for rows in maps] == [7, 7] and len(maps[0][0]) == 5
    summary = data["summary"]
    tiles = [written(summary["bits_per_weight"], ".2f"), written(summary["bytes"], "size")]
    tiles += [written(summary["weight_error"], "percent"), str(summary["skipped"])]
    assert set(tiles) <= set(found.tiles)
    for cells, layer in zip(layers, data["layers"], strict=True):
        assert cells[:3] == [layer["name"], *(f"{size:,}" for size in layer["shape"])]
        assert cells[6:8] == [
            written(layer[key], "percent") for key in ("weight_error", "output_error")
        ]
        assert cells[9] == layer["skip_reason"]
        if not layer["skip_reason"]:
            name = f"{layer['fmt']}a16"
            assert cells[3:6] == [name, layer["method"], f"{layer['bits']:.2f}"]
    assert outside == [["lm_head", DASH, DASH, "output embedding; add a rule to quantize it"]]
    assert [row[2] for row in groups] == [str(group["layers"]) for group in data["groups"]]
    assert [row[1] for row in sizes] == [written(part["bytes"], "size") for part in data["sizes"]]
    assert [row[1] for row in scales] == [f"{row['blocks']:,}" for row in data["scales"]]


@pytest.mark.core
@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (None, ".2f", DASH),
        (0.08125, "percent", "8.12 %"),
        (1.0419, "change", "+4.19 %"),
        (999, "size", "999 B"),
        (2_820_000, "size", "2.82 MB"),
        (7e12, "size", "7000.00 GB"),
        (3672832, ",", "3,672,832"),
    ],
)
def test_numbers_as_the_page_writes_them(value: float | None, style: str, text: str) -> None:
    assert written(value, style) == text


def test_what_is_not_known_is_said(folders: Path) -> None:
    text = render(gather(folders / "theirs"))
    for said in ("The recipe is unknown.", "The errors are unknown.", "Not measured."):
        assert said in text
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    text = render(gather(fp4pass.convert(model, method="sse", weight_only=True)))
    assert "No linear layer has a number in its name that is a depth" in text


@pytest.mark.core
def test_measures_of_a_text() -> None:
    change = {"value": 1.5, "low": 1.25, "high": 2.0, "significant": True}
    row = {"text": "t", "windows": 1, "tokens": 5, "unit": "document", "units": 20, "kl": 0.25}
    row |= {"confidence": 0.95, "perplexity": 3.0, "top1": 0.5}
    row |= {"reference_perplexity": 2.0, "difference": {"perplexity_ratio": change}}
    row |= {"intervals": {"perplexity": [2.5, 3.5]}, "bits_per_byte": 0.75}
    row |= {"kl_999": 1.5, "delta_p": -0.0125, "rms_delta_p": 0.0625}
    row["difference"]["bits_per_byte"] = {"value": 0.125, "low": 0.0625, "high": 0.25}
    text = render(gather(converted(), evaluations=[row]))
    assert "5 tokens scored in 1 window; 95 % intervals over 20 documents" in text
    assert "The change of perplexity is significant" in text
    few = render(gather(converted(), evaluations=[{**row, "units": 4}]))
    assert "The change of perplexity" not in few
    assert "5 tokens scored in 1 window; intervals need at least 10 documents" in few
    assert "2.5000" not in few and "+25.00 %" not in few
    (table,) = (rows for rows in Tables(text).tables if rows[0][0] == "Measure")
    assert table[1:] == [
        ["Perplexity", "3.0000", "2.5000", "3.5000"],
        ["of the original", "2.0000", DASH, DASH],
        ["change", "+50.00 %", "+25.00 %", "+100.00 %"],
        ["Bits per byte", "0.7500", DASH, DASH],
        ["change", "+0.1250", "+0.0625", "+0.2500"],
        ["KL from the original", "0.25000", DASH, DASH],
        ["99.9 % KL", "1.50000", DASH, DASH],
        ["Same top token", "50.00 %", DASH, DASH],
        ["Mean Δp of the right token", "-1.250 %", DASH, DASH],
        ["RMS Δp of the right token", "6.25 %", DASH, DASH],
    ]
    alone = {"text": "t", "windows": 1, "tokens": 5, "unit": "window", "units": 1, "kl": None}
    alone |= {"confidence": 0.95, "perplexity": 3.0, "intervals": {}}
    assert "intervals need at least 10 windows" in render(gather(converted(), evaluations=[alone]))


@pytest.mark.core
def test_names_are_text_and_not_markup() -> None:
    data = gather(converted(), name="<img src=x onerror=alert(1)></script>")
    text = render(data)
    assert "<img" not in text and text.count("</script>") == 1


def test_a_page_asks_nobody_for_anything(mixed: tuple[dict[str, Any], str]) -> None:
    data, text = mixed
    assert "://" not in text and "default-src 'none'" in text and "@import" not in text
    assert json.loads(text.partition('id="data">')[2].partition("</script>")[0]) == data


def test_a_page_names_no_place_of_the_machine(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders and texts by their last part, and what is no path as it is."""
    row = {"windows": 1, "tokens": 5, "unit": "window", "units": 1, "kl": None}
    row |= {"confidence": 0.95, "perplexity": 3.0, "intervals": {}}
    texts = ["/home/somebody/secret/eval.txt", str(TINY / "eval.txt"), "wikitext:raw:test"]
    rows = [{**row, "text": text} for text in texts]
    monkeypatch.chdir(folders.parent)
    beside = f"{folders.name}/mixed"
    for source in (folders / "mixed", beside, f"./{beside}/"):
        data = gather(source, reference=TINY, evaluations=rows)
        assert (data["source"], data["reference"]) == ("mixed", "tiny_lm")
        assert [row["text"] for row in data["evaluations"]] == ["eval.txt"] * 2 + texts[2:]
        text = render(data)
        places = (Path.home(), TINY.parent, folders.parent, folders.name, tmp_path.parent)
        assert not [place for place in ("/home", "secret", *places) if str(place) in text]
    data = gather(folders / "mixed", name="owner/name", reference=TINY, reference_name="a/b")
    assert (data["source"], data["reference"]) == ("owner/name", "a/b")


# Of a page in a frame: how much wider than it, what is wider and does not scroll by itself, and the
# smallest text, drawn or written, in pixels. Text is 1.1 times as high as its size, or more.
_MEASURE = """
const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
const found = [...page.querySelectorAll("*")];
const own = each => [...each.childNodes].some(node => node.nodeType == 3 && node.data.trim());
const wide = found.filter(each => !each.closest(".box, figure, pre") &&
  each.getBoundingClientRect().right > root.clientWidth);
const texts = found.filter(each => each.closest("body") && own(each) && each.tagName != "SCRIPT");
const size = each => each.tagName == "text"
  ? Math.min(each.getBoundingClientRect().height, each.getBoundingClientRect().width * 2) / 1.1
  : parseFloat(page.defaultView.getComputedStyle(each).fontSize);
document.title = JSON.stringify([root.scrollWidth - root.clientWidth,
  wide.map(each => each.outerHTML.slice(0, 80)), Math.min(...texts.map(size))]);
"""


@pytest.mark.slow
def test_a_phone_shows_it(folders: Path, tmp_path: Path) -> None:
    text = render(gather(folders / "inputs", name="a" * 200, reference=TINY))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    frame = f'<iframe width="360" height="800" style="border: 0" srcdoc="{escape(text)}"></iframe>'
    script = f"<script>window.onload = () => {{{_MEASURE}}}</script>"
    shown = browse(f"<title></title>{frame}{script}", tmp_path).stdout
    title = shown.partition("<title>")[2].partition("</title>")[0]
    overflow, wide, smallest = json.loads(unescape(title))
    assert (overflow, wide) == (0, []) and smallest >= 11


def test_a_browser_shows_it(mixed: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    done = browse(mixed[1], tmp_path)
    # Whatever the page says, or the policy of its contents refuses.
    assert "CONSOLE" not in done.stderr
    assert "model.layers.3.mlp.down_proj" in done.stdout


def test_charts_have_the_colors_of_the_page(mixed: tuple[dict[str, Any], str]) -> None:
    text = mixed[1]
    light, _, rest = text.partition("@media screen and (prefers-color-scheme: dark)")
    dark = rest[: rest.index("}")]
    used = set(re.findall(r"var\((--\w+)\)", text))
    known = [set(re.findall(r"(--\w+): ", rules)) for rules in (light, dark)]
    assert known[0] == known[1] >= used


def test_the_files_of_a_page(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "r.html"
    data = reporting.write_report(folders / "mixed", path, reference=TINY, progress=False)
    assert sorted(each.name for each in path.parent.iterdir()) == ["r.html", "r.json"]
    assert json.loads(path.with_suffix(".json").read_text()) == data
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    with pytest.raises(OptionError, match=r"r\.html.* exists\. Choose another.*overwrite=True"):
        reporting.write_report(folders / "mixed", path, progress=False)

    def fail(*args: Any) -> None:
        raise OSError("no space")

    # What fails leaves the page of before.
    with monkeypatch.context() as full:
        full.setattr("os.replace", fail)
        with pytest.raises(CheckpointError, match=r"cannot be written: no space"):
            reporting.write_report(folders / "inputs", path, overwrite=True, progress=False)
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before
    reporting.write_report(folders / "inputs", path, overwrite=True, progress=False)
    assert path.read_bytes() != before[path]


def test_errors_say_what_to_do(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"not converted.*Call fp4pass\.convert"):
        gather(language_model())
    with pytest.raises(CheckpointError, match="not quantized"):
        gather(TINY)
    with pytest.raises(CheckpointError, match="expected the folder of a float model"):
        gather(folders / "mixed", reference=tmp_path / "nothing")
    with pytest.raises(OptionError, match=r"has none of the layers.*Give the float model"):
        gather(folders / "mixed", reference=nn.Linear(3, 3), reference_name="other")
    other = language_model()
    other.model.layers[1].mlp.up_proj = nn.Linear(256, 64)
    with pytest.raises(CheckpointError, match=r"up_proj.*: expected shape .*, got \(64, 256\)"):
        gather(folders / "mixed", reference=other)
    with pytest.raises(OptionError, match=r"expected a name that ends in \.html"):
        reporting.write_report(folders / "mixed", tmp_path / "report")
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OptionError, match="is a folder"):
        reporting.write_report(folders / "mixed", tmp_path / "r.html", overwrite=True)
