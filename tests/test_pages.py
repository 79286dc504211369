"""What pages show exists and runs: commands, options, snippets, names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pages
import pytest
import torch
from mixtures import build
from pages import ROOT, Block

import fp4pass
from fp4pass import errors

for package in ("transformers", "yaml", "datasets"):
    pytest.importorskip(package)

ALL = [*pages.PAGES, *pages.RECIPES]
BLOCKS = [block for page in ALL for block in pages.blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [
    (block, words) for block in BLOCKS if block.language == "sh" for words in pages.commands(block)
]

# ---- quick: what is named exists ---------------------------------------------------------------


@functools.cache
def subcommands() -> dict[str, Any]:
    from fp4pass.cli.app import COMMANDS, parser

    return {name: parser(name)._option_string_actions.keys() for name in COMMANDS}


def wrong(words: list[str]) -> str | None:
    """What a command names that does not exist."""
    if "fp4pass" in words and words[-1] != "fp4pass":
        rest = words[words.index("fp4pass") + 1 :]
        if words[0] == "fp4pass" or words[words.index("fp4pass") - 1] == "-m":
            known = subcommands().get(rest[0])
            if known is None:
                return f"no command {rest[0]}"
            given = {word.partition("=")[0] for word in rest if word.startswith("-")}
            return f"{rest[0]} has no {given - known}" if given - known else None
    module = re.search(r"-m (fp4pass[\w.]*)", " ".join(words))
    if module and importlib.util.find_spec(module[1]) is None:
        return f"no module {module[1]}"
    scripts = [word for word in words if re.fullmatch(r"(examples|eval)/\S+\.py", word)]
    for script in scripts:
        if not (ROOT / script).exists():
            return f"no file {script}"
        text = "".join(path.read_text("utf-8") for path in (ROOT / script).parent.glob("*.py"))
        options = [word for word in words[words.index(script) :] if word.startswith("--")]
        missing = [each for each in options if f'"{each}"' not in text]
        if missing:
            return f"{script} has no {missing[0]}"
    return None


def test_every_command_of_a_page_exists() -> None:
    assert len(SHELL) > 40
    found = {f"{block}: {' '.join(words)}": wrong(words) for block, words in SHELL}
    assert not {where: each for where, each in found.items() if each}


def test_every_first_word_of_the_command_line_page_is_described() -> None:
    """And so is every command of the program."""
    page = (ROOT / "docs/cli.md").read_text("utf-8")
    first = pages.blocks("docs/cli.md")[0]
    named = {words[1] for words in pages.commands(first) if words[0] == "fp4pass"}
    assert named == subcommands().keys()
    described = set(re.findall(r"^## (\w+)", page, re.MULTILINE))
    assert described == named - {"doctor"}


def test_the_troubleshooting_page_has_every_error() -> None:
    """Each public class of errors, once, in its table."""
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    classes = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, (fp4pass.Fp4PassError, Warning))
    }
    assert sorted(listed) == sorted(classes - {"Fp4PassError"})
    assert "`fp4pass.Fp4PassError`" in page


def missing(name: str) -> bool:
    """Whether fp4pass has no such module, class or function."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for part in rest:
        if not hasattr(found, part) and importlib.util.find_spec(f"{found.__name__}.{part}"):
            importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return True
        found = getattr(found, part)
    return False


def test_every_snippet_compiles_and_its_names_exist() -> None:
    """Also of those that are not run, and files of eval that pages name."""
    assert len(PYTHON) > 80
    for block in PYTHON:
        compile(block.code, str(block), "exec")
        code = re.sub(r'"[^"\n]*"', "", block.code)
        names = re.findall(r"(?<![\w./])fp4pass(?:\.[a-zA-Z]\w*)+", code)
        for module, imported in re.findall(r"^from (fp4pass[\w.]*) import ([\w, ]+)$", code, re.M):
            names += [f"{module}.{name.split()[0]}" for name in imported.split(",")]
        assert not [name for name in names if missing(name)], block
    for page in (*ALL, "docs/development/notes.md"):
        text = (ROOT / page).read_text("utf-8")
        named = set(re.findall(r"\beval/[\w./-]+\.(?:py|json|md)\b", text))
        named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (eval\.[\w.]+)", text)}
        assert not {name for name in named if not (ROOT / name).exists()}, page


def test_what_is_not_run_is_shown() -> None:
    """An entry of the table that no page needs any more goes."""
    texts = [" ".join(words) for _, words in SHELL] + [block.code for block in PYTHON]
    assert not [part for part in pages.NOT_RUN if not any(part in text for text in texts)]
    # Scripts in bash are for machines with other programs.
    known = {"sh", "bash", "python", "text", "yaml", "diff"}
    assert all(block.language in known for block in BLOCKS)


# ---- slow: what is shown runs ------------------------------------------------------------------

# Pages that say that they are followed in a clone; all others are in an empty folder.
CLONE = {"docs/cli.md", "docs/evaluation.md", "docs/tensors.md", *pages.RECIPES}


def runs(block: Block) -> bool:
    """Snippets of recipes are parts of scripts, which tests/test_recipes.py runs."""
    if block.language == "python":
        return block.page not in pages.RECIPES and pages.not_run(block.code) is None
    return block.language == "sh" and any(
        pages.not_run(" ".join(words)) is None for words in pages.commands(block)
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two texts; what snippets register is gone behind it."""
    for name, source in pages.TEXTS.items():
        (tmp_path / name).write_text(pages.words(source, 8_000))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    with pages.registries_as_before():
        yield tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", [page for page in ALL if any(map(runs, pages.blocks(page)))])
def test_page_runs_twice(page: str, place: Path) -> None:
    """Its commands and snippets in order; the second time they may ask for --overwrite.

    A page that leaves no files behind runs once.
    """
    if page in CLONE:
        for folder in ("examples", "eval"):
            (place / folder).symlink_to(ROOT / folder)
    if any("mixture" in pages.local(block.code) for block in pages.blocks(page)):
        build("qwen3_moe", torch.bfloat16, vocab_size=2048).save_pretrained(place / "mixture")
        pages.tokenizer().save_pretrained(place / "mixture")
    if (recipe := pages.recipe_file(page)) is not None:
        (place / "recipe.yaml").write_text(recipe)
    files = {*place.iterdir()}
    for again in (False, True):
        if again and files == {*place.iterdir()}:
            return
        names: dict[str, Any] = {"__name__": "__main__"}
        for block in filter(runs, pages.blocks(page)):
            print(f"{block}, run {1 + again}")  # pytest shows where a page fails
            run_block(block, names, again)


def run_block(block: Block, names: dict[str, Any], again: bool) -> None:
    from fp4pass.errors import CheckpointError, OptionError

    if block.language == "python":
        code = pages.local(block.code)
        names.update(pages.given(block.page, code))
        try:
            exec(compile(code, str(block), "exec"), names)
        except (CheckpointError, OptionError) as error:
            assert again and "overwrite=True" in str(error), error
        return
    for words in pages.commands(block):
        if pages.not_run(" ".join(words)) is None:
            run_command(pages.local_words(words), again)


def run_command(words: list[str], again: bool) -> None:
    """A command of a page: fp4pass in this process, others in one of their own."""
    if words[0] == "fp4pass":
        result = commands.run(*words[1:], code=None)
        code, output = result.exit_code, result.output
    else:
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        code, output = done.returncode, done.stdout + done.stderr
    refused = again and code == 2 and "--overwrite" in output
    assert code == 0 or refused, (words, output)
