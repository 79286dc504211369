"""The wheel holds what runs and nothing else, the sdist the tests and pages too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp4pass"

# Quantizes, saves, loads; counts the parts of fp4pass that come from elsewhere than the wheel.
USE = """
import sys, tempfile, torch, fp4pass
from torch import nn
from importlib.metadata import version
from fp4pass.reporting import write_report
folder = tempfile.mkdtemp()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
fp4pass.prepare(model)
fp4pass.calibrate(model, [torch.randn(40, 64)], progress=False)
fp4pass.convert(model, weight_only=True)
fp4pass.save(model, folder + "/out")
other = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
loaded = fp4pass.load(folder + "/out", model=other)
x = torch.randn(3, 64)
assert torch.equal(loaded(x), model(x))
write_report(model, folder + "/report.html")
from fp4pass.kernels.cpu.operators import load
assert load()[1] is None, load()[1]
files = {m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "fp4pass"}
print(version("fp4pass"), *{f for f in files if not f.startswith(sys.argv[1])})
"""


def files_of_the_package() -> set[str]:
    """Everything in fp4pass/ but what running it leaves."""
    found = (path for path in PACKAGE.rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def tracked(root: Path) -> list[str]:
    """The files of the repository."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, cwd=root, check=True,
    )  # fmt: skip
    return [name for name in found.stdout.splitlines() if (root / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build")
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    for name in tracked(ROOT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_only_what_runs_is_in_it(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.partition("/")[2] for name in archive.namelist()} - names
    assert names == files_of_the_package()
    assert "fp4pass/py.typed" in names and "licenses/LICENSE" in info
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        stored = {member.name.partition("/")[2] for member in archive if member.isfile()}
    outside = {name for name in stored - names if not name.startswith("fp4pass.egg-info/")}
    assert names <= stored
    folders = ("docs/", "eval/", "examples/", "tests/")
    assert {name for name in outside if not name.startswith(folders)} == {
        ".mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
        "PKG-INFO", "README.md", "constraints.txt", "pyproject.toml", "setup.cfg",
    }  # fmt: skip
    # The tests, their model, and the pages.
    some = {"tests/test_package.py", "examples/tiny_lm/model.safetensors", "docs/install.md"}
    assert some <= stored and not any(name.endswith(".pyc") for name in stored)
    assert {name for name in tracked(ROOT) if name.startswith(folders)} <= stored


def test_the_metadata_names_each_python_that_is_supported() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    assert named == ["10", "11", "12", "13"] and 'requires-python = ">=3.10"' in text


@pytest.mark.slow
def test_it_runs_without_the_repository(built: Path, tmp_path: Path) -> None:
    """In an environment that has nothing else but the libraries of this one."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "home"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(home), str(wheel)], check=True, capture_output=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(home)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    version, *elsewhere = done.stdout.split()
    assert version == "0.1.0" and not elsewhere
    script = subprocess.run(
        [sys.executable, str(home / "bin" / "fp4pass"), "doctor"],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert script.returncode == 0 and script.stdout.startswith("fp4pass 0.1.0"), script.stderr
