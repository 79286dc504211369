"""Heads of tasks and weights that the source lacks stay dense, whatever they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4pass
from fp4pass.quantization.plan import Plan, plan_layers
from fp4pass.record.config import LinearConfig

transformers = pytest.importorskip("transformers")

ENCODER: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0},
}
PAIR: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32},
    **{"decoder_ffn_dim": 32, "max_position_embeddings": 32, "pad_token_id": 0},
}
T5: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "decoder_start_token_id": 0,
}
PIXELS: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}
CLIP: dict[str, Any] = {"vision_config": PIXELS, "text_config": {}, "projection_dim": 32}
WAVE: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "conv_dim": [32], "conv_stride": [4], "conv_kernel": [4]},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    **{"num_feat_extract_layers": 1, "classifier_proj_size": 32},
}
DETR: dict[str, Any] = {
    **{"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None},
    "backbone_config": {
        **{"model_type": "resnet", "depths": [1], "hidden_sizes": [16], "embedding_size": 16},
        "out_features": ["stage1"],
    },
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32},
    **{"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}

# The layers that a class adds to its base model.
TASKS: list[tuple[str, str, dict[str, Any], str]] = [
    ("LlamaForSequenceClassification", "LlamaConfig", ENCODER, "score"),
    ("Qwen2ForQuestionAnswering", "Qwen2Config", ENCODER, "qa_outputs"),
    ("BertForMaskedLM", "BertConfig", ENCODER, "cls.predictions.transform.dense"),
    ("RobertaForCausalLM", "RobertaConfig", ENCODER, "lm_head"),
    (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 64},
        "pre_classifier classifier",
    ),
    ("T5ForQuestionAnswering", "T5Config", T5, "qa_outputs"),
    ("ViTForImageClassification", "ViTConfig", PIXELS, "classifier"),
    ("CLIPVisionModelWithProjection", "CLIPVisionConfig", PIXELS, "visual_projection"),
    ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAVE, "projector classifier"),
    ("DetrForObjectDetection", "DetrConfig", DETR, "class_labels_classifier bbox_predictor"),
]

# Classes of which all stays as it was: what is beside output embeddings is packed.
WHOLE: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", ENCODER),
    ("BertModel", "BertConfig", ENCODER),
    ("BartForConditionalGeneration", "BartConfig", PAIR),
    ("ProphetNetForCausalLM", "ProphetNetConfig", {"hidden_size": 32, "num_decoder_layers": 1}),
    ("CLIPModel", "CLIPConfig", CLIP),
]


def made(name: str, config: str, options: dict[str, Any], **more: Any) -> Any:
    """A model without memory."""
    kind = getattr(transformers, config)
    with torch.device("meta"):
        return getattr(transformers, name)(kind(**options, **more))


def planned(model: nn.Module, rules: Any = ()) -> Plan:
    return plan_layers(model, LinearConfig(method="sse", weight_only=True), rules)


@pytest.mark.parametrize(("name", "config", "options", "heads"), TASKS, ids=lambda each: str(each))
def test_what_a_task_adds_to_its_base_model_is_skipped(
    name: str, config: str, options: dict[str, Any], heads: str
) -> None:
    plan = planned(made(name, config, options))
    reasons = {layer.name: layer.skip_reason for layer in plan.skipped}
    told = [each for each, reason in reasons.items() if f"a head that {name} adds" in reason]
    outputs = [each for each, reason in reasons.items() if reason.startswith("output embedding")]
    parts = heads.split()
    assert all(any(part in each for part in parts) for each in told)
    assert all(any(part in each for each in (*told, *outputs)) for part in parts)
    assert not any(part in each.name for each in plan.layers for part in parts)
    assert len(plan.layers) >= 4


@pytest.mark.parametrize(("name", "config", "options"), WHOLE, ids=lambda each: str(each))
def test_base_models_and_language_models_keep_all_but_their_output(
    name: str, config: str, options: dict[str, Any]
) -> None:
    skipped = planned(made(name, config, options)).skipped
    assert all(
        each.skip_reason.startswith(("output embedding", "its weight is an embedding"))
        or "MultiheadAttention" in each.skip_reason
        or "without a linear layer" in each.skip_reason
        for each in skipped
    )


@pytest.mark.parametrize("labels", [1, 16])
def test_a_head_of_any_width_stays_dense_and_a_rule_takes_it(labels: int) -> None:
    model = made("LlamaForSequenceClassification", "LlamaConfig", ENCODER, num_labels=labels)
    assert [each.name for each in planned(model).skipped] == ["score"]
    if labels > 1:
        ruled = planned(model, [("score", {"fmt": "mxfp4"})])
        assert not ruled.skipped
        assert ruled.layers[-1].config.fmt == "mxfp4"


class Valued(nn.Module):
    """A language model with the value head of a reward, as users wrap one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Sequential(nn.Dropout(), nn.Linear(32, 1))
        # Of another width: it does not read the hidden states.
        self.tower = nn.Linear(48, 64)


def test_a_head_beside_a_wrapped_model_is_skipped() -> None:
    plan = planned(Valued(made("LlamaForCausalLM", "LlamaConfig", ENCODER)))
    reasons = {each.name: each.skip_reason for each in plan.skipped}
    assert reasons.keys() == {"pretrained_model.lm_head", "v_head.1"}
    assert (
        reasons["v_head.1"]
        == "a head that Valued adds to its base model; add a rule to quantize it"
    )
    assert "tower" in {each.name for each in plan.layers}


def test_a_traced_head_is_skipped_too() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER)).eval()
    graph = fp4pass.trace(model, {"input_ids": torch.arange(16).view(2, 8)}, cache_length=0)
    assert [each.name for each in planned(graph).skipped] == ["classifier"]


def test_weights_that_the_source_lacks_are_skipped(tmp_path: Path) -> None:
    config = transformers.BertConfig(**ENCODER)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    model = transformers.BertModel.from_pretrained(tmp_path)
    new = "its source has no weight for it, so it is new; add a rule to quantize it"
    assert {each.name: each.skip_reason for each in planned(model).skipped} == {"pooler.dense": new}
    assert not planned(model, [("pooler.dense", {})]).skipped
    # What somebody puts in the place of a weight that was read is no news.
    dense = model.encoder.layer[0].output.dense
    dense.weight = nn.Parameter(dense.weight.detach().clone())
    assert [each.name for each in planned(model).skipped] == ["pooler.dense"]
    # Nothing is known of a model that was not read, nor of a copy.
    assert not planned(transformers.BertModel(config)).skipped
    # Nor is one of another size, which may be pruned.
    narrow = {"intermediate_size": 64, "ignore_mismatched_sizes": True}
    other = transformers.BertModel.from_pretrained(tmp_path, **narrow)
    assert [each.name for each in planned(other).skipped] == ["pooler.dense"]
