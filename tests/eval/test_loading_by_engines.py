"""The results of the loading code of engines are what the readers' page and `save` say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fp4pass.checkpoint.readers import READERS

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "eval" / "results" / "vllm-loading.json").read_text("utf-8"))
ROWS = {(row["layout"], row["case"], row["model"]): row for row in FOUND["rows"]}
OF_SGLANG = json.loads((ROOT / "eval" / "results" / "sglang-loading.json").read_text("utf-8"))
SGLANG = {(row["layout"], row["case"], row["model"]): row for row in OF_SGLANG["rows"]}
VERSION = ".".join(FOUND["versions"]["vllm"].split(".")[:2])

# Of the folders that vLLM refuses each reason once, and one that it loads.
QUICK = {
    ("compressed-tensors", "fp8_blocka16", "qwen3"),
    ("compressed-tensors", "fp8_block", "llama, cut rows"),
    ("compressed-tensors", "fp8_tensor", "qwen3_moe"),
    ("modelopt", "fp8_blocka16", "llama, cut columns"),
    ("modelopt", "nvfp4, attention fp8", "qwen3_moe"),
    ("finegrained-fp8", "fp8_tensor", "qwen3"),
    ("finegrained-fp8", "fp8_block", "qwen3"),
}


def name_of(key: tuple[str, ...]) -> str:
    return " ".join(key).replace(", ", "-").replace(" ", "-")


@pytest.fixture
def vllm_loading(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("engines.vllm_loading")


def test_each_case_has_a_row(vllm_loading: ModuleType) -> None:
    assert {(case.layout, case.name, case.model) for case in vllm_loading.CASES} == ROWS.keys()
    assert SGLANG.keys() == ROWS.keys()
    assert all(row["outcome"] in ("equal", "refused", "differs") for row in ROWS.values())


def test_the_readers_have_the_formats_that_vllm_loads() -> None:
    layouts = {layout for layout, _, _ in ROWS}
    for layout in layouts:
        loaded = {
            fmt
            for row in ROWS.values()
            if row["layout"] == layout and row["outcome"] == "equal"
            for fmt in row["formats"]
        }
        assert set(READERS[f"vLLM {VERSION}"][layout].formats) == loaded, layout


def test_the_readers_have_the_formats_that_sglang_loads() -> None:
    for layout in ("compressed-tensors", "modelopt"):
        loaded = {
            fmt
            for row in SGLANG.values()
            if row["layout"] == layout and row["outcome"] == "equal"
            for fmt in row["formats"]
        }
        reads = READERS[f"SGLang {OF_SGLANG['versions']['sglang']}"][layout]
        assert set(reads.formats) == loaded, layout


@pytest.mark.filterwarnings("ignore:transformers cannot load this folder by itself")
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=name_of(key), marks=() if key in QUICK else pytest.mark.slow)
        for key in ROWS
    ],
)
def test_save_says_whether_vllm_loads_a_folder(
    key: tuple[str, ...], vllm_loading: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fp4pass")
    (case,) = (each for each in vllm_loading.CASES if (each.layout, each.name, each.model) == key)
    vllm_loading.write(case, tmp_path / "q")
    words = next(each for each in caplog.messages if "read by fp4pass" in each)
    read, _, others = words.partition("; not by ")
    assert ("vLLM" in read) is (ROWS[key]["outcome"] == "equal"), words
    assert ("vLLM (" in others) is (ROWS[key]["outcome"] != "equal"), words
    outcome = SGLANG[key]["outcome"]
    # It ignores rotations and scales of a cache, and drops scales of one class.
    whole = outcome == "equal" and key[0] in ("compressed-tensors", "modelopt")
    if outcome != "not tried" and "cache" not in key[1]:
        assert ("SGLang" in read) is whole and ("SGLang (" in others) is not whole, words


def test_save_warns_of_scales_that_vllm_reads_wrong(
    vllm_loading: ModuleType, tmp_path: Path
) -> None:
    found = [key for key, row in ROWS.items() if row["outcome"] == "differs"]
    assert found == [("finegrained-fp8", "fp8_block", "sizes of SmolLM2-135M")]
    case = vllm_loading.Case("finegrained-fp8", "fp8_block", model="sizes of SmolLM2-135M")
    with pytest.warns(UserWarning) as caught:
        vllm_loading.write(case, tmp_path / "q")
    wrong = "it, and vLLM, may read wrong scales of model.layers.0.self_attn.q_proj"
    assert any(wrong in str(each.message) for each in caught)
