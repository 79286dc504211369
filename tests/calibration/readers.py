"""A tokenizer with a chat template, and a small model that reads images, with its processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import TINY

# Roles and contents, what a turn calls, and the tools: enough to see what reached it.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ 'tools ' + tools | tojson + '\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if m.tool_calls %} {{ m.tool_calls | tojson }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
)
# Of a processor: the content of a turn is a list of parts.
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how do I sort a list?"},
    {"role": "assistant", "content": "with sorted(list)"},
]


def tokenizer(template: str | None = TEMPLATE) -> Any:
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoTokenizer.from_pretrained(TINY)
    found.chat_template = template
    return found


def processor(template: str | None = PARTS) -> Any:
    """Of images of 28 x 28 in four patches."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    own = tokenizer(None)
    own.add_tokens(["<image>"], special_tokens=True)
    size = {"height": 28, "width": 28}
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size),
        own,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def vision_model() -> Any:
    transformers = pytest.importorskip("transformers")
    text = {
        **{"vocab_size": 2049, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"max_position_embeddings": 128, "pad_token_id": 0},
    }
    vision = {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 64},
    }
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=2048,
        # The last layer is read, so that calibration reaches every one.
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def picture(seed: int = 0) -> Any:
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(0, 256, (40, 30, 3), generator=torch.Generator().manual_seed(seed))
    return image.fromarray(pixels.byte().numpy())
