"""What pages show exists and runs: commands, options, snippets, names."""

from __future__ import annotations

import ast
import dataclasses
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
from types import ModuleType
from typing import Any

import pages
import pytest
import torch
from pages import ROOT, Block

import fp4pass
from fp4pass import errors

for package in ("transformers", "typer", "datasets"):
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
    import typer

    from fp4pass.cli.app import app

    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def wrong(words: list[str]) -> str | None:
    """What a command names that does not exist."""
    if "fp4pass" in words and words[-1] != "fp4pass":
        rest = words[words.index("fp4pass") + 1 :]
        if words[0] == "fp4pass" or words[words.index("fp4pass") - 1] == "-m":
            return wrong_options(rest)
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


def wrong_options(words: list[str]) -> str | None:
    """What a command of fp4pass, without its first word, names that does not exist."""
    command = subcommands().get(words[0])
    if command is None:
        return f"no command {words[0]}"
    options = {name: each for each in command.params for name in each.opts + each.secondary_opts}
    places = sum(each.param_type_name == "argument" for each in command.params)
    rest = words[1:]
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            places -= 1
        elif name not in options:
            return f"fp4pass {words[0]} has no {name}"
        elif not options[name].is_flag and not value:
            if not rest or rest[0].startswith("-"):
                return f"fp4pass {words[0]}: {name} has no value"
            rest.pop(0)
    return f"fp4pass {words[0]} takes fewer arguments" if places < 0 else None


@pytest.mark.parametrize("page", [*ALL, "docs/development/notes.md"])
def test_what_a_page_names_of_eval_is_there(page: str) -> None:
    """Modules that its commands run, scripts and results."""
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(r"\beval/[\w./-]+\.(?:py|json|md)\b", text))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (eval\.[\w.]+)", text)}
    assert not {name for name in named if not (ROOT / name).exists()}


def test_every_command_of_a_page_exists() -> None:
    assert len(SHELL) > 40
    found = {f"{block}: {' '.join(words)}": wrong(words) for block, words in SHELL}
    assert not {where: each for where, each in found.items() if each}


def test_every_option_of_the_command_line_page_is_one_of_its_command() -> None:
    """Options in the words of a section are those of the command that is its title."""
    parts = re.split(r"^## (\w+)\n", (ROOT / "docs/cli.md").read_text("utf-8"), flags=re.MULTILINE)
    known = subcommands()
    assert set(parts[1::2]) <= known.keys()
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        own = {name for each in known[title].params for name in each.opts + each.secondary_opts}
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([^`\n]+)`", prose):
            first, *words = code.split()
            if first == "fp4pass" and words:
                assert words[0] in known, code
            elif first in known and words:
                assert wrong_options(code.split()[:1] + words) is None, code
            else:
                assert {word for word in code.split() if word.startswith("--")} <= own, code


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


def missing_names(code: str) -> Iterator[str]:
    """What a snippet takes of fp4pass that fp4pass does not have, keywords included."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp4pass"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name) and not submodule(module, name.name):
                    yield f"{node.module}.{name.name}"
        elif isinstance(node, ast.Call) and (function := named(node.func)) is not None:
            try:
                parameters = inspect.signature(function).parameters
            except (TypeError, ValueError):
                continue
            open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            fields = {each.name for each in dataclasses.fields(fp4pass.LinearConfig)}
            for keyword in node.keywords:
                known = parameters.keys() | (fields if open_ended else set())
                if keyword.arg and keyword.arg not in known:
                    yield f"{ast.unparse(node.func)}({keyword.arg}=)"
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("fp4pass."):
            if re.fullmatch(r"[\w.]+", ast.unparse(node)) and named(node) is None:
                yield ast.unparse(node)


def named(node: ast.AST) -> Any:
    """The object of fp4pass that an expression names, or None."""
    first, *rest = ast.unparse(node).split(".")
    found: Any = fp4pass
    if first != "fp4pass" or not rest:
        return None
    for name in rest:
        if not hasattr(found, name) and not submodule(found, name):
            return None
        found = getattr(found, name)
    return found


def submodule(module: Any, name: str) -> bool:
    """Whether a package has a module of this name, which is imported then."""
    if not isinstance(module, ModuleType) or not hasattr(module, "__path__"):
        return False
    path = f"{module.__name__}.{name}"
    return importlib.util.find_spec(path) is not None and bool(importlib.import_module(path))


def test_every_snippet_compiles_and_its_names_exist() -> None:
    assert len(PYTHON) > 80
    assert not {str(each): found for each in PYTHON if (found := [*missing_names(each.code)])}


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
        make_mixture(place / "mixture")
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
        from typer.testing import CliRunner

        from fp4pass.cli.app import app

        result = CliRunner().invoke(app, words[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        code, output = result.exit_code, result.output
    else:
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        code, output = done.returncode, done.stdout + done.stderr
    refused = again and code == 2 and "--overwrite" in output
    assert code == 0 or refused, (words, output)


def make_mixture(folder: Path) -> None:
    """Save a small mixture of experts with the tokenizer of the repository's model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=2048, **sizes, **heads, **experts)
    ).save_pretrained(folder)
    pages.tokenizer().save_pretrained(folder)
