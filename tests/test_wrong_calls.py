"""Calls that are wrong in one argument: an Fp4PassError says which, whatever the argument is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp4pass
from fp4pass import methods
from fp4pass.checkpoint import register_layout
from fp4pass.checkpoint.transcode import transcode
from fp4pass.errors import Fp4PassError
from fp4pass.evaluation import output_errors
from fp4pass.parity import (
    CodebookState,
    Linear4bit,
    Linear8bitLt,
    bitsandbytes,
    codebook_quantize,
    learn_codebook,
    qwantize,
    swap,
)
from fp4pass.quantization.tensor import load_state
from fp4pass.quantization.tensor.functional import error_metrics, global_scale_for, quantize_blocks

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
BLOCKS, IDS = X.view(4, 4, 16), torch.ones(20, dtype=torch.long)
LIST, ARRAY, META, SPARSE = [1.0], X.numpy(), X.to("meta"), X.to_sparse()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64)).eval()


def convert(**options: Any) -> nn.Module:
    return fp4pass.convert(model(), **{"method": "sse", "weight_only": True} | options)


def with_bias(value: float) -> nn.Module:
    found = model()
    with torch.no_grad():
        found[0].bias[3] = value
    return found


def save(**options: Any) -> None:
    fp4pass.save(convert(), **{"directory": "never"} | options)


def calibrate(batches: Any, progress: Any = False) -> None:
    fp4pass.calibrate(fp4pass.prepare(model()), batches, progress=progress)


def write_report(**options: Any) -> None:
    pytest.importorskip("fp4pass.reporting").write_report(
        **{"source": convert(), "path": "p.html", "progress": False} | options
    )


def evaluate(text: Any = IDS, **options: Any) -> None:
    fp4pass.evaluate(model(), None, text, **{"window": 4, "progress": False} | options)


def with_hessian(hessian: Any, **options: Any) -> None:
    quantize_blocks(BLOCKS, objective="hessian", block_hessian=hessian, **options)


STATE, CODES = fp4pass.quantize(X, "nvfp4"), fp4pass.quantize(X, "nf4")
WHOLE = torch.eye(32).expand(2, 32, 32)


def state(**changed: Any) -> fp4pass.QuantState:
    return dataclasses.replace(STATE, **changed)


def codes(**changed: Any) -> CodebookState:
    return dataclasses.replace(CODES, **changed)


def search(**changed: Any) -> None:
    given = {"weight": X, "fmt": STATE.format, "global_scale": 1.0, "objective": "sse"}
    methods.search_scales(**given | changed)


def errors(**changed: Any) -> None:
    given = {"model": convert(), "reference": model(), "batches": [X], "progress": False}
    output_errors(**given | changed)


EYE = torch.eye(16).expand(4, 16, 16)
SKEWED = EYE + torch.ones(16, 16).triu(1)

# (the call, what the message names)
CASES: list[tuple[Callable[[], Any], str]] = [
    # convert, prepare, calibrate, report
    (lambda: fp4pass.convert(None), "model: expected a torch.nn.Module, got NoneType"),
    (lambda: fp4pass.convert("model"), "model: expected"),
    (lambda: fp4pass.convert(nn.Linear), "model: expected a torch.nn.Module, got type"),
    # arguments in another order, or of another call
    (lambda: fp4pass.convert("folder"), "fp4pass.quantize_checkpoint(source, directory)"),
    (lambda: fp4pass.prepare(Path("folder")), "Load the model first: with from_pretrained"),
    (lambda: fp4pass.convert("nvfp4", model()), "Give the model as the first argument"),
    (lambda: fp4pass.calibrate([X], model()), "got list. Give the model as the first argument."),
    (lambda: fp4pass.calibrate("x", [X]), "model: expected a torch.nn.Module, got str"),
    (lambda: fp4pass.save("never", convert()), "got str. Give the model as the first argument."),
    (lambda: fp4pass.load(model()), "call fp4pass.load(directory, model=model)"),
    (lambda: fp4pass.evaluate(None, model(), IDS), "Give the model as the first argument."),
    (lambda: fp4pass.evaluate(model(), "text", None), "fp4pass.evaluate(model, tokenizer, text)"),
    (lambda: fp4pass.quantize(model()), "got Sequential. For a model, call fp4pass.convert(model)"),
    (lambda: fp4pass.quantize("folder"), "fp4pass.quantize_checkpoint(source, directory)"),
    (lambda: fp4pass.quantize_checkpoint(model(), "o"), "in memory, call fp4pass.convert(model)"),
    (lambda: fp4pass.quantize_checkpoint("none", "o"), "Method 'hessian' needs calibration data"),
    (lambda: fp4pass.quantize_checkpoint("none", "o", method="gptq"), "Give batches as data="),
    (lambda: fp4pass.prepare(model(), "nvfp4"), "it is a scheme. Give fmt='nvfp4'."),
    (lambda: fp4pass.prepare(model(), "MXFP4"), "it is a scheme. Give fmt='mxfp4'."),
    (lambda: fp4pass.convert(model(), "gptq"), "it is a method. Give method='gptq'."),
    (lambda: fp4pass.convert(model(), "GPTQ"), "it is a method. Give method='gptq'."),
    (lambda: convert(fmt="fp4"), "Did you mean fmt='nvfp4'?"),
    (lambda: convert(fmt="mx_fp4"), "Did you mean fmt='mxfp4'?"),
    (lambda: convert(fmt="W4A16"), "Did you mean fmt='nvfp4a16'?"),
    (lambda: convert(fmt="nvfp4_a16"), "Did you mean fmt='nvfp4a16'?"),
    (lambda: convert(fmt="NVFP4_DEFAULT_CFG"), "Did you mean fmt='nvfp4'?"),
    (lambda: convert(fmt="NVFP4_MLP_WEIGHT_ONLY_CFG"), "fmt='nvfp4a16'?"),
    (lambda: convert(fmt=4), "fmt: Scheme 4 does not exist"),
    (lambda: convert(fmt="nf4"), "fmt: Scheme 'nf4' does not exist. Did you mean 'nvfp4'"),
    (lambda: convert(fmt=["nvfp4"]), "Scheme ['nvfp4'] does not exist"),
    (lambda: convert(fmt="nvfp4:-16"), "Format 'nvfp4:-16' does not exist"),
    (lambda: convert(rules=[("0", {"fmt": None})]), "fmt: expected the name of a scheme, got None"),
    (lambda: convert(fmt="fp8", block=128), "'fp8' has one scale for a row, and no blocks"),
    (lambda: convert(block=16.0), "block: Format 'nvfp4' has no block of 16.0"),
    (lambda: convert(block="16"), "no block of '16'"),
    (lambda: convert(block=True), "no block of True"),
    (lambda: convert(method=3), "method: expected"),
    (lambda: convert(method=fp4pass.Gptq), "method: expected"),
    (lambda: convert(weight_only="yes"), "weight_only: expected True or False"),
    (lambda: convert(rotation=True), "rotation: expected one of"),
    (lambda: convert(activation_scales=3), "activation_scales 3 does not exist"),
    (lambda: convert(device="cpu"), "device is 'cpu', but layers run"),
    (lambda: convert(metod="sse"), "Option 'metod' does not exist. Did you mean 'method'"),
    (lambda: convert(rules="*"), "rules: expected a list"),
    (lambda: convert(rules=[(3, None)]), "rules: a rule: expected (glob, None)"),
    (lambda: convert(rules=[("0", {"block": "x"})]), "no block of 'x'"),
    (lambda: convert(resume=3), "resume: expected a path"),
    (lambda: convert(resume=["a"]), "resume: expected a path"),
    (lambda: convert(resume="/proc/x"), "resume is /proc/x, which cannot be made"),
    (lambda: fp4pass.prepare(model(), 3), "method: expected"),
    (lambda: fp4pass.prepare(model(), "nvfp4"), "Method 'nvfp4' does not exist"),
    (lambda: calibrate(3), "data: expected batches, texts, chats, rows, token windows"),
    (lambda: calibrate(X), "got a tensor of torch.float32 [4, 64]. Put a single batch"),
    (lambda: calibrate(["a text"]), "tokenizer: expected one for data that is text, got none"),
    (lambda: calibrate([{"a": "x", "b": "y"}]), "data, row 0: expected columns that hold text"),
    (lambda: calibrate([3]), "A batch: expected a mapping"),
    (lambda: calibrate([ARRAY]), "A batch: expected a mapping"),
    (lambda: calibrate([]), "no batches"),
    (lambda: fp4pass.report("x"), "model: expected a torch.nn.Module, got str"),
    (lambda: fp4pass.smooth(None), "model: expected a torch.nn.Module"),
    (lambda: fp4pass.trace(None, X), "model: expected a torch.nn.Module, got NoneType"),
    (lambda: fp4pass.trace(model(), "x"), "example: expected a mapping"),
    (lambda: fp4pass.convert(with_bias(float("nan")), method="sse"), "0: its bias holds NaN"),
    # save and load
    (lambda: save(directory=None), "directory: expected a path"),
    (lambda: save(directory=""), "directory: expected a path"),
    (lambda: save(directory=3), "directory: expected a path"),
    (lambda: save(directory="a\0b"), "directory: expected a path"),
    (lambda: save(directory="/proc/x"), "/proc/x cannot be made"),
    (lambda: save(overwrite="no"), "overwrite: expected True or False, got 'no'"),
    (lambda: save(layout=None), "layout: Layout None does not exist"),
    (lambda: save(max_shard_size="5"), "max_shard_size: expected a size with its unit"),
    (lambda: save(max_shard_size=-1), "max_shard_size: expected"),
    (lambda: save(tokenizer="gpt2"), "tokenizer: expected"),
    (lambda: fp4pass.load(None), "directory: expected a path"),
    (lambda: fp4pass.load(3), "directory: expected a path"),
    (lambda: fp4pass.load("a\0b"), "directory: expected a path"),
    (lambda: transcode("never", None, "bf16"), "never is not a folder"),
    (lambda: fp4pass.QuantState.load(3), "path: expected a path"),
    (lambda: fp4pass.quantize(X, "nvfp4").save(None), "path: expected a path"),
    (lambda: fp4pass.quantize(X, "nvfp4").save("/proc/x"), "/proc/x cannot be written"),
    (lambda: fp4pass.Recipe.read(3), "path: expected a path"),
    # single tensors
    (lambda: fp4pass.quantize(LIST), "quantize: x: expected a torch.Tensor"),
    (lambda: fp4pass.quantize(None), "quantize: x: expected a torch.Tensor"),
    (lambda: fp4pass.quantize(ARRAY), "torch.as_tensor makes one), got ndarray"),
    (lambda: fp4pass.quantize(META), "quantize: x: expected a dense tensor with values, got a"),
    (lambda: fp4pass.quantize(SPARSE, "nvfp4"), "got torch.sparse_coo"),
    (lambda: fp4pass.quantize(X.int()), "expected x of float32"),
    (lambda: fp4pass.quantize(X, 4), "Scheme 4 does not exist"),
    (lambda: fp4pass.quantize(X, "nf4", "x"), "block: expected"),
    (lambda: fp4pass.quantize(X, "nvfp4", 16.0), "no block of 16.0"),
    (lambda: fp4pass.quantize(X, "nvfp4", global_scale=True), "global_scale to be 'auto'"),
    (lambda: fp4pass.quantize(X, "nvfp4", global_scale=[1.0]), "global_scale to be 'auto'"),
    (lambda: fp4pass.dequantize(X), "dequantize: expected what quantize returned"),
    (lambda: fp4pass.dequantize(None), "dequantize: expected"),
    (lambda: quantize_blocks(LIST), "quantize_blocks: weight: expected a torch.Tensor"),
    (lambda: quantize_blocks(META), "quantize_blocks: weight: expected a dense tensor"),
    (lambda: quantize_blocks(BLOCKS, 3), "Format 3 does not exist"),
    (lambda: quantize_blocks(BLOCKS, objective=None), "Objective None does not exist"),
    (lambda: quantize_blocks(BLOCKS, dim="x"), "expected dim to be a dimension"),
    (lambda: quantize_blocks(BLOCKS, dim=-1.0), "expected dim to be a dimension"),
    (lambda: quantize_blocks(BLOCKS, global_scale=[]), "expected global_scale to be 'auto'"),
    (lambda: with_hessian(LIST), "block_hessian: expected a torch.Tensor"),
    (lambda: with_hessian(SKEWED), "block_hessian: expected sums of a a^T"),
    (lambda: with_hessian(-EYE), "got negative eigenvalues"),
    (lambda: with_hessian(None, inputs=LIST), "inputs: expected a torch.Tensor"),
    (lambda: error_metrics(X, None), "error_metrics: dequantized: expected a torch.Tensor"),
    (lambda: error_metrics(META, X), "error_metrics: weight: expected a dense tensor"),
    (lambda: error_metrics(X, X, LIST), "error_metrics: inputs: expected a torch.Tensor"),
    (lambda: global_scale_for(LIST), "global_scale_for: weight: expected a torch.Tensor"),
    (lambda: global_scale_for(X[:0]), "expected a weight with elements"),
    # fp4pass.parity
    (lambda: Linear4bit(0, 2), "in_features: expected a whole number, at least 1, got 0"),
    (lambda: Linear4bit("a", 2), "in_features: expected a whole number"),
    (lambda: Linear4bit(64, 2.5), "out_features: expected a whole number"),
    (lambda: Linear4bit(64, 2, compute_dtype="bf16"), "compute_dtype: expected one of"),
    (lambda: Linear4bit(64, 2, quant_type=None), "quant_type None does not exist"),
    (lambda: Linear4bit.from_linear(None), "Expected an nn.Linear, got NoneType"),
    (lambda: Linear8bitLt(-1, 2), "in_features: expected a whole number"),
    (lambda: Linear8bitLt(8, 2, threshold="x"), "threshold: expected 0"),
    (lambda: Linear8bitLt(8, 2, threshold=None), "threshold: expected 0"),
    (lambda: swap(3), "model: expected a torch.nn.Module, got int"),
    (lambda: swap(model(), 3), "kind 3 does not exist"),
    (lambda: swap(model(), include=3), "include: expected a glob"),
    (lambda: swap(model(), exclude=None), "exclude: expected a glob"),
    (lambda: swap(model(), "int8", threshold="x"), "threshold: expected 0"),
    (lambda: swap(model(), "nf4", threshold=3.0), "threshold: expected none for kind 'nf4'"),
    # evaluate
    (lambda: fp4pass.evaluate(None, None, IDS), "model: expected a torch.nn.Module"),
    (lambda: evaluate(None), "The text: expected a string, or an integer tensor"),
    (lambda: evaluate("abc"), "tokenizer: expected one"),
    (lambda: fp4pass.evaluate(model(), 3, "abc"), "tokenizer: expected one"),
    (lambda: evaluate(window="x"), "window: expected at least 2"),
    (lambda: evaluate(stride=1.5), "stride: expected 1 to 4"),
    (lambda: evaluate(windows="x"), "windows: expected at least 1"),
    (lambda: evaluate(batch_size="x"), "batch_size: expected at least 1"),
    (lambda: evaluate(top_p="x"), "top_p: expected a number"),
    # options
    (lambda: fp4pass.Gptq(damping="x"), "damping: expected a number above 0"),
    (lambda: fp4pass.Hessian(codes="x"), "codes 'x' does not exist"),
    (lambda: fp4pass.LinearConfig(weight_only=1), "weight_only: expected True or False"),
    # records, and where they are
    (lambda: STATE.to("x"), "device=x cannot be used"),
    (lambda: STATE.to("cuda:99"), "device=cuda:99 cannot be used"),
    (lambda: STATE.to(3.5), "device: expected a device such as 'cuda:0', got 3.5"),
    (lambda: STATE.to(None), "device: expected a device"),
    (lambda: STATE.to(torch.float16), "device: expected a device"),
    (lambda: CODES.to("x"), "device=x cannot be used"),
    (lambda: load_state(3), "path: expected a path"),
    (lambda: state(qdata=None), "QuantState.qdata: expected a torch.Tensor, got None"),
    (lambda: state(qdata=LIST), "QuantState.qdata: expected a torch.Tensor, got list"),
    (lambda: state(scale=None), "QuantState.scale: expected a torch.Tensor"),
    (lambda: state(format="nvfp4"), "QuantState.format: expected a Format, got 'nvfp4'"),
    (lambda: state(shape=64), "QuantState.shape: expected a tuple of sizes, got 64"),
    (lambda: state(shape=("a", 64)), "QuantState.shape: expected a tuple of sizes, got 'a'"),
    (lambda: state(global_scale="x"), "QuantState.global_scale: expected a positive number"),
    (lambda: state(global_scale=float("nan")), "QuantState.global_scale: expected a positive"),
    (lambda: state(global_scale=True), "QuantState.global_scale: expected a positive number"),
    (lambda: state(dtype="bf16"), "QuantState.dtype: expected a floating-point dtype, got 'bf16'"),
    (lambda: state(dtype=torch.int8), "QuantState.dtype: expected a floating-point dtype"),
    (lambda: codes(codebook="nf4"), "CodebookState.codebook: expected a Codebook, got 'nf4'"),
    (lambda: codes(codebook=STATE.format), "CodebookState.codebook: expected a Codebook"),
    (lambda: codes(qdata=None), "CodebookState.qdata: expected a torch.Tensor"),
    # learned values, and the names of other libraries
    (lambda: codebook_quantize(BLOCKS, levels="x"), "levels: expected 1 to 127 magnitudes"),
    (lambda: codebook_quantize(BLOCKS, tolerance="x"), "tolerance: expected a number between"),
    (lambda: learn_codebook(X, levels=7.5), "levels: expected 1 to 127 magnitudes"),
    (lambda: learn_codebook(X, points="x"), "points: expected a whole number, got 'x'"),
    (lambda: learn_codebook(X, name=3), "name: expected a string, got 3"),
    (lambda: bitsandbytes.dequantize_4bit(X, None), "quant_state: expected what quantize_4bit"),
    (lambda: bitsandbytes.dequantize_4bit(None, CODES), "A: expected a torch.Tensor, got None"),
    (lambda: qwantize.fp4_unpack(LIST), "packed: expected a torch.Tensor, got list"),
    (lambda: qwantize.snap_to_table(LIST, X[0]), "snap_to_table: x: expected a torch.Tensor"),
    (lambda: qwantize.snap_to_table(X, LIST), "sorted_table: expected a torch.Tensor"),
    (lambda: qwantize.build_ue4m4_scales("x"), "device=x cannot be used"),
    (lambda: qwantize.nvfp4_dequantize(None, X), "nvfp4_dequantize: scales: expected"),
    (lambda: qwantize.int8_dequantize(X, None), "int8_dequantize: quants: expected"),
    # layers, once more
    (lambda: Linear4bit(64, 64, device="x"), "device=x cannot be used"),
    (lambda: Linear4bit(64, 64, dtype="bf16"), "dtype: expected one of"),
    (lambda: Linear4bit(64, 64, dtype=torch.int8), "dtype: expected one of"),
    (lambda: Linear8bitLt(64, 64, device=3.5), "device: expected a device"),
    (lambda: Linear8bitLt(64, 64, dtype="x"), "dtype: expected one of"),
    (lambda: Linear8bitLt(8, 2, threshold=True), "threshold: expected 0"),
    # the flow, once more
    (lambda: fp4pass.prepare(model(), sequential="yes"), "sequential: expected True or False"),
    (lambda: calibrate([{3: X}]), "A batch: expected a mapping from names of arguments"),
    (lambda: fp4pass.Report(3), "Report: rows: expected a tuple of rows, got 3"),
    (lambda: fp4pass.Report.from_dict(None), "Report: data: expected what Report.to_dict"),
    (lambda: fp4pass.Report.from_dict({}), "Report: rows: expected a list of rows, got None"),
    (lambda: fp4pass.Recipe("x"), "config: expected a LinearConfig, got 'x'"),
    (lambda: fp4pass.Recipe().override(3), "options: expected a mapping of options, got 3"),
    (lambda: fp4pass.LinearConfig().override({"x": 1}), "Option 'x' does not exist"),
    (lambda: fp4pass.LinearConfig().override(None), "options: expected a mapping"),
    (lambda: fp4pass.LinearConfig.from_dict(None), "LinearConfig: expected what to_dict returned"),
    (lambda: fp4pass.Gptq(damping=True), "Gptq: damping: expected a number above 0, got True"),
    (lambda: fp4pass.quantize(X, method="hessian"), "method 'hessian' needs calibration"),
    (lambda: save(max_shard_size=1.5), "max_shard_size: expected a size such as '5GB'"),
    (lambda: register_layout(3), "register_layout: cls: expected a subclass of Layout, got 3"),
    (lambda: register_layout(int), "register_layout: cls: expected a subclass of Layout"),
    # methods
    (lambda: methods.method_from_dict(3), "method: expected a mapping with a name, got 3"),
    (lambda: search(fmt="nvfp4"), "fmt: expected a Format, got 'nvfp4'"),
    (lambda: search(weight=None), "weight: expected a torch.Tensor, got None"),
    (lambda: search(global_scale="x"), "global_scale: expected a positive number, got 'x'"),
    (lambda: search(global_scale=0.0), "global_scale: expected a positive number, got 0.0"),
    (lambda: search(global_scale=float("nan")), "global_scale: expected a positive number"),
    (lambda: search(global_scale=torch.ones(2)), "global_scale: expected a positive number"),
    (lambda: methods.certify(X, None, WHOLE), "state: expected a QuantState, got None"),
    (lambda: methods.certify(None, STATE, WHOLE), "weight: expected a torch.Tensor"),
    (lambda: methods.certify(X[:2], STATE, WHOLE), "weight: expected the shape of state, (4, 64)"),
    (lambda: methods.certify(X, STATE, WHOLE, "x"), "node_budget: expected 1, 2, ..."),
    # evaluation, once more
    (lambda: evaluate(confidence="x"), "confidence: expected a number between 0 and 1"),
    (lambda: evaluate(resamples="x"), "resamples: expected at least 1"),
    (lambda: errors(batches=X), "batches: expected an iterable of batches, got Tensor"),
    (lambda: errors(batches=None), "batches: expected an iterable of batches, got NoneType"),
    (lambda: errors(reference=nn.Sequential(nn.Linear(8, 8))), "of this name and shape"),
    (lambda: errors(activations="x"), "activations: expected True or False"),
    (lambda: errors(progress="no"), "progress: expected True or False, got 'no'"),
    (lambda: evaluate(progress="no"), "progress: expected True or False, got 'no'"),
    (lambda: evaluate(within_documents=1), "within_documents: expected True or False, got 1"),
    (lambda: calibrate([X], progress="no"), "progress: expected True or False, got 'no'"),
    (lambda: calibrate([X], progress=None), "progress: expected True or False, got None"),
    (lambda: with_hessian(EYE, inputs=X), "expected inputs or block_hessian, got both"),
    # reports
    (lambda: write_report(path="p.pdf"), "path: expected a name that ends in .html, got p.pdf"),
    (lambda: write_report(path="/proc/x/p.html"), "/proc/x/p.html cannot be written"),
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
        ({"nothing": "cpu"}, "device_map: expected names of modules, got 'nothing'"),
        ({"": "cpu", "1": "cpu"}, "expected names of modules"),
        ({}, "device_map: expected a place for 0."),
        ({"0": "x"}, "device_map: expected a device"),
        ({"": None}, "device_map: expected a device for '', got None"),
        ({"": "auto"}, "device_map: expected a device for '', got 'auto'"),
        ({"0": "disc"}, "device_map: expected a device such as 'cuda:0', one of"),
        ({"0": {}}, "device_map: expected a device for '0', got {}"),
        (3.5, "device_map: expected a device"),
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
    found: Tensor = quantize_blocks(BLOCKS, dim=np.int64(2)).dequantize()
    assert torch.equal(found, quantize_blocks(BLOCKS).dequantize())
    assert fp4pass.quantize(X, "nvfp4", size).format.block == 16
    assert Linear4bit(size, size).in_features == 16
