"""The recipes run as their pages show them, and do what they say; so does the notebook."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4pass.core.formats import FORMATS
from fp4pass.methods import METHODS

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "recipes"
NOTEBOOK = ROOT / "examples" / "five_minutes.ipynb"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

Made = dict[str, Any]


def formats(made: Made, name: str) -> set[str]:
    """The formats of the converted layers of a report or a model's rows, by a part of a name."""
    return {row.config.fmt for row in made["report"].converted if name in row.name}


# What each script has to leave behind: its names, by a condition.
CHECKS: dict[str, Callable[[Made], bool]] = {
    "ahead_of_time": lambda made: made["same"] and len(made["products"]) >= 28,
    "any_model": lambda made: made["same"] and made["cosine"].min().item() > 0.9,
    "bad_layer": lambda made: (
        made["worst"].endswith("2.mlp.down_proj")
        and made["errors"][made["worst"]] > 0.3
        and made["after"][made["worst"]] < 0.05
    ),
    "best_quality": lambda made: made["after"] < 0.6 * made["before"],
    "compute": lambda made: (
        0 < made["changed"] < 0.1
        and made["w4a4"].activation_scales == "sse"
        and not made["w4a4"].weight_only
    ),
    "five_minutes": lambda made: (
        0 < made["found"].kl < 0.02 and made["ids"].shape[1] > made["prompt"].input_ids.shape[1]
    ),
    "from_bitsandbytes": lambda made: (
        made["swapped"] == {"0": "nf4", "2": "nf4"} and 0 < made["error"] < 0.12
    ),
    "from_llm_compressor": lambda made: made["same"],
    "from_qwantize": lambda made: made["after"]["output_error"] < made["before"]["output_error"],
    "larger_than_gpu": lambda made: len(made["report"].converted) == 28,
    "lora": lambda made: (
        made["same"] and made["losses"][-1] < made["losses"][0] / 4 and made["difference"] < 1e-3
    ),
    "mixed_precision": lambda made: (
        formats(made, "down_proj") == {"mxfp8_e4m3"}
        and formats(made, "q_proj") == {"mxfp4"}
        and formats(made, "o_proj") == {"nvfp4"}
        and formats(made, "layers.0.") == set()
    ),
    "mixture": lambda made: {row.skip_reason for row in made["skipped"][:2]} == {"a router"},
    "own_format": lambda made: made["model"].model.layers[0].mlp.up_proj.config.fmt == "nv_e1m2",
    "serving": lambda made: (
        made["same"]
        and made["answered"]
        and made["config"]["quant_method"] == "compressed-tensors"
        and len(made["names"]) == 3
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write to, that looks like the repository; registries are as before behind it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = dict(FORMATS), dict(METHODS)
    torch.manual_seed(0)
    yield tmp_path
    for registry, entries in zip((FORMATS, METHODS), before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_recipe_runs(name: str, place: Path) -> None:
    for package in {"lora": ["peft"], "serving": ["openai", "fastapi"]}.get(name, ()):
        pytest.importorskip(package)
    made = runpy.run_path(str(FOLDER / f"{name}.py"))
    assert CHECKS[name](made), {key: made[key] for key in made if not key.startswith("_")}


@pytest.mark.slow
def test_recipe_of_several_processes_runs(place: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *command, str(FOLDER / "several_gpus.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes: logits within" in done.stdout


@pytest.mark.slow
def test_notebook_runs(place: Path) -> None:
    """From a new kernel, cell after cell, without an error."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert re.search(r"KL to the original 0\.01\d\d", printed)


# ---- quick: the pages -------------------------------------------------------------------------


def sections(name: str) -> dict[str, str]:
    """The parts of a script that pages include, by their names."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    found = re.findall(r"# --8<-- \[start:(\w+)\]\n(.*?)# --8<-- \[end:\1\]\n", text, re.DOTALL)
    return {part: body.strip("\n") for part, body in found}


def test_every_recipe_has_a_check_and_a_page() -> None:
    assert sorted({*CHECKS, "several_gpus"}) == NAMES
    pages = {path.stem for path in (ROOT / "docs" / "recipes").glob("*.md")} - {"index"}
    assert pages == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_its_script(name: str) -> None:
    """All parts of it, and no code of Python that nothing runs."""
    page = (ROOT / "docs" / "recipes" / f"{name}.md").read_text("utf-8")
    shown = re.findall(rf'--8<-- "examples/recipes/{name}\.py:(\w+)"', page)
    assert shown and sorted(shown) == sorted(sections(name))
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert block.strip().startswith('--8<-- "examples/'), block
    assert f'--8<-- "examples/recipes/{name}.py"' in page
    index = (ROOT / "docs" / "recipes" / "index.md").read_text("utf-8")
    assert f"({name}.md)" in index


def test_notebook_is_the_script() -> None:
    """Its cells are the parts of the script behind its imports, and it is stored without output."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    head, *cells = ["".join(cell["source"]) for cell in code]
    script = (FOLDER / "five_minutes.py").read_text("utf-8")
    assert head in script and "import fp4pass" in head
    assert cells == list(sections("five_minutes").values())
