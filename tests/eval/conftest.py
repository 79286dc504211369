"""Scripts of eval/ as modules, and the methods that tests measure with them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fp4pass.methods import METHODS

# The simplest, and one that needs calibration; or all, simple ones first.
SIMPLE = ("naive", "sse", "hessian")
METHODS_TRIED = [
    pytest.param(("naive", "hessian"), id="some"),
    pytest.param((*SIMPLE, *sorted({*METHODS} - {*SIMPLE})), id="all", marks=pytest.mark.slow),
]

EVAL = Path(__file__).parents[2] / "eval"


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Import a script by its name below eval/; none of them stays imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL.parent))
        yield lambda name: importlib.import_module(f"eval.{name}")
    for name, module in list(sys.modules.items()):
        if EVAL in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture(scope="module", params=METHODS_TRIED)
def methods(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The methods that a script measures."""
    return request.param
