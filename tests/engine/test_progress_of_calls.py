"""What convert, calibrate, save, load and the command line show on the one bar that they have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CALIB, run
from screens import Watched, watched
from small_models import TINY, language_model, tokens
from torch import Tensor, nn

import fp4pass
from fp4pass.checkpoint import reader, writer
from fp4pass.core.progress import Progress
from fp4pass.engine import layer_runner
from fp4pass.evaluation import evaluate
from fp4pass.methods import Gptq
from fp4pass.quantization import quantize

OPTIONS = {"fmt": "nvfp4", "weight_only": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model(layers: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(layers).eval()


def batches(sizes: tuple[int, ...] = (1, 4, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, 64, generator=generator) for size in sizes]


def slow_search(seen: Watched, patch: pytest.MonkeyPatch, seconds: float) -> None:
    seen.slow(patch, quantize, "search_parts", seconds)


def test_convert_counts_layers_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched() as seen:
        slow_search(seen, monkeypatch, 40)
        fp4pass.convert(model(), method="sse", **OPTIONS)
    assert seen.lines == [
        "convert: layer 1/3, 2/6 weights, 1:20 passed, 2:40 left",
        "convert: layer 2/3, 4/6 weights, 2:40 passed, 1:20 left",
        "convert: layer 3/3, 6/6 weights, 4:00 passed, 0:00 left",
    ]


def test_a_model_without_numbered_layers_has_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched() as seen:
        slow_search(seen, monkeypatch, 60)
        fp4pass.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "nvfp4", "sse",
                        weight_only=True)  # fmt: skip
    assert seen.lines == [
        "convert: 1/2 weights, 1:00 passed, 1:00 left",
        "convert: 2/2 weights, 2:00 passed, 0:00 left",
    ]


def test_calibrate_counts_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are not all of one size: three of them are the eight that somebody asked for."""
    prepared = fp4pass.prepare(model(), "sse")
    with watched() as seen:
        seen.slow(monkeypatch, Model, "forward", lambda self, x: 20.0 * len(x))
        fp4pass.calibrate(prepared, batches())
    assert seen.lines == [
        "calibrate: 5/8 samples, 1:40 passed, 1:00 left",
        "calibrate: 8/8 samples, 2:40 passed, 0:00 left",
    ]


def test_calibrate_counts_batches_that_do_not_say_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = fp4pass.prepare(model(), "sse")
    with watched() as seen:
        seen.slow(monkeypatch, Model, "forward", 70.0)
        fp4pass.calibrate(prepared, iter(batches()))
    assert seen.lines[-1] == "calibrate: 3 batches, 3:30 passed"


@pytest.mark.parametrize("target", ["plain", "cross"])
def test_sequential_counts_layers_and_their_calibration(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Any = Gptq(target="cross") if target == "cross" else "gptq"
    prepared = fp4pass.prepare(model(4), method, sequential=True, weight_only=True)
    fp4pass.calibrate(prepared, batches(), progress=False)
    monkeypatch.setattr(Progress, "step", (step := Steps(Progress.step)).bound())
    with watched() as seen:
        slow_search(seen, monkeypatch, 10)
        seen.slow(monkeypatch, layer_runner.Runner, "pair", 20)
        seen.slow(monkeypatch, layer_runner.Runner, "observe", 30)
        seen.slow(monkeypatch, layer_runner.Runner, "advance", 40)
        fp4pass.convert(prepared)
    # By layers: what a layer observes for each of its groups, its searches, and its outputs.
    layer = 20 + 2 * 30 + 2 * 10 + 40 if target == "cross" else 30 + 2 * 10 + 40
    assert seen.now == 4 * layer
    assert seen.lines[-1].startswith("convert: layer 4/4, ")
    places = list(dict.fromkeys(line.split(",")[0] for line in seen.lines))
    assert places == [f"convert: layer {i}/4" for i in range(1, 5)]
    # From the second layer on only the outputs of the last are one run too many.
    estimates = [estimate for now, estimate in step.estimates if now > layer and estimate]
    assert all(4 * layer - 40 <= each <= 4 * layer + 1 for each in estimates), estimates
    assert step.estimates[-1][1] == seen.now


class Steps:
    """The estimates after each step."""

    def __init__(self, real: Any) -> None:
        self.real, self.estimates = real, list[tuple[float, float | None]]()

    def bound(self) -> Any:
        def step(own: Progress, *args: Any, **kwargs: Any) -> None:
            self.real(own, *args, **kwargs)
            self.estimates.append((own._bar.passed, own.estimate))

        return step


def test_stream_passes_over_finished_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    made = 0

    def count(*args: Any) -> float:
        nonlocal made
        made += 1
        if made == 5:
            raise Stop
        return 0.0

    with watched() as seen, monkeypatch.context() as patch, pytest.raises(Stop):
        seen.slow(patch, quantize, "search_parts", count)
        fp4pass.convert(model(4), method="sse", stream=tmp_path / "s", **OPTIONS)
    with watched() as seen:
        slow_search(seen, monkeypatch, 60)
        fp4pass.convert(model(4), method="sse", stream=tmp_path / "s", **OPTIONS)
    assert seen.lines == [
        "convert: layer 3/4, 5/8 weights, 1:00 passed, 3:00 left",
        "convert: layer 3/4, 6/8 weights, 2:00 passed, 2:00 left",
        "convert: layer 4/4, 7/8 weights, 3:00 passed, 1:00 left",
        "convert: layer 4/4, 8/8 weights, 4:00 passed, 0:00 left",
    ]


def test_searches_that_were_found_say_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [("layers.2.*", None)]
    fp4pass.convert(model(), method="sse", rules=rules, resume=tmp_path / "r", **OPTIONS)
    with watched() as seen:
        slow_search(seen, monkeypatch, lambda layer, *_: 60 if "layers.2" in layer.name else 0)
        fp4pass.convert(model(), method="sse", resume=tmp_path / "r", **OPTIONS)
    assert seen.lines == [
        "convert: layer 3/3, 5/6 weights, 1:00 passed, 1:00 left",
        "convert: layer 3/3, 6/6 weights, 2:00 passed, 0:00 left",
    ]


def test_save_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fp4pass.convert(wide(), method="sse", **OPTIONS)
    with watched() as seen:
        seen.slow(monkeypatch, writer, "fingerprint", lambda x: 60.0 if x.nbytes == 1 << 20 else 0)
        seen.slow(monkeypatch, writer, "save_file", 45.0)
        fp4pass.save(made, tmp_path / "out")
    # Two weights of 1 MB, each with its scales.
    assert [line.split(",")[0] for line in seen.lines] == [
        "save: 1.0/2.4 MB",
        "save: 2.2/2.4 MB",
    ]
    assert seen.now == 2 * 60 + 45


def test_load_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fp4pass.convert(wide(), method="sse", **OPTIONS)
    fp4pass.save(made, tmp_path / "out", progress=False)
    with watched() as seen:
        seen.slow(
            monkeypatch,
            reader.CheckpointReader,
            "sum_problem",
            lambda _, n, x: 60.0 if x.nbytes == 1 << 20 else 0,
        )
        fp4pass.load(tmp_path / "out", model=wide())
    assert [line.split(",")[0] for line in seen.lines] == ["load: 1.3/2.4 MB", "load: 2.4/2.4 MB"]
    assert seen.lines[0].endswith(", 1:00 passed, 1:00 left")


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(2))).eval()


def test_quantize_checkpoint_has_one_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [tokens(2, 32), tokens(2, 32)]
    with watched(is_terminal=True) as seen:
        slow_search(seen, monkeypatch, 10)
        seen.slow(monkeypatch, layer_runner.Runner, "observe", 30)
        seen.slow(monkeypatch, writer, "fingerprint", 1)
        fp4pass.quantize_checkpoint(
            TINY, tmp_path / "out", fmt="nvfp4a16", method="hessian", data=ids, device="cpu"
        )
    assert seen.stages == ["calibrate", "convert", "save"]
    assert seen.drawn[0] == "calibrate: 2/4 samples, 0:00 left, then convert"
    assert any(text.startswith("convert: layer 2/4, ") for text in seen.drawn)


@pytest.mark.parametrize("call", ["convert", "calibrate", "save", "load", "quantize_checkpoint"])
def test_progress_false_prints_nothing(call: str, tmp_path: Path) -> None:
    quiet = {"progress": False}
    with watched(is_terminal=True) as seen:
        # A minute passes whenever the bar asks.
        object.__setattr__(seen.screen, "clock", itertools.count(step=60.0).__next__)
        if call == "quantize_checkpoint":
            options = {"method": "sse", "device": "cpu", **OPTIONS, **quiet}
            fp4pass.quantize_checkpoint(TINY, tmp_path / "out", **options)
        elif call == "calibrate":
            fp4pass.calibrate(fp4pass.prepare(model()), batches(), **quiet)
        else:
            made = fp4pass.convert(model(), method="sse", **OPTIONS, **quiet)
            fp4pass.save(made, tmp_path / "out", **quiet)
            fp4pass.load(tmp_path / "out", model=model(), **quiet)
    assert seen.text == ""


def test_the_bar_hears_of_weights_and_not_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for seed in (64, 256):
        with watched() as seen:
            fp4pass.convert(
                nn.Sequential(nn.Linear(seed, seed), nn.Linear(seed, seed)), "nvfp4", "sse",
                weight_only=True,
            )  # fmt: skip
        calls.append(seen.asked)
    assert calls[0] == calls[1] < 40


def test_evaluate_shows_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    network = language_model()
    with watched() as seen:
        seen.slow(monkeypatch, type(network), "forward", 70)
        evaluate(network, None, tokens(2, 32), batch_size=1)
    assert seen.lines == [
        "evaluate: 1/2 batches, 1:10 passed, 1:10 left",
        "evaluate: 2/2 batches, 2:20 passed, 0:00 left",
    ]


@pytest.mark.parametrize(
    "by",
    [
        "--sequential",
        pytest.param("--stream", marks=pytest.mark.slow),
        pytest.param("--batch-size=2", marks=pytest.mark.slow),
    ],
)
def test_the_command_line_has_one_bar_and_a_pure_stdout(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(is_terminal=True) as seen:
        slow_search(seen, monkeypatch, 10)
        seen.slow(monkeypatch, writer, "fingerprint", 1)
        seen.slow(monkeypatch, type(language_model()), "forward", 1)
        options = ("--data", CALIB, "--samples", 2, "--seq-len", 32, "--scheme")
        options = (*options, "nvfp4a16", "--method", "hessian", by)
        done = run("quantize", TINY, "-o", tmp_path / "out", *options)
    assert seen.stages == ["calibrate", "convert", "save"]
    assert "weights" not in done.stderr and "left" not in done.stdout
    layers = {text.split(",")[0] for text in seen.drawn if text.startswith("convert: layer")}
    assert layers == {f"convert: layer {i}/4" for i in range(1, 5)}
