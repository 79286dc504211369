"""What quantizing a mixture costs: rows are what the library says, and the page what rows say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from eval.rows import read, run
from small_models import TINY

import fp4pass
from fp4pass.evaluation import token_windows

for package in ("transformers", "scipy"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results" / "mixture"
SMALL = ("--samples", 4, "--window", 64, "--windows", 6, "--error-windows", 2)


@pytest.fixture(scope="module")
def quality(script: Any) -> Any:
    """eval/quality/mixture.py."""
    return script("mixture_quality")


@pytest.fixture(scope="module")
def page(script: Any) -> Any:
    """eval/pages/mixture.py."""
    return script("mixture_page")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture with the tokenizer of the bundled model."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = mixtures.build("qwen3_moe", vocab_size=2048, norm_topk_prob=True)
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(path)
    return path


# ---- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [False, True])
@torch.no_grad()
def test_linear_routers_change_no_bit(quality: Any, normalized: bool) -> None:
    model = mixtures.build("qwen3_moe", norm_topk_prob=normalized)
    ids = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    assert torch.equal(quality.with_linear_routers(model)(ids).logits, expected)
    rows = {row.name: row for row in fp4pass.report(fp4pass.prepare(model)).rows}
    for layer in range(2):
        assert rows[f"model.layers.{layer}.mlp.gate.linear"].skip_reason.startswith("a router;")


def test_choices_that_are_kept(quality: Any) -> None:
    original = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [4, 5]])]
    found = [torch.tensor([[1, 0], [2, 4]]), torch.tensor([[0, 1], [5, 6]])]
    assert quality.kept(original, original) == 1.0
    assert quality.kept(found, original) == (0.75 + 0.25) / 2


@pytest.fixture(scope="module")
def measured(quality: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Some of the cases of nvfp4 with float inputs."""
    case = quality.Case
    chosen = [
        *(case("experts", method, None, 4) for method in ("naive", "sse", "hessian")),
        case("experts", "hessian", 0.0, 4),
        *(case(layers, "naive", None, 4) for layers in ("all", "all and routers", "routers")),
    ]
    path = tmp_path_factory.mktemp("mixture") / "rows.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "cases", lambda windows: iter(chosen))
        options = ("--formats", "nvfp4", "--inputs", "float", "--json", path)
        run(quality, "--model", folder, *SMALL, *options)
    return read(path)


def test_rows_are_compared_with_simpler_ones(measured: Any) -> None:
    found = [
        (row["layers"], row["method"], list(row["texts"]["eval"]["against"]))
        for row in measured["rows"]
    ]
    assert found == [
        ("experts", "naive", []),
        ("experts", "sse", ["experts: naive"]),
        ("experts", "hessian", ["experts: sse"]),
        ("experts", "hessian, own only", ["experts: hessian"]),
        ("all", "naive", []),
        ("all and routers", "naive", ["all: naive"]),
        ("routers", "naive", []),
    ]
    assert measured["calibration"] == {"file": "calib.txt", "windows": 4, "tokens": 256}
    for row in measured["rows"]:
        assert (row["format"], row["block"], row["weight_only"]) == ("nvfp4", 16, True)
        assert row["tokens"] == 256 and 0 < row["choices_kept"] <= 1
        if row["layers"] == "routers":
            assert row["expert_tokens"] == []
        else:
            fewest, middle, most = row["expert_tokens"]
            # Two of five experts for each token.
            assert fewest <= middle <= most <= 256 and fewest < 2 * 256 / 5 < most


def test_numbers_are_those_of_the_library(quality: Any, folder: Path, measured: Any) -> None:
    """Of experts alone, with statistics of their own, and of routers alone."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = quality.with_linear_routers(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    calib = token_windows(tokenizer, (TINY / "calib.txt").read_text("utf-8"), window=64, windows=4)
    cases = {
        ("experts", "hessian, own only"): ("hessian", [("*.experts.*", {}), ("*", None)], 0.0),
        ("routers", "naive"): ("naive", [("*.gate.linear", {}), ("*", None)], None),
    }
    rows = {(row["layers"], row["method"]): row for row in measured["rows"]}
    for key, (method, rules, prior) in cases.items():
        prepared = fp4pass.prepare(copy.deepcopy(model), method, rules=rules, expert_prior=prior)
        fp4pass.calibrate(prepared, [calib], progress=False)
        converted = fp4pass.convert(prepared, "nvfp4", weight_only=True)
        found = fp4pass.evaluate(
            converted,
            tokenizer,
            (TINY / "eval.txt").read_text("utf-8"),
            model,
            window=64,
            windows=6,
            progress=False,
        )
        text = rows[key]["texts"]["eval"]
        assert text["kl"]["value"] == pytest.approx(found.kl, rel=1e-4)
        assert text["perplexity"]["value"] == pytest.approx(found.perplexity, rel=1e-5)
        names = {row.name.rpartition(".")[2] for row in fp4pass.report(converted).converted}
        assert names == ({"linear"} if key[0] == "routers" else {"gate_up_proj", "down_proj"})
    assert rows["routers", "naive"]["choices_kept"] < 1


def test_every_case_has_what_it_is_compared_with(quality: Any) -> None:
    """But sse in the sweep."""
    for chosen, without in ((quality.cases(8), []), (quality.sweep(), ["sse"] * 3)):
        cases = list(chosen)
        assert len(set(cases)) == len(cases)
        earlier = [
            (case, other in cases[:i]) for i, case in enumerate(cases) for other in case.simpler()
        ]
        assert [case.method for case, there in earlier if not there] == without


# ---- the page ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(page: Any) -> Any:
    return page.load(RESULTS)


@pytest.fixture(scope="module")
def rows(results: Any) -> list[Any]:
    """All rows but those of the sweep."""
    return [row for stem in results if stem.count("-") for row in results[stem]["rows"]]


def test_all_was_measured(quality: Any, results: Any, rows: list[Any]) -> None:
    names = [(case.layers, case.name) for case in quality.cases(0)]
    for fmt in quality.FORMATS:
        for weight_only in (True, False):
            of = [r for r in rows if (r["format"], r["weight_only"]) == (fmt, weight_only)]
            assert [(row["layers"], row["method"]) for row in of] == names
    swept = [(row["method"], row["tokens"]) for row in results["sweep"]["rows"]]
    assert swept == [(case.name, 512 * case.windows) for case in quality.sweep()]
    assert len({json.dumps(results[stem]["texts"]) for stem in results if stem != "training"}) == 1


def test_the_model_is_the_one_that_was_trained(results: Any) -> None:
    trained = results["training"]
    for stem in results.keys() - {"training"}:
        assert results[stem]["parameters"] == trained["parameters"]
        # In bfloat16, and here in float32.
        perplexity = results[stem]["original"]["eval"]["perplexity"]["value"]
        assert perplexity == pytest.approx(trained["results"]["eval"]["perplexity"], rel=3e-3)


def text_of(row: Any) -> Any:
    return row["texts"]["eval"]


def test_what_moe_md_says_of_experts(rows: list[Any]) -> None:
    """ "layer only" has the KL of sse, or more."""
    alone = {
        (r["format"], r["weight_only"], r["method"]): text_of(r)["kl"]["value"]
        for r in rows
        if r["layers"] == "experts"
    }
    for fmt, weight_only, method in alone:
        if method.endswith(", layer only"):
            assert alone[fmt, weight_only, method] >= alone[fmt, weight_only, "sse"]


def test_what_moe_md_says_of_priors(results: Any, rows: list[Any]) -> None:
    """From 4,096 tokens on none is better than the default; with 512 tokens none than sse."""
    few = [row for row in results["sweep"]["rows"] if row["tokens"] == 512]
    (sse,) = [text_of(row)["kl"]["value"] for row in few if row["method"] == "sse"]
    assert all(text_of(row)["kl"]["value"] > sse for row in few if row["method"] != "sse")
    assert few[1]["expert_tokens"][:2] == [0, 10]
    by_kl = sorted(few, key=lambda row: text_of(row)["kl"]["value"])
    best = next(row for row in by_kl if row["method"].startswith("gptq"))
    assert best["method"] == "gptq, prior 512"
    for row in (*results["sweep"]["rows"], *rows):
        method, _, prior = row["method"].partition(", ")
        if prior:
            change = text_of(row)["against"][f"{row['layers']}: {method}"]["kl"]
            if row["tokens"] > 512:
                assert change["value"] > 0 or not change["significant"]
            elif prior == "own only":
                assert change["value"] > 0 and change["significant"]
            if row["tokens"] > 512 and prior == "own only":
                default = text_of(row)["kl"]["value"] - change["value"]
                assert change["value"] < 0.02 * default or not change["significant"]


def test_what_moe_md_says_of_routers(results: Any, rows: list[Any]) -> None:
    said = (ROOT / "docs" / "moe.md").read_text("utf-8").replace("\n", " ")
    pattern = (
        r"all (\d+) cases, by (\d+) to (\d+) % .*? by ([\d.]+) % at most, and in (\d+) cases no "
        r"difference is seen. They are ([\d.]+) % of the weights"
    )
    (numbers,) = re.findall(pattern, re.sub(" +", " ", said))
    cases = [row for row in rows if row["layers"] == "all and routers"]
    changes = [text_of(row)["against"][f"all: {row['method']}"] for row in cases]
    before = [
        text_of(row)["kl"]["value"] - change["kl"]["value"]
        for row, change in zip(cases, changes, strict=True)
    ]
    shares = [c["kl"]["value"] / kl for c, kl in zip(changes, before, strict=True)]
    ratios = [change["perplexity_ratio"] for change in changes]
    recipe = results["training"]["recipe"]
    size = recipe["num_hidden_layers"] * recipe["num_experts"] * recipe["hidden_size"]
    assert all(change["kl"]["significant"] and change["kl"]["value"] > 0 for change in changes)
    assert numbers == (
        f"{len(cases)}",
        f"{100 * min(shares):.0f}",
        f"{100 * max(shares):.0f}",
        f"{100 * (max(ratio['value'] for ratio in ratios) - 1):.2f}",
        f"{sum(not ratio['significant'] for ratio in ratios)}",
        f"{100 * size / results['training']['parameters']:.2f}",
    )


def test_what_moe_md_says_of_the_load(results: Any, rows: list[Any]) -> None:
    (spread,) = {tuple(row["expert_tokens"]) for row in rows if row["expert_tokens"]}
    said = (ROOT / "docs" / "moe.md").read_text("utf-8")
    assert f"{spread[2]:,} of {rows[0]['tokens']:,} tokens, and others get none" in said
    assert spread[0] == 0
