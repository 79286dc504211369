"""Examples of the docstrings of public names: each has one, and it runs."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import importlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from evaluation.toys import Tokens, Toy
from mixtures import build
from pages import registries_as_before
from small_models import TINY
from torch import nn

import fp4pass

PACKAGE = Path(fp4pass.__file__).parent

# Rooms whose `__all__` is for the rest of fp4pass only, or names of other libraries.
PRIVATE = ("_compat", "api", "core", "distributed", "engine", "graph", "nn", "parity.", "record")

# Classes that others extend or read: their methods are shown by the example of the class.
BY_CLASS = ("checkpoint", "methods", "parallel", "parity")

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def rooms() -> list[str]:
    """The modules that export public names, which list them."""
    files = [path for path in PACKAGE.rglob("*.py") if "\n__all__ =" in path.read_text("utf-8")]
    paths = [path.relative_to(PACKAGE.parent).with_suffix("").as_posix() for path in files]
    names = {path.removesuffix("/__init__").replace("/", ".") for path in paths}
    return sorted(name for name in names if not name.partition(".")[2].startswith(PRIVATE))


# What a room cannot be imported without.
NEEDED = {"reporting": ("jinja2",), "integrations": ("transformers",)}


def exported(room: str) -> dict[str, Any]:
    """The public names of a room, or none where a library is missing."""
    for library in NEEDED.get(room.rpartition(".")[2], ()):
        if importlib.util.find_spec(library) is None:
            return {}
    module = importlib.import_module(room)
    found = {}
    for name in module.__all__:
        missing = name == "lora_config" and importlib.util.find_spec("peft") is None
        if not missing:
            found[f"{room}.{name}"] = getattr(module, name)
    return found


def described() -> Iterator[tuple[str, Any]]:
    """Each public function and class, and the public methods that classes have of their own."""
    seen = set()
    for room in rooms():
        for name, found in exported(room).items():
            if not callable(found) or id(found) in seen:
                continue
            seen.add(id(found))
            yield name, found
            if not inspect.isclass(found) or room.rpartition(".")[2] in BY_CLASS:
                continue
            shown = inspect.getdoc(found) or ""
            for method, value in vars(found).items():
                own = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                # What the example of the class calls needs none of its own.
                if inspect.isfunction(own) and method[0] != "_" and f".{method}(" not in shown:
                    yield f"{name}.{method}", own


# Records that the reference shows, though their room exports nothing.
RECORDS = {
    "fp4pass.core.formats.Format": fp4pass.core.formats.Format,
    "fp4pass.core.elements.Element": fp4pass.core.elements.Element,
}
PUBLIC = {**dict(described()), **RECORDS}


def example_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(PUBLIC[name]) or ""
    _, found, example = text.partition("\nExample:\n")
    assert found, f"{name}: the docstring has no section Example:"
    return doctest.DocTestParser().get_doctest(example, {}, name, name, 0)


def decoder(vocabulary: int = 64) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes["vocab_size"] = vocabulary
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaForCausalLM(config).eval()


def language(folder: Path) -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz" * 20
    return {"model": Toy().eval(), "tokenizer": Tokens(), "text": letters}


def language_writer(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    return {"model": decoder(len(tokenizer)), "tokenizer": tokenizer}


def transformers_model(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    model = decoder()
    model.save_pretrained(folder / "float-model")
    ids = torch.ones(2, 8, dtype=torch.long)
    load = transformers.AutoModelForCausalLM
    return {"model": model, "batches": [ids], "AutoModelForCausalLM": load}


def learned(folder: Path) -> dict[str, Any]:
    original = decoder()
    model = fp4pass.convert(copy.deepcopy(original), "nvfp4a16", "sse")
    return {"original": original, "model": model, "windows": torch.randint(64, (24, 16))}


def with_stack(folder: Path) -> dict[str, Any]:
    ids = torch.arange(16).view(2, 8)
    return {"model": decoder(), "batches": [ids, ids + 1]}


# What an example has beside a small model and its batches.
BESIDE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fp4pass.lab": learned,
    "fp4pass.Evaluation": language,
    "fp4pass.evaluate": language,
    "fp4pass.evaluation.Change": language,
    "fp4pass.evaluation.Difference": language,
    "fp4pass.allocate": with_stack,
    "fp4pass.calibration.mixture": language_writer,
    "fp4pass.calibration.sample": language_writer,
    "fp4pass.distill": learned,
    "fp4pass.integrations.Fp4PassConfig": transformers_model,
    "fp4pass.integrations.PackedConfig": transformers_model,
    "fp4pass.integrations.quantized_cache": transformers_model,
    "fp4pass.lab.Allocation": with_stack,
    "fp4pass.parallel.ExpertParallel": lambda _: {
        "mixture": fp4pass.convert(build("mixtral"), method="naive", weight_only=True)
    },
    "fp4pass.quantize_checkpoint": transformers_model,
    "fp4pass.smooth": lambda _: {
        "normed": nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).eval()
    },
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def run(name: str, folder: Path, **more: Any) -> None:
    torch.manual_seed(0)
    names = {"fp4pass": fp4pass, "torch": torch, "nn": nn, "Path": Path, "copy": copy}
    names |= {"json": json, "dataclasses": dataclasses, "safetensors": safetensors}
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    names |= {"model": model, "batches": [torch.randn(4, 64)], **more}
    for start, make in BESIDE.items():
        if name == start or name.startswith(f"{start}."):
            names |= make(folder)
    test = example_of(name)
    assert test.examples, f"{name}: the example has no line of code"
    test.globs.update(names)
    printed = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.write).failed
    assert not failed, printed.getvalue()


SPLIT = [name for name in PUBLIC if "parallel" in name]


@pytest.mark.quick(30)
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in SPLIT])
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with registries_as_before():
        run(name, tmp_path)


@pytest.mark.parametrize("name", SPLIT)
def test_the_example_of_several_processes_runs_in_one(name: str, tmp_path: Path, mesh: Any) -> None:
    run(name, tmp_path, mesh=mesh)


def test_names_that_are_shown_are_the_public_ones() -> None:
    for room in rooms():
        module = importlib.import_module(room)
        if "__dir__" in vars(module):
            assert dir(module) == sorted(module.__all__), room
        for name in module.__all__:
            getattr(module, name)


def test_no_example_is_skipped_and_the_reference_shows_examples_alone() -> None:
    """Each name of the site's reference is one whose example runs here."""
    assert not [name for name in PUBLIC if "+SKIP" in (inspect.getdoc(PUBLIC[name]) or "")]
    shown = set()
    for page in (PACKAGE.parent / "docs" / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE):
            room, _, last = name.rpartition(".")
            shown.add(id(getattr(importlib.import_module(room), last)))
    assert shown <= {id(found) for found in PUBLIC.values()}
