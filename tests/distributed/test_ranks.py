"""Several processes quantize one model: the same bits everywhere, and errors that end all."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, start
from small_models import TINY
from torch import nn

import fp4pass
from fp4pass.distributed import divide
from fp4pass.errors import OptionError, StateError

pytest.importorskip("transformers")

SCENARIOS = Path(__file__).with_name("scenarios.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(SCENARIOS, "together", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(SCENARIOS, "together", tmp_path_factory.mktemp("one"), 1)[0]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


MODELS = [
    "hessian",
    "gptq",
    "sse",
    "smooth",
    "rows",
    "sequential",
    "cross",
    "experts",
    "experts, one by one",
    "hessian, one scale",
    "gptq, one scale",
    "kept",
    "streamed",
    "resumed",
    "saved",
    "after",
]


@pytest.mark.parametrize("name", MODELS)
def test_all_processes_have_the_same_model(two: list[dict[str, Any]], name: str) -> None:
    first, second = (found[name] for found in two)
    assert_equal(first["state"], second["state"])
    assert first["report"] == second["report"]


@pytest.mark.parametrize(
    "name",
    [
        "hessian",
        "gptq",
        "hessian, one scale",
        "gptq, one scale",
        "headroom",
        "sse",
        "smooth",
        "rows",
        "kept",
    ],
)
def test_sums_that_are_exact_give_the_bits_of_one_process(
    two: list[dict[str, Any]], one: dict[str, Any], name: str
) -> None:
    assert_equal(two[0][name]["state"], one[name]["state"])
    assert two[0][name]["report"] == one[name]["report"]
    state = one[name]["state"]
    if "one scale" in name:
        assert torch.equal(state["q_proj.weight_scale"], state["k_proj.weight_scale"])


def test_processes_share_the_rows_of_a_large_layer(
    two: list[dict[str, Any]], one: dict[str, Any]
) -> None:
    assert two[0]["rows, searched"] == [("tall", 0, slice(12288, 13000)), ("small", 0, None)]
    assert two[1]["rows, searched"] == [("tall", 0, slice(0, 12288))]
    assert one["rows, searched"] == [("tall", 0, None), ("small", 0, None)]


def test_processes_share_experts(two: list[dict[str, Any]]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    searched = [
        [i for layer, i, _ in found["experts, one by one, searched"] if layer == name]
        for found in two
    ]
    assert all(searched) and sorted(searched[0] + searched[1]) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["sequential", "cross", "experts", "experts, one by one", "saved"])
def test_all_tokens_count(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    rows, expected = (found[name]["report"]["rows"] for found in (two[0], one))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        if other["output_error"] is not None:
            assert row["output_error"] == pytest.approx(other["output_error"], rel=0.05)


def test_one_process_writes_the_folder(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert all(found["there"] for found in two)
    calibration = two[0]["recipe"]
    assert calibration["batches"] == 5 and calibration["processes"] == 2
    assert calibration["tokens"] == one["recipe"]["tokens"] == 240
    for found in two:
        assert found["in the way"]
    assert two[0]["in the way"].startswith("CheckpointError:")
    assert two[1]["in the way"].startswith("RankError: Rank 0 failed: CheckpointError:")


def test_what_differs_is_an_error_of_all(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["other plan"].startswith("StateError: The plan is not the same in all")
        assert "rank 1 has another than rank 0" in found["other plan"]
        assert found["other folder"].startswith("StateError: The model to save is not the same")
        assert found["other weights"].startswith("StateError: The weights is not the same")
    assert two[1]["poisoned"].startswith("CalibrationError: q: its inputs held NaN")
    assert two[0]["poisoned"].startswith("RankError: Rank 1 failed: CalibrationError: q: its")


def test_prepare_makes_the_group_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends behind that is noticed; a rank with a model that is refused is there as well."""
    calls: list[int] = []
    monkeypatch.setattr("fp4pass.api.steps.ranks", lambda: calls.append(1))
    with pytest.raises(StateError):
        fp4pass.prepare(nn.Identity())
    assert calls == [1]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    """In the middle of its searches."""
    begin = time.monotonic()
    processes = start(SCENARIOS, "dies", tmp_path)
    texts = [each.communicate(timeout=120)[0] for each in processes]
    assert [each.returncode for each in processes] == [0, 3], "\n".join(texts)
    found = torch.load(tmp_path / "dies-0.pt", weights_only=False)
    assert found["error"].startswith("RankError: Rank 0: another process has ended")
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_run_that_a_process_ended_goes_on_behind_its_last_layer(tmp_path: Path) -> None:
    processes = start(SCENARIOS, "dies_streaming", tmp_path)
    texts = [each.communicate(timeout=120)[0] for each in processes]
    assert [each.returncode for each in processes] == [0, 3], "\n".join(texts)
    found = torch.load(tmp_path / "dies_streaming-0.pt", weights_only=False)
    assert found["error"].startswith("RankError: Rank 0: another process has ended")
    for again in run(SCENARIOS, "goes_on", tmp_path):
        assert again["searched"] and all(".layers.1." in name for name, *_ in again["searched"])
        assert_equal(again["found"]["state"], again["whole"]["state"])
        assert again["found"]["report"] == again["whole"]["report"]


def test_a_call_that_only_the_first_process_makes(two: list[dict[str, Any]]) -> None:
    error = two[0]["alone"]
    assert error.startswith("RankError: Not all processes made this call of fp4pass within 0:00:02")


def test_streaming_gives_the_bits_of_the_model_in_memory(two: list[dict[str, Any]]) -> None:
    for name in ("streamed", "resumed"):
        assert_equal(two[0][name]["state"], two[0]["sequential"]["state"])
        assert two[0][name]["report"] == two[0]["sequential"]["report"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(run, SCENARIOS, "exact", tmp_path, 1)
        # It has its environment by then.
        time.sleep(1)
        monkeypatch.setenv("ON_GPU", "1")
        first, second = run(SCENARIOS, "together", tmp_path)
        one = alone.result()[0]
    for name in MODELS:
        assert_equal(first[name]["state"], second[name]["state"])
        assert first[name]["report"] == second[name]["report"]
    # Sums over integers are exact in any order.
    for name in ("hessian", "sse"):
        assert_equal(first[name]["state"], one[name]["state"])
    assert_equal(first["streamed"]["state"], first["sequential"]["state"])


@pytest.mark.core
def test_processes_that_do_not_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = fp4pass.prepare(nn.Linear(32, 32).eval())
    with pytest.raises(StateError, match=r"WORLD_SIZE is 2, but torch\.distributed is not init"):
        fp4pass.calibrate(model, [torch.randn(4, 32)], progress=False)
    model(torch.randn(4, 32))
    with pytest.raises(StateError, match="WORLD_SIZE is 2"):
        fp4pass.convert(model)
    # Without data all processes do the same.
    fp4pass.convert(nn.Linear(32, 32), method="sse", weight_only=True)


@pytest.mark.core
def test_wrapped_models_are_refused() -> None:
    wrapped = nn.DataParallel(nn.Linear(32, 32))
    for call in (fp4pass.prepare, fp4pass.convert, fp4pass.report):
        with pytest.raises(OptionError, match=r"DataParallel .* model\.module"):
            call(wrapped)
    with pytest.raises(OptionError, match=r"model\.module"):
        fp4pass.save(wrapped, "out")


@pytest.mark.core
def test_searches_are_divided_by_cost() -> None:
    def owners(costs: list[float], size: int) -> list[int]:
        return [rank for (rank,) in divide([(cost, [0.0]) for cost in costs], size)]

    assert owners([5.0, 1.0, 1.0, 3.0], 2) == [0, 1, 1, 1]
    assert owners([1.0] * 4, 1) == [0] * 4
    assert sorted(owners([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert owners([0.0, 0.0], 2) == [0, 0]


@pytest.mark.core
def test_what_is_more_than_a_fair_share_is_taken_apart() -> None:
    # 13 of 19, of which who does 3 or 2 of 4 parts does 1 more.
    large = (1.0, [3.0] * 4)
    assert divide([(2.0, [1.0]), large, (2.0, [1.0])], 2) == [(0,), (0, 0, 1, 1), (1,)]
    assert divide([large], 1) == [(0,) * 4]
    # A job goes to one where it has room, and no part is cut.
    assert divide([large, large], 2) == [(0,) * 4, (1,) * 4]
    assert divide([(0.0, [1.0] * 3)], 8) == [(0, 1, 2)]
    assert divide([(9.0, [1.0])], 8) == [(0,)]
    # Those of one rank stand together, and it prepares once.
    for size in range(1, 9):
        jobs = [(1.0, [2.0] * 7), (0.5, [1.0]), (0.0, [1.0] * 16), (1.0, [2.0] * 5)]
        loads = [0.0] * size
        for (first, parts), owners in zip(jobs, divide(jobs, size), strict=True):
            assert list(dict.fromkeys(owners)) == [rank for rank, _ in itertools.groupby(owners)]
            for rank in set(owners):
                loads[rank] += first + parts[0] * owners.count(rank)
        assert max(loads) <= sum(loads) / size + 3.0


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "fp4pass", "quantize", str(TINY), "-o", str(tmp_path / "two")]
    command += ["--data", str(TINY / "calib.txt"), "--samples", "5", "--seq-len", "64", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    # One result, of all five windows.
    found = json.loads(done.stdout)
    assert {row["tokens"] for row in found["rows"] if row["config"]} == {320}
    loaded: Any = fp4pass.load(tmp_path / "two")
    assert loaded.config.vocab_size > 0
    assert [each.name for each in tmp_path.iterdir()] == ["two"]
    assert done.stderr.count("parameters in") == 1
