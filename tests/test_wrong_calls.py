"""Calls that are wrong in one argument: an Fp4PassError says which, and nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.errors import Fp4PassError
from fp4pass.evaluation import output_errors
from fp4pass.parity import Linear4bit, swap
from fp4pass.quantization.functional import quantize_blocks

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
BLOCKS, IDS = X.view(4, 4, 16), torch.ones(20, dtype=torch.long)
ARRAY, META, SPARSE = X.numpy(), X.to("meta"), X.to_sparse()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64)).eval()


def convert(**options: Any) -> nn.Module:
    return fp4pass.convert(model(), **{"method": "sse", "weight_only": True} | options)


def with_nan_bias() -> nn.Module:
    found = model()
    with torch.no_grad():
        found[0].bias[3] = float("nan")
    return found


def save(**options: Any) -> None:
    fp4pass.save(convert(), **{"directory": "never"} | options)


def calibrate(batches: Any) -> None:
    fp4pass.calibrate(fp4pass.prepare(model()), batches, progress=False)


def report(name: str, **options: Any) -> None:
    given = {"source": convert(), "progress": False}
    getattr(pytest.importorskip("fp4pass.reporting"), name)(**given | options)


def evaluate(text: Any = IDS, **options: Any) -> None:
    fp4pass.evaluate(model(), None, text, **{"window": 4, "progress": False} | options)


def with_hessian(hessian: Any, **options: Any) -> None:
    quantize_blocks(BLOCKS, objective="hessian", block_hessian=hessian, **options)


def errors(**changed: Any) -> None:
    given = {"model": convert(), "reference": model(), "batches": [X], "progress": False}
    output_errors(**given | changed)


STATE = fp4pass.quantize(X, "nvfp4")
EYE = torch.eye(16).expand(4, 16, 16)

# (the call, what the message names)
CASES: list[tuple[Callable[[], Any], str]] = [
    # arguments in another order, or of another call
    (lambda: fp4pass.convert(None), "model: expected a torch.nn.Module, got NoneType"),
    (lambda: fp4pass.prepare(Path("folder")), "Load the model first: with from_pretrained"),
    (lambda: fp4pass.convert("nvfp4", model()), "a torch.nn.Module, got str. Load the model"),
    (lambda: fp4pass.calibrate([X], model()), "expected a torch.nn.Module, got list"),
    (lambda: fp4pass.evaluate(model(), "text", None), "fp4pass.evaluate(model, tokenizer, text)"),
    (lambda: fp4pass.quantize(model()), "got Sequential. For a model, call fp4pass.convert(model)"),
    (lambda: fp4pass.quantize_checkpoint(model(), "o"), "in memory, call fp4pass.convert(model)"),
    # names of schemes and methods, in each other's place or as others spell them
    (lambda: fp4pass.prepare(model(), "MXFP4"), "Method 'MXFP4' does not exist"),
    (lambda: fp4pass.convert(model(), "GPTQ"), "Scheme 'GPTQ' does not exist"),
    (lambda: convert(fmt="fp4"), "Did you mean 'nvfp4'?"),
    (lambda: convert(rules=[("0", {"fmt": None})]), "fmt: expected the name of a scheme, got None"),
    # options
    (lambda: convert(fmt="fp8", block=128), "'fp8' has one scale for a row, and no blocks"),
    (lambda: convert(block="16"), "no block of '16'"),
    (lambda: convert(device="cpu"), "device is 'cpu', but layers run"),
    (lambda: convert(metod="sse"), "Option 'metod' does not exist. Did you mean 'method'"),
    (lambda: convert(resume="/proc/x"), "resume: expected a folder, got /proc/x, which"),
    (lambda: fp4pass.Gptq(damping=0.0), "Gptq: damping: expected a number above 0, got 0.0"),
    (lambda: fp4pass.Report.from_dict({}), "Report: data: expected what Report.to_dict"),
    # calibration
    (lambda: calibrate(3), "data: expected batches, texts, chats, rows, token windows"),
    (lambda: calibrate(X), "got a tensor of torch.float32 [4, 64]. Put a single batch"),
    (lambda: calibrate(["a text"]), "tokenizer: expected one for data that is text, got none"),
    (lambda: calibrate([{"a": "x", "b": "y"}]), "data, row 0: expected columns that hold text"),
    (lambda: fp4pass.trace(model(), "x"), "example: expected a mapping"),
    (lambda: fp4pass.convert(with_nan_bias(), method="sse"), "0: its bias holds NaN or infinity"),
    # save and load
    (lambda: save(directory=""), "directory: expected a path"),
    (lambda: save(layout="foo"), "layout: Layout 'foo' does not exist"),
    (lambda: save(max_shard_size="5"), "max_shard_size: expected a size with a unit"),
    (lambda: transcode("never", None, "bf16"), "never is not a folder"),
    (lambda: STATE.save("/proc/x"), "/proc/x cannot be written"),
    # single tensors
    (lambda: fp4pass.quantize(ARRAY), "torch.as_tensor makes one), got ndarray"),
    (lambda: fp4pass.quantize(META), "quantize: x: expected a dense tensor with values, got a"),
    (lambda: fp4pass.quantize(X.int()), "expected x of float32"),
    (lambda: fp4pass.quantize(X, "nvfp4", global_scale=0.0), "global_scale to be 'auto'"),
    (lambda: fp4pass.dequantize(X), "dequantize: expected what quantize returned"),
    (lambda: quantize_blocks(BLOCKS, dim=3), "expected dim to be a dimension"),
    (lambda: with_hessian(-EYE), "symmetric and positive semidefinite"),
    (lambda: with_hessian(EYE, inputs=X), "expected inputs or block_hessian, got both"),
    (lambda: STATE.to("cuda:99"), "device=cuda:99 cannot be used"),
    (lambda: dataclasses.replace(STATE, global_scale=float("nan")), "expected a positive number"),
    (lambda: dataclasses.replace(STATE, dtype=torch.int8), "expected a floating-point dtype"),
    (
        lambda: fp4pass.methods.certify(X[:2], STATE, torch.eye(32).expand(2, 32, 32)),
        "weight: expected the shape of state, (4, 64)",
    ),
    # fp4pass.parity
    (lambda: swap(model(), "nf9"), "kind 'nf9' does not exist"),
    # evaluation and reports
    (lambda: evaluate("abc"), "tokenizer: expected one"),
    (lambda: evaluate(stride=5), "stride: expected 1 to 4"),
    (lambda: errors(reference=nn.Sequential(nn.Linear(8, 8))), "of this name and shape"),
    (lambda: report("write_report", path="/proc/x/p.html"), "/proc/x/p.html cannot be written"),
]


@pytest.mark.parametrize(
    ("call", "message"), CASES, ids=[f"{i}-{message[:30]}" for i, (_, message) in enumerate(CASES)]
)
def test_a_wrong_call_names_its_argument(
    call: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Fp4PassError) as caught:
        call()
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"nothing": "cpu"}, "device_map: expected names of modules, got nothing"),
        ({}, "device_map: The device_map provided does not give any device for the"),
        ({"": "auto"}, "device_map: expected a device such as 'cuda:0', 'auto', or"),
        ({"0": "disc"}, "or a dict from names of modules to devices, got disc"),
    ],
)
def test_a_device_map_that_fits_no_model(places: Any, message: str, tmp_path: Path) -> None:
    save(directory=tmp_path / "q")
    other = model()
    before = other[0].weight
    with pytest.raises(Fp4PassError) as caught:
        fp4pass.load(tmp_path / "q", model=other, device_map=places)
    assert message in str(caught.value) and other[0].weight is before
    fp4pass.load(tmp_path / "q", model=other, device_map={"0": "cpu"})


def test_numbers_of_numpy_are_numbers() -> None:
    size = np.int64(16)
    found = quantize_blocks(BLOCKS, dim=np.int64(2)).dequantize()
    assert torch.equal(found, quantize_blocks(BLOCKS).dequantize())
    assert fp4pass.quantize(X, "nvfp4", size).format.block == 16
    assert Linear4bit(size, size).in_features == 16
