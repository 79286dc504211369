"""Sentence-transformers: converted models are saved and loaded by its own methods; CLIP too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fp4pass
from fp4pass.integrations import PackedConfig
from fp4pass.nn.linear import QuantizedLinear

sentence_transformers = pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer import modules  # noqa: E402

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a the cat dog sat ran on mat home".split()
TEXTS = ["a cat sat on the mat", "the dog ran home"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": len(WORDS)}
    torch.manual_seed(0)
    folder, dtype = tmp_path / "encoder", torch.bfloat16
    transformers.BertModel(transformers.BertConfig(**sizes)).to(dtype).save_pretrained(folder)
    vocab = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizerFast(vocab=vocab).save_pretrained(folder)
    encoder = modules.Transformer(str(folder), model_kwargs={"dtype": dtype})
    pooling = modules.Pooling(64, "mean")
    head = modules.Dense(64, 32).to(dtype)
    return SentenceTransformer(modules=[encoder, pooling, head, modules.Normalize()], device="cpu")


def embeddings(model: Any) -> Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


def packed_layers(model: Any) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]


def test_it_comes_back_packed(model: Any, tmp_path: Path) -> None:
    before = embeddings(model)
    fp4pass.convert(model, "nvfp4a16", "sse", progress=False)
    (skipped,) = [row for row in fp4pass.report(model).skipped if row.name.startswith("2.")]
    assert "a head" in skipped.skip_reason
    after = embeddings(model)
    assert torch.cosine_similarity(before, after).min() > 0.9
    model.save_pretrained(str(tmp_path / "packed"))
    dtype = {"dtype": before.dtype}
    for given in ({}, {"quantization_config": PackedConfig()}):
        loaded = SentenceTransformer(
            str(tmp_path / "packed"), device="cpu", model_kwargs={**dtype, **given}
        )
        assert packed_layers(loaded) == packed_layers(model)
        assert torch.equal(embeddings(loaded), after)
    loaded.save_pretrained(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu", model_kwargs=dtype)
    assert torch.equal(embeddings(again), after)


def test_encode_calibrates_and_dequantize_undoes(model: Any, tmp_path: Path) -> None:
    fp4pass.prepare(model, "hessian")
    # Padding would enter the statistics of BERT's pooler.
    model.encode(TEXTS, batch_size=1)
    fp4pass.convert(model, "nvfp4", progress=False)
    row = fp4pass.report(model).converted[0]
    assert row.tokens > 0 and row.output_error is not None
    model.save_pretrained(str(tmp_path / "packed"))
    dtype = {"dtype": embeddings(model).dtype}
    loaded = SentenceTransformer(str(tmp_path / "packed"), device="cpu", model_kwargs=dtype)
    assert torch.equal(embeddings(loaded), embeddings(model))
    fp4pass.dequantize(model)
    model.save_pretrained(str(tmp_path / "dense"))
    assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()
    dense = SentenceTransformer(str(tmp_path / "dense"), device="cpu", model_kwargs=dtype)
    assert torch.equal(embeddings(dense), embeddings(model))
