"""The order of imports, what importing costs, and a few habits that a parser can check."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fp4pass

ROOT = Path(fp4pass.__file__).parent

# Imported by name, never by fp4pass/__init__; they alone may import these when they are imported.
BY_NAME = {"integrations", "reporting", "cli", "__main__"}
BY_NAME |= {"_compat/lm_eval", "_compat/peft"}
OPTIONAL = {"transformers", "accelerate", "datasets", "lm_eval", "compressed_tensors", "peft"}
OPTIONAL |= {"yaml", "jinja2"}


FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse(path)))


def top_level_imports(path: Path) -> set[str]:
    """The packages that importing a file imports: those outside functions and TYPE_CHECKING."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit([*node.body, *node.orelse])
            elif isinstance(node, ast.Try):
                visit([*node.body, *node.orelse, *node.finalbody])
                for handler in node.handlers:
                    visit(handler.body)
            elif isinstance(node, ast.With | ast.ClassDef):
                visit(node.body)

    visit(parse(path).body)
    return found


@pytest.mark.core
def test_the_order_of_imports_names_every_module() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text("utf-8")
    named = set(
        re.findall(r"\bfp4pass\.(\w+)", text.partition("\nlayers = [")[2].partition("\n]")[0])
    )
    there = {name_of(path).partition("/")[0] for path in FILES} - {"__init__"}
    assert named == there


# Rooms of workflows, and the rooms of which each still reads more than their `__init__` exports.
WORKFLOWS = {
    "lab": {"core", "kernels", "nn"},
    "doctor": {"_compat", "core", "nn"},
    "parity": {"core", "graph", "kernels", "nn", "ops", "quantization", "record"},
}


@pytest.mark.core
@pytest.mark.parametrize("room", WORKFLOWS)
def test_workflows_import_what_rooms_export(room: str) -> None:
    for path in (ROOT / room).glob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                other, _, inside = node.module.partition(".")
                assert not inside or other in WORKFLOWS[room], f"{path.name}: {node.module}"


WITHOUT = """
import sys
# An editable install would find what is missing here.
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
import torch, fp4pass
model = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
packed = fp4pass.convert(model, "nvfp4a16", "sse", progress=False)
fp4pass.save(packed, "out")
again = fp4pass.load("out", model=torch.nn.Sequential(torch.nn.Linear(32, 32)).eval())
assert torch.equal(again(torch.ones(1, 32)), packed(torch.ones(1, 32)))
try:
    fp4pass.distill
except (AttributeError, ImportError) as error:
    print(error)
"""


def test_the_package_works_without_its_workflows(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns(*WORKFLOWS, "__pycache__")
    shutil.copytree(ROOT, tmp_path / "fp4pass", ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "'fp4pass.lab'" in done.stdout


@pytest.mark.core
def test_kernels_know_formats_and_not_models() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        outside = top_level_imports(path) - set(sys.stdlib_module_names)
        assert outside <= {"torch", "triton"}, path


@pytest.mark.core
def test_optional_packages_are_imported_by_name_only() -> None:
    for path in FILES:
        name = name_of(path)
        if not {name, name.partition("/")[0]} & BY_NAME:
            assert not top_level_imports(path) & OPTIONAL, name
        if not name.endswith(("triton", "tiles")):
            assert "triton" not in top_level_imports(path), name


@pytest.mark.core
def test_no_handler_catches_everything() -> None:
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            place = f"{name_of(path)}:{node.lineno}"
            assert node.type is not None, f"{place}: a bare except"
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            assert "Exception" not in caught, f"{place}: {caught}"
            cleans_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert cleans_up or "BaseException" not in caught, f"{place}: {caught}"


@pytest.mark.core
def test_nothing_asks_the_name_of_a_format() -> None:
    known = ("nvfp4", "mxfp4", "e2m1", "e4m3", "e8m0")
    for path in FILES:
        for node in nodes(path):
            place = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Compare | ast.Match):
                sides = [node.subject] if isinstance(node, ast.Match) else [node.left]
                sides += node.comparators if isinstance(node, ast.Compare) else []
                texts = [ast.unparse(side) for side in sides]
                assert not [t for t in texts if t.endswith(("fmt.name", "format.name"))], place
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                words = [n.value for n in ast.walk(node.test) if isinstance(n, ast.Constant)]
                assert not any(word in known for word in words), place


# A collection of what torch left takes 0.1 s, and falls into either import by chance.
COST = """
import gc, sys, time
gc.disable()
start = time.perf_counter()
import torch
middle = time.perf_counter()
import fp4pass
end = time.perf_counter()
others = ("triton", "transformers", "accelerate", "scipy", "diffusers")
bad = [name for name in others if name in sys.modules]
print(end - middle, middle - start, ",".join(bad) or "-", torch.cuda.is_initialized())
"""


def test_importing_is_quick_and_touches_no_gpu() -> None:
    """A quarter of what torch takes at most (0.3 s on an idle machine), by the least of three,
    and without triton, transformers or scipy."""
    # Compiled, as pip leaves it: the first run writes what others read.
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", COST],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT.parent,
            env=compiled,
        )
        runs.append(done.stdout.split())
    extra, base = (min(float(run[i]) for run in runs) for i in range(2))
    print(f"import fp4pass: {extra:.3f} s beyond import torch: {base:.3f} s")
    assert {run[2] for run in runs} == {"-"}
    assert {run[3] for run in runs} == {"False"}
    assert extra < base / 4


def test_a_test_that_hangs_ends_its_run(tmp_path: Path) -> None:
    """And says where it hung."""
    (tmp_path / "test_it.py").write_text("import time\ndef test_hangs():\n    time.sleep(1.5)\n")
    options = ("-c", ROOT.parent / "pyproject.toml", "--rootdir", tmp_path)
    options += ("-p", "no:cacheprovider", "-o", "faulthandler_timeout=0.5")
    command = (sys.executable, "-m", "pytest", "-q", *options, tmp_path)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode and "test_hangs" in run.stderr, run.stdout
