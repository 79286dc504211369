"""What every test runs under."""

from __future__ import annotations

import faulthandler
import gc
import getpass
import importlib
import importlib.metadata
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

# Kernels run in Triton's interpreter where there is no GPU; it reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Workers that measure at the same time may choose different tiles for one of Inductor's kernels. In
# a cache that they share, two graphs of one test would get both, and other bits.
elif worker := os.environ.get("PYTEST_XDIST_WORKER"):
    place = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_{worker}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))

# Tests are many and small: threads cost them, and programs they start, more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Triton's interpreter makes many objects: looking for cycles as often as usual takes a tenth.
gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test with `quick(count)` as slow but so many, spread evenly."""
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            cases.setdefault((item.parent, item.name.split("[")[0]), []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker("quick")
        assert marker is not None
        count = marker.args[0]
        kept = {index * len(each) // count for index in range(count)}
        for index, item in enumerate(each):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def no_limit_for_slow_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow"):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Forget compiled code between tests, for Dynamo counts how often a function was compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session", autouse=True)
def fast_in_bfloat16() -> Iterator[None]:
    """Compute in the dtype of the weights on any CPU, so that tests expect the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp4pass.quantization.observers.batches.cpu_has_bfloat16", lambda: True)
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreter_remembers_builtins() -> Iterator[None]:
    """Let Triton's interpreter look through its language once, and round an fma once."""
    if "TRITON_INTERPRET" not in os.environ or find_spec("triton") is None:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin, patch_attribute = interpreter.tl.core.is_builtin, interpreter._patch_attr
    names: dict[object, list[str]] = {}

    def patch_builtin(package: object, builder: object, *scope: object) -> None:
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                patch_attribute(package, name, member, builder, *scope)

    def fma(self: object, x: Any, y: Any, z: Any) -> Any:
        product = np.multiply(x.data, y.data, dtype=np.float64)
        return interpreter.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        if Version(importlib.metadata.version("triton")) < Version("3.9"):
            # It rounds the product, which a GPU does not.
            patch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
        yield


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the references on the CPU, where the products have the bits of dense ones."""
    monkeypatch.setattr("fp4pass.kernels.cpu.operators.load", lambda: ({}, "not for this test"))


@pytest.fixture
def adapters_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers 5.24 add adapters: it asks for PEFT 0.22, and 0.21.2 is the newest one."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.19")


@pytest.fixture
def offline() -> Iterator[None]:
    """Without asking a hub."""
    pytest.importorskip("datasets")
    from commands import no_network

    with no_network():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of commands.make_folders."""
    from commands import make_folders, no_network

    with no_network():
        return make_folders(tmp_path_factory.mktemp("made"))
