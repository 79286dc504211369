"""Errors of the library in the words of a shell."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import fp4pass
from fp4pass.quantization.recipe import Recipe

for package in ("typer", "rich", "yaml"):
    pytest.importorskip(package)

# What commands call.
ROOMS = (
    "api.py", "checkpoint", "config.py", "core/formats.py", "evaluation", "from_disk.py",
    "kv_cache.py", "methods", "misnamed.py", "quantization", "reporting",
)  # fmt: skip


def words(command: str) -> Any:
    from typer.main import get_command

    from fp4pass.cli.app import app
    from fp4pass.cli.words import Words

    group: Any = get_command(app)
    return Words(group.commands[command].params)


@pytest.mark.core
@pytest.mark.parametrize(
    ("command", "text", "here"),
    [
        ("quantize", "pass overwrite=True to replace it.", "pass --overwrite to replace it."),
        ("quantize", "without sequential=True or stream=.", "without --sequential or --stream."),
        ("quantize", "Give sequential=True to prepare, and", "Give --sequential, and"),
        ("quantize", "or choose method='sse'.", "or choose --method sse."),
        ("quantize", "choose unreached='skip' or 'sse'.", "choose --unreached skip or sse."),
        ("quantize", "with weight_only=False.", "with --quantize-inputs."),
        ("quantize", "Choose layout='modelopt'.", "Choose --export modelopt."),
        ("convert", "Choose layout='modelopt'.", "Choose --to modelopt."),
        ("quantize", "window: expected 2, got 1.", "--seq-len: expected 2, got 1."),
        ("eval", "a longer text or window=17.", "a longer text or --length 17."),
        ("report", "path: expected a name", "--output: expected a name"),
        ("eval", "at least 1, or None for all", "at least 1, or left out for all"),
        (
            "quantize",
            "Skip it with rules=[('*.down_proj', None)], or",
            "Skip it with --rules FILE (with [{'*.down_proj': null}]), or",
        ),
        (
            "quantize",
            "Gptq(target='cross') is for layers",
            "method {name: gptq, target: cross} is for layers",
        ),
        # Of what a command has no option for, and of Python itself, nothing changes.
        ("convert", "or choose method='sse'.", "or choose method='sse'."),
        ("quantize", "fp4pass.load(dir, model=model).", "fp4pass.load(dir, model=model)."),
        ("quantize", "DataLoader(f(seed=1), batch_size=8)", "DataLoader(f(seed=1), batch_size=8)"),
    ],
)  # fmt: skip
def test_arguments_are_options(command: str, text: str, here: str) -> None:
    assert words(command).translate(text) == here


@pytest.mark.core
def test_rules_are_those_of_a_recipe_file(tmp_path: Path) -> None:
    rules = [("*.down_proj", None), ("layers.0", {"fmt": "mxfp4", "weight_only": True})]
    (found,) = re.findall(r"with (\[.*\])\)", words("quantize").translate(f"Give rules={rules}."))
    (tmp_path / "rules.yaml").write_text(found)
    assert list(Recipe.read(tmp_path / "rules.yaml").rules) == rules


def messages() -> set[str]:
    """The texts of all errors that a command can come to, each placeholder as its source."""
    found = set()
    package = Path(fp4pass.__file__).parent
    files = [path for room in ROOMS for path in sorted(package.glob(f"{room}/**/*.py"))]
    files += [package / room for room in ROOMS if room.endswith(".py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise):
                continue
            for text in ast.walk(node):
                if isinstance(text, ast.JoinedStr):
                    parts = (
                        part.value if isinstance(part, ast.Constant) else "x"
                        for part in text.values
                    )
                    found.add("".join(map(str, parts)))
                elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found.add(text.value)
    return found


@pytest.mark.core
def test_no_error_of_a_command_shows_an_argument() -> None:
    """What is left says how to call fp4pass in Python, where no option does that."""
    from fp4pass.cli.words import CALL

    shell = words("quantize")
    found = {text: shell.translate(text) for text in messages()}
    assert len(found) > 200
    assert sum(text != here for text, here in found.items()) > 15
    left = {here for here in found.values() if re.search(r"\b[a-z_]+=", CALL.sub("", here))}
    assert not left
