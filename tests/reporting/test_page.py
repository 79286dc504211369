"""The report page: its numbers against the library's, its files, and what it says of others."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import EVAL, run_json
from small_models import TINY, converted, language_model, linears
from torch import nn

import fp4pass
from fp4pass.checkpoint.reader import open_checkpoint
from fp4pass.core.formats import get_format
from fp4pass.core.quant_state import QuantState
from fp4pass.errors import CheckpointError, OptionError, StateError
from fp4pass.quantization.scale_stats import scale_counts, scale_offsets

for package in ("transformers", "typer", "jinja2", "matplotlib"):
    pytest.importorskip(package)
page = pytest.importorskip("fp4pass.reporting")
render = pytest.importorskip("fp4pass.reporting.render").render
shapes = pytest.importorskip("fp4pass.reporting.shapes")

pytestmark = pytest.mark.usefixtures("offline")


def gather(source: Any, **options: Any) -> dict[str, Any]:
    return page.gather(source, progress=False, **options)


def foreign(folder: Path, target: Path) -> Path:
    """The same weights as a folder that another library wrote."""
    shutil.copytree(folder, target)
    (target / "fp4pass.json").unlink()
    return target


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


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


# ---- the numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed", "inputs"])
def test_a_folder_is_what_inspect_says(made: Path, name: str) -> None:
    data, found = gather(made / name), run_json("inspect", made / name)
    assert data["layout"] == found["layout"] and data["architecture"] == found["architecture"]
    rows = [row for row in data["layers"] if not row["reason"]]
    for row, wanted in zip(rows, found["layers"], strict=True):
        assert {key: row[key] for key in wanted} == wanted
    assert {r["name"]: r["reason"] for r in data["layers"] if r["reason"]} == found["left_alone"]
    assert data["summary"]["bytes"] == sum(found["sizes"].values())
    assert data["summary"]["layers"] == len(found["layers"])
    for kind in ("packed codes", "block scales", "global scales", "embeddings"):
        sizes = {part["kind"]: part["bytes"] for part in data["sizes"]}
        assert sizes[kind] == found["sizes"][kind]
    assert data["recipe"]["rules"] == found["recipe"]["rules"]
    assert data["recipe"]["calibration"] == found["calibration"]
    assert data["versions"] == found["versions"]
    by_kind: dict[str, int] = {}
    for row in data["scales"]:
        by_kind[row["scale"]] = by_kind.get(row["scale"], 0) + row["blocks"]
        assert sum(each["blocks"] for each in row["counts"]) == row["blocks"]
        assert math.isclose(sum(each["share"] for each in row["counts"]), 1.0)
    assert by_kind == {kind: each["count"] for kind, each in found["scales"].items()}


def test_a_model_in_memory_is_its_folder(made: Path) -> None:
    folder, model = gather(made / "mixed", name="x"), fp4pass.load(made / "mixed")
    memory = gather(model, name="x")
    assert memory.pop("layout") == "in memory" and folder.pop("layout") == "compressed-tensors"
    assert memory.pop("versions")["torch"] == folder.pop("versions")["torch"]
    assert memory == folder


def test_scales_and_offsets_are_those_of_the_layers(made: Path) -> None:
    data = gather(made / "mixed", reference=TINY)
    original, stored = language_model(), open_checkpoint(made / "mixed")
    counts: dict[str, dict[float, int]] = {}
    offsets: dict[str, dict[int, int]] = {}
    for name, layer in linears(fp4pass.load(made / "mixed")).items():
        divisor = layer.weight_global_scale
        state = QuantState(
            layer.weight_packed,
            layer.weight_scale.view(torch.uint8),
            1.0 if divisor is None else 1.0 / divisor.item(),
            layer.format,
            stored.layers[name].shape,
        )
        weight = original.get_submodule(name).weight
        for total, found in (
            (counts.setdefault(layer.format_key, {}), scale_counts(state, layer.format)),
            (offsets.setdefault(layer.format_key, {}), scale_offsets(weight, state)),
        ):
            for key, count in found.items():
                total[key] = total.get(key, 0) + count
    assert len(counts) == 2
    for row in data["scales"]:
        assert {e["value"]: e["blocks"] for e in row["counts"]} == counts[row["format"]]
        assert row["possible"] == len(get_format(row["format"]).scale.values)
    for row in data["offsets"]:
        assert {e["offset"]: e["blocks"] for e in row["counts"]} == offsets[row["format"]]
        assert row["method"] == "sse" and 0 < row["other"] < 1
    # A model and its folder are one original.
    assert gather(made / "mixed", reference=original, reference_name=str(TINY)) == data


def test_naive_is_no_step_from_naive() -> None:
    data = gather(converted(), reference=language_model())
    (row,) = data["offsets"]
    assert row["counts"] == [{"offset": 0, "blocks": row["blocks"], "share": 1.0}]
    assert row["other"] == 0


def test_sizes_before(made: Path) -> None:
    dense = sum(p.numel() * p.itemsize for p in language_model().parameters())
    for reference in (None, TINY):
        summary = gather(made / "mixed", reference=reference)["summary"]
        assert summary["bytes_before"] == dense
        assert summary["share"] == summary["bytes"] / dense
        assert summary["parameters"] == 3_672_832


def test_a_folder_of_another_library(made: Path, tmp_path: Path) -> None:
    data = gather(foreign(made / "inputs", tmp_path / "theirs"))
    assert data["recipe"] is None and data["ranges"]["weight_error"] is None
    assert "Another library quantized this model" in data["unknown"][0]
    text = render(data)
    assert "The recipe is not known." in text and "Cells show what is packed." in text
    # The original tells the weight errors that fp4pass would have reported.
    known = gather(tmp_path / "theirs", reference=TINY)
    reported = {
        row.name: row.weight_error for row in fp4pass.report(fp4pass.load(made / "inputs")).rows
    }
    for row in known["layers"]:
        assert row["weight_error"] == pytest.approx(reported[row["name"]], rel=1e-6)
    assert known["summary"]["output_error"] is None and known["offsets"]


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
    assert experts["converted"] == 2 and "rule" in experts["reason"]
    errors = [data["layers"][index]["weight_error"] for index in experts["layers"][::2]]
    assert experts["weight_error"] == sum(errors) / 2
    assert odd["converted"] == 0 and odd["weight_error"] is None and odd["reason"]
    assert encoder["cells"][1][2]["converted"] == 0
    assert [data["layers"][index]["name"] for index in data["outside"]] == ["head"]
    assert up["weight_error"] == data["layers"][up["layers"][0]]["weight_error"]


def test_a_model_without_depth() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    data = gather(fp4pass.convert(model.eval(), method="sse", weight_only=True))
    assert data["maps"] == [] and len(data["outside"]) == 2
    assert "No linear has a number in its name that is a depth" in render(data)


def test_evaluations_are_those_of_the_library() -> None:
    from transformers import AutoTokenizer

    model, original = converted(), language_model()
    tokenizer, text = AutoTokenizer.from_pretrained(TINY), EVAL.read_text()
    options: dict[str, Any] = {"window": 64, "windows": 4, "progress": False}
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
    text = render(data)
    assert f"{found.perplexity:.4f}" in text and f"{found.kl:.5f}" in text
    for alone, compared in ((found, True), (before, False)):
        said = " ".join(gather(model, evaluations=[alone.row("eval.txt")])["unknown"])
        assert ("No original was evaluated" in said) is not compared


def test_what_is_not_finite_is_no_number() -> None:
    row = {"text": "t", "windows": 1, "tokens": 5, "unit": "window", "units": 1, "intervals": {}}
    row |= {"confidence": 0.95, "perplexity": 3.0, "kl": math.inf, "reference_perplexity": 2.0}
    data = gather(converted(), evaluations=[row])
    assert data["evaluations"][0]["kl"] is None
    assert all(map(math.isfinite, numbers(data)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert "no intervals over one window" in render(data)


# ---- charts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(0, 1), (0.0817, 0.0839), (0, 0.004), (316, 433), (-3, 17)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    for most in (4, 5, 7):
        found = shapes.ticks(low, high, most)
        assert 2 <= len(found) <= most and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
        steps = {round(b - a, 12) for a, b in itertools.pairwise(found)}
        assert len(steps) == 1
        assert f"{steps.pop():e}"[0] in "125"


def test_marks_lie_inside_of_their_charts(made: Path) -> None:
    data = gather(made / "mixed", reference=TINY)
    charts = [shapes.bits_chart(data, "weight_error", "x")]
    charts += [shapes.scales_chart(data, i) for i in range(len(data["scales"]))]
    charts += [shapes.offsets_chart(data, i) for i in range(len(data["offsets"]))]
    for chart in charts:
        assert chart.marks
        for mark in chart.marks:
            assert chart.left - 1 <= mark.x and mark.x + mark.width <= chart.right + 1
            assert chart.top <= mark.y and mark.y + mark.height <= chart.bottom + 0.01
        for tick in chart.x_ticks:
            assert chart.left <= tick.at <= chart.right
    bars = charts[1].marks
    assert max(bar.height for bar in bars) / min(bar.height for bar in bars) > 10


def test_colours_go_from_the_smallest_to_the_largest() -> None:
    steps = [shapes.heat_step(value / 100, (0.2, 0.8)) for value in range(20, 81)]
    assert steps == sorted(steps) and set(steps) == set(range(shapes.STEPS))
    assert shapes.heat_step(0.5, (0.5, 0.5)) == shapes.STEPS // 2


def test_names_are_as_short_as_they_can_be() -> None:
    names = ["attn.q_proj", "attn.proj", "mlp.proj", "x.mlp.up"]
    assert shapes.short_names(names) == ["q_proj", "attn.proj", "mlp.proj", "up"]


# ---- the files ----------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_a_page(made: Path, tmp_path: Path) -> None:
    data = page.write_report(made / "mixed", tmp_path / "r.html", reference=TINY, progress=False)
    assert files(tmp_path) == [
        *("r-bits.png", "r-layers.png", "r-offsets.png", "r-scales.png", "r.html", "r.json")
    ]
    assert json.loads((tmp_path / "r.json").read_text()) == data
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OptionError, match=r"r\.html.* exists\. Choose another name.*--overwrite"):
        page.write_report(made / "mixed", tmp_path / "r.html", progress=False)
    options: dict[str, Any] = {"overwrite": True, "progress": False}
    page.write_report(made / "mixed", tmp_path / "r.html", reference=TINY, **options)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    # Pictures of which there are none now would tell of another model.
    page.write_report(made / "mixed", tmp_path / "r.html", **options)
    assert files(tmp_path) == ["r-bits.png", "r-layers.png", "r-scales.png", "r.html", "r.json"]


def test_a_page_that_fails_leaves_what_was_there(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_report(made / "mixed", tmp_path / "r.html", progress=False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4pass.reporting.write.draw", stop)
    with pytest.raises(KeyboardInterrupt):
        page.write_report(made / "inputs", tmp_path / "r.html", overwrite=True, progress=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_names_are_text_and_not_markup() -> None:
    data = gather(converted(), name="<img src=x onerror=alert(1)></script>")
    text = render(data)
    assert "<img" not in text and text.count("</script>") == 2


def test_a_page_asks_nobody_for_anything(made: Path) -> None:
    text = render(gather(made / "mixed"))
    assert "://" not in text and "default-src 'none'" in text and "@import" not in text


def test_errors_say_what_to_do(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match=r"not converted.*Call fp4pass\.convert"):
        gather(language_model())
    with pytest.raises(CheckpointError, match="not quantized"):
        gather(TINY)
    with pytest.raises(CheckpointError, match="is not a folder"):
        gather(made / "mixed", reference=tmp_path / "nothing")
    with pytest.raises(OptionError, match=r"has none of the layers.*Give the float model"):
        gather(made / "mixed", reference=nn.Linear(3, 3), reference_name="other")
    other = language_model()
    other.model.layers[1].mlp.up_proj = nn.Linear(256, 64)
    with pytest.raises(CheckpointError, match=r"up_proj is \(64, 256\) in the reference"):
        gather(made / "mixed", reference=other)
    with pytest.raises(OptionError, match=r"ends in \.html is wanted"):
        page.write_report(made / "mixed", tmp_path / "report")
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OptionError, match="is a folder"):
        page.write_report(made / "mixed", tmp_path / "r.html", overwrite=True)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(OptionError, match=r"pip install 'fp4pass\[docs\]'.*--no-png"):
            page.write_report(made / "mixed", tmp_path / "s.html")
    page.write_report(made / "mixed", tmp_path / "s.html", pictures=False, progress=False)
    assert files(tmp_path) == ["r.html", "s.html", "s.json"]
