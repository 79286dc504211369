"""Errors of single layers, in float64 and by hand, and the command that makes tables of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from blocks import ALL, VARIANTS
from eval.rows import run
from small_models import TINY, language_model
from torch import Tensor, nn

import fp4pass
from fp4pass import ops
from fp4pass.core.formats import Format, get_format
from fp4pass.core.packing import unpack_codes
from fp4pass.evaluation import output_errors, token_windows
from fp4pass.methods import METHODS
from fp4pass.methods.scale_stats import scale_offsets
from fp4pass.observers.observer import Observer, collect

# A global scale, none, and a block that is too large for Hessians.
SOME = ("nvfp4", "mxfp4:16", "int8:128")
FORMATS_TRIED = [
    pytest.param(SOME, id="some"),
    pytest.param(tuple(fmt.key for fmt in ALL), id="all", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def scripts(script: Any) -> Any:
    """eval/layer_error.py, which imports its neighbours."""
    pytest.importorskip("transformers")
    return script("layer_error")


def plan(scripts: Any, *names: str) -> Any:
    formats = [get_format(name) for name in names]
    return scripts.Plan(formats, list(METHODS.values()), repeats=1)


def small(columns: int = 64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 64), nn.SiLU(), nn.Linear(64, 32, bias=False))
    with torch.no_grad():
        model[0].weight[::5] *= 6
    return model


def inputs(seed: int, columns: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 50, columns, generator=generator)
    return list(x + torch.randn(4, 50, 8, generator=generator) @ mixing)


def measure(scripts: Any, model: nn.Module, plan: Any, *options: Any) -> tuple[list, list]:
    """Rows, and what is left out."""
    columns = next(model.parameters()).shape[1]
    batches = inputs(1, columns), inputs(2, columns)
    found = list(scripts.measure_model(model, *batches, plan, *options))
    rows = [each for each in found if isinstance(each, scripts.Row)]
    return rows, [each for each in found if isinstance(each, scripts.LeftOut)]


def untimed(rows: list[Any]) -> list[Any]:
    return [dataclasses.replace(row, seconds=0.0) for row in rows]


def decode(packed: Tensor, scale: Tensor, fmt: Format, global_scale: float) -> Tensor:
    """What codes and scale bits stand for, in float64 from the tables of the format."""
    elements = torch.tensor(fmt.element.values, dtype=torch.float64)
    scales = torch.tensor([0.0, *fmt.scale.values], dtype=torch.float64) * global_scale
    codes = unpack_codes(packed, fmt.element.bits).long()
    return elements[codes] * scales[scale.long()].repeat_interleave(fmt.block, dim=-1)


@pytest.mark.parametrize("formats", FORMATS_TRIED)
@torch.no_grad()
def test_errors_are_those_of_float64(scripts: Any, formats: tuple[str, ...]) -> None:
    model = small(256)
    tried = plan(scripts, *formats)
    rows, left_out = measure(scripts, model, tried, ["0"])
    assert len(rows) + len(left_out) == len(formats) * len(METHODS) and left_out == tried.left_out
    assert {each.reason for each in left_out} == {"Hessians are of blocks of 32 columns"}
    weight, x = model[0].weight, torch.cat(inputs(2, 256))
    observer = Observer(tried.needs, 256)
    for batch in inputs(1, 256):
        observer(batch)
    stats = collect([observer], "0").matrix(0)
    hessian = oracle.block_hessians(stats.block_hessian, 256, 32)
    for row in rows:
        fmt, method = get_format(row.format, row.block), METHODS[row.method]
        g, gx = map(fmt.global_scale_for, (weight.abs().max().item(), stats.input_amax))
        state = method.function(weight, stats, fmt, g, method.options())
        quantized = decode(*sys.modules["layer_measure"].stored(state)[:2], fmt, g)
        divisor = torch.tensor([1 / gx]) if fmt.has_global_scale else None
        rounded = decode(*ops.quantize(x, divisor, fmt.key), fmt, gx)
        y = x.double() @ weight.double().T
        lost = weight.double() - quantized
        wanted = {
            "weight_error": lost.norm() / weight.double().norm(),
            "output_error": (x.double() @ lost.T).norm() / y.norm(),
            "w4a4_error": (y - rounded @ quantized.T).norm() / y.norm(),
            "predicted_error": (energy(lost, hessian) / energy(weight, hessian)).sqrt(),
        }
        for name, value in wanted.items():
            assert getattr(row, name) == pytest.approx(value.item(), rel=1e-5), (row, name)
        assert row.bits == pytest.approx(fmt.bits_per_weight, abs=32 / weight.numel())
        assert row.offsets == scale_offsets(weight, state)
        assert (row.calibration_tokens, row.heldout_tokens) == (200, 200)
        assert row.shape == (64, 256) and row.seconds > 0


def energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """tr W H W^T for the block diagonal H [J, 32, 32]."""
    return oracle.errors(weight.double().view(1, len(weight), -1, 32), hessian).sum()


@pytest.mark.parametrize("formats", FORMATS_TRIED)
def test_the_best_of_a_calibrated_layer(scripts: Any, formats: tuple[str, ...]) -> None:
    """hessian by what it minimizes and on held-out tokens, sse on the weight."""
    rows, _ = measure(scripts, small(256), plan(scripts, *formats))
    assert {get_format(row.format, row.block).key for row in rows} == set(formats)
    for naive, sse, hessian in by_method(rows):
        fmt = get_format(naive.format, naive.block)
        assert set(naive.offsets) == {0} and all(row.w4a4_error > row.output_error for row in rows)
        assert hessian.predicted_error <= naive.predicted_error * (1 + 1e-6)
        assert sse.weight_error <= min(naive.weight_error, hessian.weight_error) * (1 + 1e-6)
        if fmt in VARIANTS:
            assert hessian.predicted_error < sse.predicted_error < naive.predicted_error
            assert sse.weight_error < min(naive.weight_error, hessian.weight_error)
            assert hessian.output_error < naive.output_error and set(sse.offsets) != {0}


def by_method(rows: list[Any]) -> list[list[Any]]:
    """The rows of naive, sse and hessian of each layer and format that has all three."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row.layer, row.format, row.block), {})[row.method] = row
    names = ("naive", "sse", "hessian")
    whole = [each for each in found.values() if each.keys() >= set(names)]
    return [[each[name] for name in names] for each in whole]


def test_a_row_is_what_convert_makes_of_the_layer(scripts: Any, offline: None) -> None:
    """Global scales are shared with layers that are not measured; heads are, if they are named."""
    model = language_model(dtype=torch.float32)
    ids = torch.randint(2000, (2, 2, 32), generator=torch.Generator().manual_seed(0))
    names = ["model.layers.1.self_attn.k_proj", "lm_head"]
    one = scripts.Plan([get_format("nvfp4")], [METHODS["hessian"]], repeats=1)
    found = list(scripts.measure_model(model, [ids[0]], [ids[1]], one, names))
    # The others of its parent are converted too, for they share its global scale.
    rules = [("lm_head", {}), ("model.layers.1.self_attn.*", {}), ("*", None)]
    prepared = fp4pass.prepare(copy.deepcopy(model), rules=rules)
    converted = fp4pass.convert(fp4pass.calibrate(prepared, [ids[0]], progress=False))
    reports = {row.name: row for row in fp4pass.report(converted).converted}
    alone, both = (
        output_errors(converted, model, [ids[1]], activations=activations, progress=False)
        for activations in (False, True)
    )
    assert {row.layer for row in found} == set(names)
    for row in found:
        assert row.weight_error == pytest.approx(reports[row.layer].weight_error, rel=1e-6)
        assert row.predicted_error == pytest.approx(reports[row.layer].output_error, rel=1e-6)
        assert row.output_error == pytest.approx(alone[row.layer], rel=1e-4)
        assert row.w4a4_error == pytest.approx(both[row.layer], rel=1e-4)


def test_passes_and_chunks_change_nothing(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = untimed(measure(scripts, small(), plan(scripts, "nvfp4"))[0])
    monkeypatch.setattr("layer_measure._GROUP", 1)
    assert untimed(measure(scripts, small(), plan(scripts, "nvfp4"))[0]) == wanted
    monkeypatch.setattr("layer_measure._CHUNK", 64 * 7)
    chunked = measure(scripts, small(), plan(scripts, "nvfp4"))[0]
    for row, other in zip(chunked, wanted, strict=True):
        assert row.output_error == pytest.approx(other.output_error, rel=1e-6)
        assert row.w4a4_error == pytest.approx(other.w4a4_error, rel=1e-6)


def test_no_layer_is_missing_without_a_reason(scripts: Any) -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    rows, left_out = measure(scripts, Twice(*small(48)), plan(scripts, "nvfp4", "mxfp4"))
    assert {(row.layer, row.format) for row in rows} == {("0", "nvfp4")}
    assert {(each.layer, each.formats): each.reason for each in left_out} == {
        ("0", "mxfp4"): "in_features=48 is not a multiple of 32 (the block of mxfp4)",
        ("2", "all"): "the calibration text never reached it",
    }


def test_errors_of_nothing_are_none(scripts: Any) -> None:
    model = small()
    nn.init.zeros_(model[2].weight)
    naive = scripts.Plan([get_format("nvfp4")], [METHODS["naive"]])
    (first, last), _ = measure(scripts, model, naive)
    assert first.weight_error > 0 and first.predicted_error is None
    assert (last.weight_error, last.output_error, last.w4a4_error) == (None, None, None)
    assert first.offsets == {0: 256} and last.offsets == {}
    rows = [dataclasses.asdict(row) for row in (first, last)]
    result = {"model": "", "command": "", "dtype": "", "device": "", "threads": 1, "inputs": ""}
    result |= {"versions": {}, "sensitivity": [], "left_out": []}
    line = [part.strip() for part in scripts.page(result | {"rows": rows[1:]}).split("|")]
    assert line[line.index("naive") + 1 : -1][1:7] == ["-"] * 6
    assert "  - / - / - |" in scripts.page(result | {"rows": rows})


def test_tokens_are_for_one_thing_only(scripts: Any) -> None:
    documents = [f"Document {i}\nends here {i}\n" for i in range(9)]

    def text(part: list[str]) -> str:
        return "<|doc|>\n".join(part)

    def read(*texts: str | None) -> tuple[list[str], list[str]]:
        return tuple(scripts.documents_of(each) for each in scripts.split_texts(*texts))

    assert read(text(documents), None) == (documents[:4], documents[4:])
    assert read(text(documents[:6]), text(documents[4:])) == (documents[:4], documents[4:])
    assert read("<|doc|>\n" + text(documents[:3]), text(documents[3:]))[0] == documents[:3]
    assert scripts.split_texts("a\nb\nc\n", None) == ("a\n", "b\nc\n")
    with pytest.raises(SystemExit, match="Every document of --calibration is in --heldout"):
        scripts.split_texts(text(documents[2:4]), text(documents))
    with pytest.raises(SystemExit, match="one line, which cannot be cut in two"):
        scripts.split_texts("a single line", None)


def test_the_texts_of_tiny_lm_share_no_document(scripts: Any) -> None:
    texts = [(TINY / name).read_text() for name in ("calib.txt", "eval.txt")]
    calibration, heldout = scripts.split_texts(*texts)
    assert heldout == texts[1]
    assert [*map(scripts.documents_of, (calibration, heldout))] == [
        *map(scripts.documents_of, texts)
    ]
    assert not set(scripts.documents_of(calibration)) & set(scripts.documents_of(heldout))


def test_synthetic_tokens_are_made_again_and_never_twice(scripts: Any) -> None:
    source = scripts.SyntheticLayer(32, 64, torch.device("cpu"))
    first, again, other = (torch.cat(list(source.inputs(9000, seed))) for seed in (1, 1, 2))
    assert first.shape == (9000, 64) and torch.equal(first, again)
    assert not {*map(tuple, first.tolist())} & {*map(tuple, other.tolist())}
    # Of one kind: equal second moments, up to the noise of heavy tails.
    moments = [x.float().mT @ x.float() / len(x) for x in (first, other)]
    assert (moments[0] - moments[1]).norm() < 0.15 * moments[0].norm()
    found = list(scripts.measure_synthetic(source, 3000, 2000, plan(scripts, *SOME)))
    rows = [row for row in found if isinstance(row, scripts.Row)]
    assert {(row.calibration_tokens, row.heldout_tokens) for row in rows} == {(3000, 2000)}
    assert all(hessian.output_error < naive.output_error for naive, _, hessian in by_method(rows))
    left_out = {each.formats: each.reason for each in found if isinstance(each, scripts.LeftOut)}
    assert left_out["int8:128"].startswith("in_features=64 is not a multiple of 128")


def test_sensitivity_is_that_of_a_model_with_one_layer(scripts: Any, offline: None) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = language_model(dtype=torch.float32), AutoTokenizer.from_pretrained(TINY)
    text, name = (TINY / "eval.txt").read_text(), "model.layers.2.mlp.down_proj"
    options = {"window": 64, "windows": 4}
    before = fp4pass.evaluate(model, tokenizer, text, progress=False, **options)
    calibration = token_windows(tokenizer, (TINY / "calib.txt").read_text(), window=64, windows=2)
    choices = [(get_format("mxfp4", 16), "hessian")]
    arguments = (model, tokenizer, text, [calibration], [name], choices, options)
    rows = list(scripts.sensitivities(*arguments))
    assert [row.weight_only for row in rows] == [True, False]
    for row in rows:
        rest = [(n, None) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        rest = [rule for rule in rest if rule[0] != name]
        fresh = fp4pass.prepare(copy.deepcopy(model))
        fp4pass.calibrate(fresh, [calibration], progress=False)
        only = {"weight_only": row.weight_only, "block": 16, "rules": rest}
        fp4pass.convert(fresh, "mxfp4", "hessian", **only)
        assert [r.name for r in fp4pass.report(fresh).converted] == [name] == [row.layer]
        found = fp4pass.evaluate(fresh, tokenizer, text, model, progress=False, **options)
        assert (row.perplexity, row.kl, row.top1) == (found.perplexity, found.kl, found.top1)
        assert row.kl_interval == found.intervals["kl"]
        assert row.perplexity_ratio == found.difference(before).perplexity_ratio
        assert row.original == before.perplexity
    assert rows[1].kl > rows[0].kl > 0


def test_the_command(
    scripts: Any, offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    outputs = [tmp_path / name for name in ("found.json", "found.md", "found.png")]
    name = "model.layers.0.self_attn.v_proj"
    run(
        scripts,
        *("--layers", name, "--tokens", 256, "--window", 64, "--repeats", 1, "--dtype", "float32"),
        *("--formats", "nvfp4", "int8:128"),
        *("--sensitivity", "nvfp4/sse", "--json", outputs[0], "--table", outputs[1]),
        *("--plot", outputs[2]),
    )
    result = json.loads(outputs[0].read_text())
    assert result["command"].endswith("--json found.json --table found.md --plot found.png")
    assert result["versions"]["fp4pass"] == fp4pass.__version__ and result["device"]
    assert (result["model"], result["dtype"]) == ("tiny_lm", "float32")
    wanted = plan(scripts, "nvfp4", "int8:128")
    assert 0 < len(wanted.left_out) == 2 * len(METHODS) - len(wanted.candidates)
    assert len(result["rows"]) == len(wanted.candidates)
    left_out = {(row["formats"], row["reason"]) for row in result["left_out"]}
    assert left_out == {(each.formats, each.reason) for each in wanted.left_out}
    assert {row["layer"] for row in result["rows"]} == {name}
    assert {row["heldout_tokens"] for row in result["rows"]} == {256}
    assert [row["weight_only"] for row in result["sensitivity"]] == [True, False]
    printed = capsys.readouterr().out
    assert printed.strip() == outputs[1].read_text().strip()
    naive = result["rows"][0]
    lines = printed.splitlines()
    line = next(line for line in lines if line.startswith("| nvfp4  |    16 | naive"))
    assert f"{100 * naive['weight_error']:.2f} % " in line
    assert f"{100 * naive['w4a4_error']:.2f} % " in line
    assert "The layer model.layers.0.self_attn.v_proj, 128 x 256:" in printed
    assert outputs[2].read_bytes().startswith(b"\x89PNG")


def test_the_command_without_a_model(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "made" / "found.json"
    few = ("--synthetic", 32, 96, "--tokens", 300, "--repeats", 1, "--formats", *SOME[:2])
    run(scripts, *few, "--json", target)
    result = json.loads(target.read_text())
    assert {tuple(row["shape"]) for row in result["rows"]} == {(32, 96)}
    assert {row["format"] for row in result["rows"]} == {"nvfp4", "mxfp4"}
    assert result["model"] == "synthetic 32 x 96"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(scripts, "--synthetic", 32, 96, "--sensitivity")
    assert "--sensitivity needs a model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(scripts, "--heldout", TINY / "eval.txt")
    assert "--heldout needs --calibration" in capsys.readouterr().err
