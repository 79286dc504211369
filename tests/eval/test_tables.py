"""The tables in pages are those that the scripts make of eval/results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"

# Of a script: the page, and the options that name its results.
TABLES = {
    "bench/convert": ("performance.md", "--json convert-h200.json"),
    "bench/cpu": ("performance.md", "--json compiled-speed-cpu.json"),
    "bench/decode": (
        "performance.md",
        "--json decode-h200.json decode-prefill-h200.json decode-moe-h200.json",
    ),
    "bench/fp8_layers": ("performance.md", "--json fp8-layers-h100.json"),
    "bench/fusions": ("graphs.md", "--json fusions-h200.json"),
    "bench/generate": ("performance.md", "--json generate-h200.json generate-peers-h200.json"),
    "bench/gptq": ("quality.md", "--json gptq-h200.json"),
    "bench/kernels": ("performance.md", "--json kernels-h200.json"),
    "bench/mixture": ("moe.md", "--json mixture-h200.json"),
    "bench/primitives": ("tensors.md", "--json primitives-h200.json"),
    "quality/budget": (
        "budget.md",
        "--json budget/tiny-lm.json budget/doclm-qwen3-17m.json budget/smollm2.json",
    ),
    "quality/compute": ("quality.md", "--text compute/doclm-qwen3-17m.json"),
    "quality/kv_cache": ("quality.md", ""),
    "quality/merging": ("transformers.md", "--json merging-smollm2.json"),
    "quality/sinks": ("calibration.md", "--json sinks-smollm2.json"),
    "pages/distillation": ("learning.md", ""),
    "pages/qualities": ("quality.md", ""),
    "pages/memory": ("memory-and-time.md", ""),
    "pages/several_gpus": ("large-models.md", ""),
}


@pytest.mark.parametrize("made_by", TABLES)
def test_table_is_up_to_date(
    script: Any, made_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = TABLES[made_by]
    written = (ROOT / "docs" / name).read_text("utf-8")
    begin = f"<!-- Written by eval/{made_by}.py --table; do not edit by hand. -->"
    end = f"<!-- End of what eval/{made_by}.py wrote. -->"
    head, rest = written.split(begin)
    page = tmp_path / name
    page.write_text(f"{head}{begin}\n{end}{rest.split(end)[1]}", "utf-8")
    named = [str(RESULTS / word) if word.endswith(".json") else word for word in options.split()]
    monkeypatch.setattr(sys, "argv", [made_by, "--table", str(page), *named])
    script(made_by.replace("/", ".")).main()
    assert page.read_text("utf-8") == written


def test_readme_has_the_table_of_other_libraries(script: Any) -> None:
    """As its script writes it: every number from eval/results."""
    page = script("pages.readme")
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert page.text() in readme, "Run python -m eval.pages.readme --table README.md."
    cells = [line.strip("| ").split(" | ") for line in page.text().splitlines() if "| - |" in line]
    assert len(cells) >= 3 and all(len(row) == 8 for row in cells)


def test_the_first_numbers_of_the_readme_are_those_of_results() -> None:
    """KL beside the best of the others, and speed and memory beside bf16 of the same run."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    runs = json.loads((RESULTS / "peers-quality" / "smollm2.json").read_text("utf-8"))["rows"]
    kls = {(r["library"], r["run"]): r["W4A16"]["WikiText-2"]["kl"]["value"] for r in runs}
    (peer, _), best = min(
        (each for each in kls.items() if each[0][0] != "fp4pass"), key=lambda each: each[1]
    )
    ours = kls["fp4pass", "nvfp4 best"]
    assert f"the original is {ours:.3f} ({peer}, the next best: {best:.3f})" in readme
    rows = json.loads((RESULTS / "generate-h200.json").read_text("utf-8"))["rows"]
    by = {row["by"]: row for row in rows if row["model"] == "Llama-3-8B"}
    packed, dense = by["fp4pass nvfp4"], by["bf16"]
    speed = "decode_tokens_per_second"
    assert f"{packed[speed]:.0f} tokens/s; bf16 reaches {dense[speed]:.0f} (Llama-3-8B" in readme
    sizes = [row["weight_bytes"] / 1e9 for row in (packed, dense)]
    assert f"{sizes[0]:.1f} GB of weights; bf16 takes {sizes[1]:.1f} (same model" in readme


def test_the_readme_is_short() -> None:
    """Its words, without code and without the table that a script writes."""
    readme = (ROOT / "README.md").read_text("utf-8")
    head, rest = readme.split("<!-- Written by eval/pages/readme.py")
    bare = head + rest.split("<!-- End of what eval/pages/readme.py")[1]
    assert len(re.sub(r"```.*?```", "", bare, flags=re.DOTALL).split()) <= 900


def test_chart_of_the_readme(script: Any, tmp_path: Path) -> None:
    """As its script draws it, with every library of the results."""
    script("pages.readme").draw(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "docs/comparison.png" in (ROOT / "README.md").read_text("utf-8")


def test_page_of_the_real_model(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its script writes it, with its picture."""
    monkeypatch.setattr(sys, "argv", ["real_model", "--docs", str(tmp_path)])
    script("pages.real_model").main()
    page = (ROOT / "docs" / "real-model.md").read_text("utf-8")
    assert (tmp_path / "real-model.md").read_text("utf-8") == page
    assert (tmp_path / "real-model.png").stat().st_size > 10_000
