"""fp4pass quantize of models that text reaches a part of, and of encoders with decoders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CALIBRATED, run, run_json
from small_models import TINY
from torch import nn

import fp4pass
from fp4pass.errors import CalibrationError
from fp4pass.record.config import LinearConfig

transformers = pytest.importorskip("transformers")
for package in ("typer", "rich", "yaml"):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures("offline")

TEXT: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
PAIR: dict[str, Any] = {
    **{"vocab_size": 2048, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
}


def llava() -> Any:
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=64)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=7)
    )


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2},
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 64},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**PAIR, max_position_embeddings=128)
    )


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=2048, d_model=64, d_kv=32, d_ff=128, num_layers=1, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(**PAIR, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return transformers.WhisperForConditionalGeneration(config)


def folder_of(make: Callable[[], Any], folder: Path) -> Path:
    torch.manual_seed(0)
    make().bfloat16().eval().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (llava, ("model.vision_tower.*", "model.multi_modal_projector.*")),
        (qwen2_vl, ("model.visual.*",)),
        (gemma3, ("model.vision_tower.*",)),
    ],
)
def test_what_text_does_not_reach_is_skipped(
    make: Callable[[], Any], beside: tuple[str, ...], tmp_path: Path
) -> None:
    source, target = folder_of(make, tmp_path / "m"), tmp_path / "q"
    result = run("quantize", source, "-o", target, *CALIBRATED)
    line = f"text does not reach {', '.join(beside)}: these layers are skipped"
    assert f"fp4pass: {line}" in result.stderr.splitlines()
    found = run_json("inspect", target)
    assert found["recipe"]["rules"] == [{glob: {"unreached": "skip"}} for glob in beside]
    model = fp4pass.load(target)
    report = fp4pass.report(model)
    assert len(report.converted) == 7
    assert all("language_model" in row.name for row in report.converted)
    unseen = [row for row in report.skipped if row.skip_reason == "calibration never reached it"]
    assert len(unseen) >= 4 and not any("language_model" in row.name for row in unseen)
    with torch.no_grad():
        assert model(input_ids=torch.arange(16)[None] + 20).logits.isfinite().all()
    # A recipe alone would quantize what was skipped.
    run("verify", target, "--reference", source, "--samples", 1, "--seq-len", 16)


# Of T5 stock transformers cannot load what is packed.
@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:transformers cannot load this folder")
@pytest.mark.parametrize("make", [bart, t5])
def test_a_decoder_reads_the_text_a_place_later(make: Callable[[], Any], tmp_path: Path) -> None:
    source, target = folder_of(make, tmp_path / "m"), tmp_path / "q"
    assert "does not reach" not in run("quantize", source, "-o", target, *CALIBRATED).stderr
    model = fp4pass.load(target)
    rows = fp4pass.report(model).converted
    assert {row.tokens for row in rows} == {256}
    assert {"encoder", "decoder"} <= {part for row in rows for part in row.name.split(".")}
    ids = torch.arange(16)[None] + 20
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).logits.isfinite().all()


def test_what_reads_no_text_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    source = folder_of(whisper, tmp_path / "m")
    (source / "model.safetensors").unlink()
    error = run("quantize", source, "-o", tmp_path / "q", *CALIBRATED, code=2).stderr
    assert "of type whisper needs more than text. Calibrate it in Python on batches" in error


def test_a_layer_of_the_text_part_that_is_not_reached_is_an_error() -> None:
    calibrating = pytest.importorskip("fp4pass.cli.calibrating")

    def calibrated(model: Any, recipe: fp4pass.Recipe) -> Any:
        call = calibrating.one_call(model, recipe)
        with calibrating.calibrated(call, [torch.arange(20, 84)], 8) as arguments:
            return arguments

    model = llava().eval()
    model.model.language_model.spare = nn.Linear(64, 64)
    recipe = fp4pass.Recipe()
    arguments = calibrated(model, recipe)
    with pytest.raises(CalibrationError, match=r"^model\.language_model\.spare: calibration never"):
        fp4pass.convert(model, **arguments)
    # What the user asks for holds for all layers.
    model = llava().eval()
    recipe = recipe.override({"unreached": "sse"})
    arguments = calibrated(model, recipe)
    assert arguments["rules"] == []
    rules = [("*vision_tower*", {"method": "sse", "weight_only": True})]
    recipe = fp4pass.Recipe(LinearConfig(), rules)
    model = llava().eval()
    arguments = calibrated(model, recipe)
    fp4pass.convert(model, **arguments)
    rows = fp4pass.report(model).converted
    methods = {row.config.method_name for row in rows if "vision" in row.name}
    assert methods == {"sse"} and len(rows) == 7 + 6


def test_inputs_in_4_bits_are_skipped_where_their_scale_is_not_known(tmp_path: Path) -> None:
    source = folder_of(llava, tmp_path / "m")
    options = ("--scheme", "nvfp4", "--method", "sse", *CALIBRATED)
    found = run_json("quantize", source, "-o", tmp_path / "q", *options)
    assert found["recipe"]["rules"][0] == ["model.vision_tower.*", None]
    assert found["summary"][0]["layers"] == 7
