"""Layer by layer, where a model changes something between layers, or has modules side by side."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass

WIDTH = 32
CROSS = fp4pass.Gptq(target="cross")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Model(nn.Module):
    """Changes what layers return before the next one reads it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.in_place:
                x[:, 1::2] += 1
            else:
                x = nn.functional.layer_norm(x, [WIDTH])
        return x


class Heads(nn.Module):
    """Layers, and modules side by side that read what they return."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> list[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return [self.heads[i](x * (i + 1)) for i in self.order]


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 20, WIDTH)
    return [
        {name: torch.randn(sizes, generator=generator) for name in ("x",)} for _ in range(count)
    ]


def made(kind: Any, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(*arguments).eval()


def calibrated(model: Any, method: Any, data: Any, loop: bool = False, **options: Any) -> Any:
    fp4pass.prepare(model, method, **options)
    if not loop:
        return fp4pass.calibrate(model, data, progress=False)
    with torch.no_grad():
        for batch in data:
            model(**batch)
    return model


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_layers_behind_a_change_have_their_inputs_in_the_float_model(
    in_place: bool, loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    float_model, data = made(Model, in_place), batches()
    whole = calibrated(copy.deepcopy(float_model), "hessian", data)
    fp4pass.convert(whole, "nvfp4a16")
    model = calibrated(copy.deepcopy(float_model), "hessian", data, loop, sequential=True)
    with caplog.at_level("WARNING", logger="fp4pass"):
        fp4pass.convert(model, "nvfp4a16")
    assert "layers.1, layers.2: the model calls them with more" in caplog.text
    # The inputs of their first linears are those of the whole float model; none is the result of
    # a quantized layer.
    for one, other in zip(model.layers, whole.layers, strict=True):
        assert_same_bits(one.a, other.a)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2)])
def test_modules_side_by_side_are_calibrated_as_those_outside_of_stacks(
    order: tuple[int, ...], loop: bool
) -> None:
    float_model, data = made(Heads, order), batches()
    options: dict[str, Any] = {"unreached": "skip"}
    models = [
        calibrated(copy.deepcopy(float_model), "hessian", data, loop, sequential=way, **options)
        for way in (False, True)
    ]
    whole, model = (fp4pass.convert(each, "nvfp4a16") for each in models)
    assert_same_bits(model.heads, whole.heads)
    fp4pass.convert(
        copy.deepcopy(float_model), "nvfp4a16", quality="best", data=data, progress=False, **options
    )


def vision_language_model() -> Any:
    """A small Qwen3-VL: image features are added between its first layers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    patches = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    config = transformers.Qwen3VLConfig(
        text_config=dict(sizes, **heads, vocab_size=160, num_hidden_layers=3, rope_scaling=rope),
        vision_config=dict(sizes, **patches, **tower, deepstack_visual_indexes=[0, 1]),
        image_token_id=150,
        vision_start_token_id=152,
    )
    torch.manual_seed(0)
    cls = transformers.Qwen3VLForConditionalGeneration
    return cls._from_config(config, dtype=torch.float32).eval()


def image_batch(seed: int, height: int = 4, width: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = height * width
    words = torch.randint(4, 140, (24,), generator=generator)
    image = torch.tensor([152, *[150] * (count // 4), 153])
    row = torch.cat([words[:4], image, words[4:]])[None]
    return {
        "input_ids": row,
        "pixel_values": torch.randn(count, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
        "mm_token_type_ids": (row == 150).long(),
    }


@pytest.mark.parametrize("images", [True, False])
def test_a_model_that_adds_image_features_between_layers(images: bool) -> None:
    float_model = vision_language_model()
    text = {"input_ids": torch.randint(4, 140, (2, 24), generator=torch.Generator().manual_seed(5))}
    data = [image_batch(1), image_batch(2, 4, 8), text] if images else [text]
    best = copy.deepcopy(float_model)
    fp4pass.convert(best, "nvfp4a16", quality="best", data=data, progress=False)
    rules = () if images else [("model.visual.*", None)]
    ways = [
        calibrated(copy.deepcopy(float_model), "hessian", data, sequential=way, rules=rules)
        for way in (False, True)
    ]
    whole, model = (fp4pass.convert(each, "nvfp4a16") for each in ways)
    names = {row.name for row in fp4pass.report(model).converted}
    assert names == {row.name for row in fp4pass.report(whole).converted}
    assert names == {row.name for row in fp4pass.report(best).converted}
    assert any(name.startswith("model.visual.deepstack_merger_list.1") for name in names) == images
    if images:
        merged = "model.visual.deepstack_merger_list"
        assert_same_bits(model.get_submodule(merged), whole.get_submodule(merged))
    with torch.no_grad():
        expected = float_model(**data[0]).logits
        for each in (whole, model, best):
            assert (each(**data[0]).logits - expected).norm() < 0.2 * expected.norm()
