"""Finished searches are found again, and only those that are the same."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint.finished import FinishedSearches
from fp4pass.core import quant_state
from fp4pass.core.fingerprint import digest_of
from fp4pass.core.formats import get_format
from fp4pass.errors import CheckpointError
from fp4pass.methods import METHODS, search_scales
from fp4pass.record.state import get_state


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 32))
    return layers.eval()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that a method searched."""
    seen: list[tuple[int, ...]] = []
    for name, method in list(METHODS.items()):

        def search(weight: Tensor, *args: Any, inner: Callable[..., Any] = method.function) -> Any:
            seen.append(tuple(weight.shape))
            if stop_at and len(seen) == stop_at[0]:
                raise KeyboardInterrupt
            return inner(weight, *args)

        monkeypatch.setitem(METHODS, name, dataclasses.replace(method, function=search))
    return seen


stop_at: list[int] = []


def convert(resume: Path | None, method: str = "hessian", seed: int = 0, **options: Any) -> Any:
    model = mlp()
    if method == "hessian":
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
        fp4pass.prepare(model, method)
        fp4pass.calibrate(model, [x], progress=False)
    return fp4pass.convert(model, method=method, resume=resume, **options)


@pytest.mark.core
@pytest.mark.parametrize("method", ["sse", "hessian"])
def test_after_an_interruption_only_the_rest_is_searched(
    tmp_path: Path, searches: list[tuple[int, ...]], method: str
) -> None:
    whole = convert(None, method)
    searches.clear()
    stop_at.append(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "r", method)
    finally:
        stop_at.clear()
    searches.clear()
    resumed = convert(tmp_path / "r", method)
    assert searches == [(32, 64)]
    assert_same_bits(whole, resumed)
    assert str(fp4pass.report(whole)) == str(fp4pass.report(resumed))
    searches.clear()
    assert_same_bits(whole, convert(tmp_path / "r", method))
    assert not searches


def test_what_differs_is_searched_again(tmp_path: Path, searches: list[tuple[int, ...]]) -> None:
    convert(tmp_path / "r")
    for options in (
        {"seed": 1},
        {"method": "sse"},
        {"method": "naive"},
        {"fmt": "mxfp4"},
        {"block": 32},
    ):
        searches.clear()
        found = convert(tmp_path / "r", **options)
        assert len(searches) == 3, options
        assert_same_bits(found, convert(None, **options))
    searches.clear()
    model = mlp()
    with torch.no_grad():
        model[2].weight[5, 7] += 1e-6
    fp4pass.convert(model, method="sse", resume=tmp_path / "r")
    assert searches == [(64, 96)]
    searches.clear()
    model = mlp()
    with torch.no_grad():
        # The first and the last layer share a global scale.
        model[3].weight *= 64
    fp4pass.convert(model, method="sse", resume=tmp_path / "r")
    assert searches == [(96, 64), (32, 64)]


@pytest.mark.core
def test_one_changed_bit_is_searched_again(tmp_path: Path, searches: list[tuple[int, ...]]) -> None:
    whole = convert(tmp_path / "r", "sse")
    for path in (tmp_path / "r").iterdir():
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(bytes(data))
    searches.clear()
    assert_same_bits(whole, convert(tmp_path / "r", "sse"))
    assert len(searches) == 3 == len(list((tmp_path / "r").iterdir()))
    # And a model is not the folder that it came from.
    found = convert(tmp_path / "r", "sse")
    for path in (tmp_path / "r").iterdir():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    assert_same_bits(whole, found)


def test_what_was_proved_is_found_again(tmp_path: Path) -> None:
    exact = fp4pass.Hessian(exact=True)
    reports = []
    for resume in (None, tmp_path / "r", tmp_path / "r"):
        model = fp4pass.prepare(nn.Sequential(nn.Linear(32, 4)).eval(), exact)
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 128).sin().view(4, 32))
        model(torch.randn(50, 32, generator=torch.Generator().manual_seed(0)))
        fp4pass.convert(model, "nvfp4", resume=resume)
        reports.append(fp4pass.report(model).to_dict())
    assert reports[0]["rows"][0]["proved"] is not None
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.core
def test_threads_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All finish one search before the first is renamed, the worst moment there is."""
    fmt, cache, fsync = get_format("nvfp4"), FinishedSearches(tmp_path), os.fsync
    weight, together = torch.randn(4, 32), threading.Barrier(3, timeout=30)
    result = search_scales(weight, fmt, 1.0, "naive"), None

    def wait(descriptor: int) -> None:
        together.wait()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(cache.get_or_search, "", ["key"], lambda: result) for _ in range(3)]
        assert all(torch.equal(run.result()[0].qdata, result[0].qdata) for run in runs)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.core
def test_a_full_disk_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(quant_state, "save_file", full)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path, "sse")
    # The advice is one, and that of the folder.
    found = f"resume: {tmp_path} cannot be read or written: No space left on device. The searches"
    assert str(caught.value).startswith(found)


def test_the_digest_is_of_bits_shapes_and_dtypes() -> None:
    x = torch.arange(12.0)
    same = (x.clone(), x.view(3, 4).t().contiguous().view(4, 3).t())
    assert digest_of(x) == digest_of(same[0])
    assert digest_of(x.view(3, 4)) == digest_of(same[1])
    others = [x.view(3, 4), x.view(4, 3), x.double(), x.view(torch.int32), -x, x[:-1], [x], (x, 1)]
    assert len({digest_of(x), *map(digest_of, others)}) == len(others) + 1
    assert digest_of({"a": 1, "b": x}) == digest_of({"b": x, "a": 1}) != digest_of({"a": 2, "b": x})


def test_the_recipe_says_what_calibrated_it() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def calibrated(*batches: Tensor) -> Any:
        model = fp4pass.prepare(mlp())
        for batch in batches:
            fp4pass.calibrate(model, [batch], progress=False)
        fp4pass.convert(model, "nvfp4")
        return get_state(model).recipe["calibration"]

    first = calibrated(x, 2 * x)
    assert first["batches"] == 2 and first["tokens"] == 64 and len(first["sha256"]) == 64
    assert calibrated(x, 2 * x) == first
    assert calibrated(2 * x, x)["sha256"] != first["sha256"]
    # A loop of one's own: how much is known, and not what.
    model = fp4pass.prepare(mlp())
    model(x)
    fp4pass.convert(model, "nvfp4")
    assert get_state(model).recipe["calibration"] == {"tokens": 32}
    assert "calibration" not in get_state(convert(None, "sse")).recipe
