"""Model cards: what README.md of a checkpoint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import converted, language_model, mlp, packed_model, tokens

import fp4pass
from fp4pass.errors import OptionError
from fp4pass.evaluation import Evaluation

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

HEADER = (
    "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- old\nbase_model: a/older\n---\n\n# Old\n"
)


def card_of(model: Any, folder: Path, **options: Any) -> Any:
    fp4pass.save(model, folder, **{"card": True} | options)
    return huggingface_hub.ModelCard.load(folder / "README.md")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "README.md").write_text(HEADER)
    return folder


def test_the_header_has_what_the_hub_reads(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = converted()
    cached = "/cache/hub/models--somebody--tiny/snapshots/0123abc"
    model.config._name_or_path = model.name_or_path = cached
    with caplog.at_level("INFO", "fp4pass"):
        first = card_of(model, tmp_path / "q", source=source)
    assert first.data.to_dict() == {
        **{"base_model": "somebody/tiny", "base_model_relation": "quantized"},
        **{"license": "apache-2.0", "language": ["en"], "pipeline_tag": "text-generation"},
        **{"library_name": "transformers", "quantized_by": "fp4pass"},
        "tags": ["fp4pass", "nvfp4", "compressed-tensors"],
    }
    assert "# Old" not in first.text
    assert "README.md: the model card replaces that of somebody/tiny" in caplog.messages
    # A packed folder hands its base model on.
    again = card_of(fp4pass.load(tmp_path / "q"), tmp_path / "r")
    assert again.data.to_dict() == first.data.to_dict()
    assert "[somebody/tiny](https://huggingface.co/somebody/tiny) in 4-bit" in again.text
    # A header that is no YAML is left out.
    (source / "README.md").write_text("---\nlicense: [a\n---\n")
    assert card_of(model, tmp_path / "s", source=source).data.license is None
    assert "its header cannot be read" in caplog.text


def test_the_page_says_what_was_made_how_and_how_good_it_is(tmp_path: Path) -> None:
    model = language_model()
    fp4pass.prepare(model, "hessian")
    fp4pass.calibrate(model, [tokens()], progress=False)
    fp4pass.convert(model, "nvfp4", "hessian", rules=[("*.3.*", None)])
    found = Evaluation(windows=1, tokens=511, perplexity=9.5, kl=0.0125, top1=0.914)
    text = card_of(model, tmp_path / "q", card={"WikiText-2": found}).text
    rows = fp4pass.report(model).converted
    error = 100 * sum(row.weight_error for row in rows) / len(rows)
    output = 100 * sum(row.output_error for row in rows) / len(rows)
    for line in (
        "# tiny_lm in nvfp4",
        "- 21 in nvfp4, by hessian",
        f"- means over layers: weight error {error:.2f} %, output error {output:.2f} %",
        "- WikiText-2: perplexity 9.50 of 511 tokens, KL to the original 0.0125 nats a token, "
        "same top token 91.4 %",
        "- 7 not: rule ('*.3.*', None)",
        "The layout is compressed-tensors, read by fp4pass, transformers, vLLM, SGLang.",
        'model = fp4pass.load("path/to/this/folder")',
        "vllm serve path/to/this/folder",
        "python -m sglang.launch_server --model-path path/to/this/folder",
    ):
        assert line in text.splitlines()
    made = f"`tiny_lm` in 4-bit floating point. fp4pass {fp4pass.__version__} packed 21 of 29"
    assert made in text
    assert '"hessian"' in text and '"tokens": 96' in text
    # No path of the machine that it was made on.
    assert str(tmp_path) not in text and "examples" not in text


def test_only_programs_that_read_the_folder_are_named(tmp_path: Path) -> None:
    text = card_of(converted("mxfp4"), tmp_path / "q", layout="fp4pass").text
    assert "The layout is fp4pass, read by fp4pass alone." in text
    assert "vllm" not in text and "sglang" not in text
    plain = card_of(packed_model(mlp()), tmp_path / "r")
    assert plain.data.library_name == "fp4pass" and "base_model" not in plain.data.to_dict()
    assert 'fp4pass.load("path/to/this/folder", model=model)  # a float Sequential' in plain.text


@pytest.mark.parametrize("given", ["yes", {"text": 3.5}])
def test_what_is_no_card_is_refused_before_anything_is_written(tmp_path: Path, given: Any) -> None:
    with pytest.raises(OptionError, match="card: expected True, False or evaluations as"):
        fp4pass.save(converted(), tmp_path / "q", card=given)
    assert not (tmp_path / "q").exists()
