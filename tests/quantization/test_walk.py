"""Which files of the package the tensor of a weight passes on its way to its codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4pass

_ROOT = os.path.dirname(fp4pass.__file__)


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        yield from value if isinstance(value, list | tuple) else (value,)


def _entries(method: str, weight: Tensor, model: nn.Module) -> list[tuple[str, str]]:
    """The file and function of each call from another file that takes the weight."""
    storage, found = weight.untyped_storage().data_ptr(), []

    def of_package(frame: FrameType | None) -> FrameType | None:
        while frame is not None and not frame.f_code.co_filename.startswith(_ROOT):
            frame = frame.f_back
        return frame

    def watch(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_ROOT):
            return
        tensors = (each for each in _arguments(frame) if isinstance(each, Tensor))
        if any(each.untyped_storage().data_ptr() == storage for each in tensors):
            caller = of_package(frame.f_back)
            if caller is None or caller.f_code.co_filename != file:
                found.append((os.path.relpath(file, _ROOT), frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        fp4pass.convert(model, "nvfp4", method=method)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("method", ["naive", "sse", "hessian"])
def test_a_weight_passes_seven_files(method: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    fp4pass.prepare(model, method)
    model(torch.randn(128, 64))
    weight: Any = model[0].weight
    found = _entries(method, weight, model)
    # Beside quantization/search.py, which holds it. Two are entered twice: to look at a block, and
    # at the largest number.
    assert found == [
        ("kernels/statistics/naive.py", "weight_amax"),
        ("methods/search.py", "may_be_exact"),
        ("methods/search.py", method),
        ("ops/registration.py", "run"),
        ("ops/checks.py", "_hessian"),
        ("kernels/search/reference.py", "search_ref"),
        ("kernels/statistics/naive.py", "weight_amax"),
        ("methods/statistics.py", "squared_errors"),
    ]
