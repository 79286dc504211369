"""The numbers of a report, against those of the library."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import EVAL
from small_models import TINY, converted, language_model, linears
from torch import nn

import fp4pass
from fp4pass.checkpoint.reader import open_checkpoint
from fp4pass.core.formats import get_format
from fp4pass.core.quant_state import QuantState
from fp4pass.methods.search import scale_counts

for package in ("transformers", "jinja2"):
    pytest.importorskip(package)
reporting = pytest.importorskip("fp4pass.reporting")
layer_maps = pytest.importorskip("fp4pass.reporting.data").layer_maps

pytestmark = pytest.mark.usefixtures("offline")


def gather(source: Any, **options: Any) -> dict[str, Any]:
    return reporting.gather(source, progress=False, **options)


class Block(nn.Module):
    """A layer with a projection that cannot be converted, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.odd = nn.Linear(5, 64)
        self.experts = nn.ModuleList(nn.ModuleDict({"down": nn.Linear(64, 32)}) for _ in range(3))


class Stack(nn.Module):
    """Two stacks of different projections, and a linear outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(11))
        self.head = nn.Linear(32, 32)


def stack() -> Stack:
    torch.manual_seed(0)
    rules = [("*.experts.1.*", None), ("encoder.1.experts.*", None), ("head", {"fmt": "mxfp4"})]
    return fp4pass.convert(Stack().eval(), method="sse", weight_only=True, rules=rules)


@pytest.mark.parametrize("name", ["mixed", "inputs"])
def test_a_folder_is_what_its_report_says(folders: Path, name: str) -> None:
    data, stored = gather(folders / name), open_checkpoint(folders / name)
    report = fp4pass.report(fp4pass.load(folders / name))
    for row, layer in zip(report.rows, data["layers"], strict=True):
        for key in ("name", "bits", "weight_error", "output_error", "tokens", "skip_reason"):
            assert layer[key] == getattr(row, key), key
        assert layer["shape"] == list(row.shape)
        assert ("fmt" in layer) == (row.config is not None) == bool(layer["legend"])
        if row.config is not None:
            # Every field, also those that are to come.
            fields = {**row.config.to_dict(), "method": row.config.method_name}
            assert {key: layer[key] for key in fields} == fields
    summary, sizes = data["summary"], data["sizes"]
    assert summary["layers"] == len(report.converted)
    assert summary["skipped"] == len(report.skipped)
    tensors = [tensor for _, tensor in stored.tensors()]
    assert summary["bytes"] == sum(part["bytes"] for part in sizes)
    assert summary["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert data["layout"] == stored.layout.name and data["versions"] == stored.versions
    assert data["calibration"] == stored.recipe.get("calibration")
    assert len(data["recipe"]["rules"]) == (2 if name == "mixed" else 0)
    blocks = sum(math.prod(r.shape) // r.config.block for r in report.converted if r.config)
    assert sum(row["blocks"] for row in data["scales"]) == blocks


def test_a_model_in_memory_is_its_folder(folders: Path) -> None:
    folder, model = gather(folders / "mixed", name="x"), fp4pass.load(folders / "mixed")
    memory = gather(model, name="x")
    assert memory.pop("layout") == "in memory" and folder.pop("layout") == "compressed-tensors"
    assert memory == folder


def test_scales_and_offsets_are_those_of_the_layers(folders: Path) -> None:
    data = gather(folders / "mixed", reference=TINY)
    stored = open_checkpoint(folders / "mixed")
    counts: dict[str, dict[float, int]] = {}
    for name, layer in linears(fp4pass.load(folders / "mixed")).items():
        divisor, fmt = layer.weight_global_scale, layer.config.format
        state = QuantState(
            layer.weight_packed,
            layer.weight_scale.view(torch.uint8),
            1.0 if divisor is None else 1.0 / divisor.item(),
            fmt,
            stored.layers[name].shape,
        )
        total = counts.setdefault(fmt.key, {})
        for value, count in scale_counts(state, fmt).items():
            total[value] = total.get(value, 0) + count
    assert len(counts) == 2
    for row in data["scales"]:
        assert {e["value"]: e["blocks"] for e in row["counts"]} == counts[row["format"]]
        assert row["possible"] == len(get_format(row["format"]).scale.values)
    # A model and its folder are one original.
    assert gather(folders / "mixed", reference=language_model(), reference_name=str(TINY)) == data


def test_sizes_before(folders: Path) -> None:
    dense = sum(p.numel() * p.itemsize for p in language_model().parameters())
    wide = language_model(dtype=torch.float32)
    for reference, before in ((None, dense), (wide, 2 * dense)):
        summary = gather(folders / "mixed", reference=reference)["summary"]
        assert summary["bytes_before"] == before
        assert summary["share"] == summary["bytes"] / before


def test_a_folder_of_another_library(folders: Path) -> None:
    data = gather(folders / "theirs")
    assert data["recipe"] is None and data["summary"]["weight_error"] is None
    assert "Another library quantized this model" in data["unknown"][0]
    # The original tells the weight errors that fp4pass would have reported.
    known = gather(folders / "theirs", reference=TINY)
    reported = {
        row.name: row.weight_error for row in fp4pass.report(fp4pass.load(folders / "inputs")).rows
    }
    for row in known["layers"]:
        assert row["weight_error"] == pytest.approx(reported[row["name"]], rel=1e-6)
    assert known["summary"]["output_error"] is None


@pytest.mark.core
def test_places_of_layers() -> None:
    data = gather(stack())
    encoder, decoder = data["maps"]
    assert encoder["stack"] == "encoder" and encoder["depths"] == [0, 1]
    assert encoder["projections"] == ["up", "odd", "experts.*.down"]
    # Not in the order of the letters.
    assert decoder["depths"] == list(range(11)) and decoder["projections"] == ["up"]
    up, odd, experts = encoder["cells"][0]
    names = [data["layers"][index]["name"] for index in experts["layers"]]
    assert names == [f"encoder.0.experts.{i}.down" for i in range(3)]
    assert experts["converted"] == 2 and "rule" in experts["skip_reason"]
    errors = [data["layers"][index]["weight_error"] for index in experts["layers"][::2]]
    assert experts["weight_error"] == sum(errors) / 2
    assert odd["converted"] == 0 and odd["weight_error"] is None and odd["skip_reason"]
    assert encoder["cells"][1][2]["converted"] == 0
    assert [data["layers"][index]["name"] for index in data["outside"]] == ["head"]
    assert up["weight_error"] == data["layers"][up["layers"][0]]["weight_error"]


def test_projections_have_the_order_of_the_fullest_layer() -> None:
    """Not of the first, which may lack some, as dense layers before a mixture do."""
    facts = {"stack": "s", "weight_error": None, "output_error": None, "skip_reason": "rule"}
    places = [(0, "up"), (1, "q"), (1, "up"), (1, "down")]
    (found,) = layer_maps([{**facts, "depth": d, "projection": name} for d, name in places])
    assert found["projections"] == ["q", "up", "down"]
    assert [[cell and cell["layers"] for cell in row] for row in found["cells"]] == [
        [None, [0], None],
        [[1], [2], [3]],
    ]


def test_evaluations_are_those_of_the_library() -> None:
    from transformers import AutoTokenizer

    model, original = converted(), language_model()
    tokenizer, text = AutoTokenizer.from_pretrained(TINY), EVAL.read_text()
    options: dict[str, Any] = {"window": 64, "windows": 2, "progress": False}
    before = fp4pass.evaluate(original, tokenizer, text, **options)
    found = fp4pass.evaluate(model, tokenizer, text, original, **options)
    row = found.row("eval.txt", before)
    data = gather(model, evaluations=[row])
    (kept,) = data["evaluations"]
    assert kept["kl"] == found.kl and kept["perplexity"] == found.perplexity
    assert kept["intervals"]["kl"] == list(found.intervals["kl"])
    assert kept["reference_intervals"]["perplexity"] == list(before.intervals["perplexity"])
    ratio = found.difference(before).perplexity_ratio
    assert kept["difference"]["perplexity_ratio"]["value"] == ratio.value
    for alone, compared in ((found, True), (before, False)):
        said = " ".join(gather(model, evaluations=[alone.row("eval.txt")])["unknown"])
        assert ("The original was not evaluated" in said) is not compared


@pytest.mark.core
def test_what_is_not_finite_is_no_number() -> None:
    row = {"text": "t", "windows": 1, "tokens": 5, "unit": "window", "units": 1, "intervals": {}}
    row |= {"confidence": 0.95, "perplexity": 3.0, "kl": math.inf, "reference_perplexity": 2.0}
    data = gather(converted(), evaluations=[row])
    assert data["evaluations"][0]["kl"] is None
    assert json.loads(json.dumps(data, allow_nan=False)) == data
