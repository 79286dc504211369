"""The recipes run twice, and print what their pages show; so does the notebook."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import torch

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
    "budget": lambda made: (
        made["found"].bits <= 5.0
        and made["found"].kl < made["found"].uniform.kl
        and Path("out/budget.html").exists()
    ),
    "compute": lambda made: (
        0 < made["changed"] < 0.1
        and made["w4a4"].activation_scales == "sse"
        and not made["w4a4"].weight_only
    ),
    "drafts": lambda made: made["same"] and torch.equal(made["found"], made["plain"]),
    "embeddings": lambda made: (
        made["same"] and torch.equal(*made["scores"]) and 0.9 < made["cosine"] < 1
    ),
    "five_minutes": lambda made: (
        0 < made["after"].kl < 0.02 and made["ids"].shape[1] > made["prompt"].input_ids.shape[1]
    ),
    "from_bitsandbytes": lambda made: (
        made["swapped"] == {"0": "nf4", "2": "nf4"} and 0 < made["error"] < 0.12
    ),
    "from_llm_compressor": lambda made: made["same"],
    "from_qwantize": lambda made: made["after"]["output_error"] < made["before"]["output_error"],
    "images": lambda made: (
        made["same"]
        and 0 < made["change"] < 0.1
        and {row.skip_reason for row in made["report"].skipped}
        == {"rule ('time_text_embed.*', None)"}
    ),
    "larger_than_gpu": lambda made: len(made["report"].converted) == 28,
    "lora": lambda made: (
        made["same"]
        and made["losses"][-1] < made["losses"][0] / 4
        and made["difference"] < 1e-3
        and made["found"]["gptq"].kl_after < made["found"]["sse"].kl_after
    ),
    "mixed_precision": lambda made: (
        formats(made, "down_proj") == {"mxfp8"}
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


# What each script needs beside transformers.
NEEDS = {
    "embeddings": ["sentence_transformers"],
    "images": ["diffusers"],
    "lora": ["peft"],
    "serving": ["openai", "fastapi"],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write to, that looks like the repository; registries are as before behind it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    with pages.registries_as_before():
        yield tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_recipe_runs_twice(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what its page shows, and writes into one folder."""
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    for _ in range(2):
        made = runpy.run_path(str(FOLDER / f"{name}.py"))
        assert CHECKS[name](made), {key: made[key] for key in made if not key.startswith("_")}
        printed = capsys.readouterr().out
        assert pages.differs(pages.shown(f"docs/recipes/{name}.md"), printed) is None
    assert {path.name for path in place.iterdir()} <= {"examples", "out"}


@pytest.mark.slow
def test_recipe_of_several_processes_runs_twice(place: Path) -> None:
    few = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    command = [sys.executable, *start, str(FOLDER / "several_gpus.py")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | few)
        assert done.returncode == 0, done.stderr
        assert pages.differs(pages.shown("docs/recipes/several_gpus.md"), done.stdout) is None
    assert {path.name for path in place.iterdir()} == {"examples", "out"}


@pytest.mark.slow
def test_notebook_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Jupyter starts it, with the stored outputs; nothing warns, one folder is written."""
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "tiny_lm").symlink_to(ROOT / "examples" / "tiny_lm")
    *stored, _ = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    for _ in range(2):
        *cells, last = code_cells(executed(nbformat.read(NOTEBOOK, as_version=4), examples))
        assert "Warning" not in streams([*cells, last], "stderr")
        assert pages.differs(streams(stored, "stdout"), streams(cells, "stdout")) is None
        # How a model of this size goes on depends on the last bits of its products.
        assert streams([last], "stdout").startswith("The function returns")
    assert {path.name for path in examples.iterdir()} == {"out", "tiny_lm"}
    # From the root of a clone it finds the model too.
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in {"imports", "model", "load"}]
    assert len(code_cells(executed(notebook, tmp_path))) == 3


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook, run by a new kernel in a folder."""
    nbclient = pytest.importorskip("nbclient")
    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": 600, "kernel_name": "python3", "resources": resources}
    return nbclient.NotebookClient(notebook, **options).execute()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def streams(cells: list[Any], name: str) -> str:
    """What cells printed to one stream."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream"}
    return "".join("".join(each["text"]) for each in outputs if each["name"] == name)


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
    """All of its parts in order, and no code of Python that nothing runs."""
    page = (ROOT / "docs" / "recipes" / f"{name}.md").read_text("utf-8")
    shown = re.findall(rf'--8<-- "examples/recipes/{name}\.py:(\w+)"', page)
    assert shown and shown == list(sections(name))
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert block.strip().startswith('--8<-- "examples/'), block
