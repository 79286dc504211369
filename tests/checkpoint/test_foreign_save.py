"""`save_pretrained` of other libraries refuses packed layers; `fp4pass.save` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp4pass
from fp4pass.errors import CheckpointError, StateError

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0},
}


class Mixin(nn.Module):
    """A model that writes its own config and state dict, as those of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "model.bin")


class Asking(Mixin):
    """One that knows fp4pass."""

    def save_pretrained(self, folder: Path) -> None:
        fp4pass.save(self, folder)


class Pipeline:
    """An object that is no module and writes the weights of one."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.unet.state_dict(), folder)


class Sentences(nn.Sequential):
    """A sequence whose first part is a model of transformers, with its config."""

    @property
    def config(self) -> Any:
        return self[0].config

    def save_pretrained(self, folder: Path) -> None:
        self[0].save_pretrained(folder)


def converted(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return fp4pass.convert(model, method="sse", weight_only=True)


def encoder() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def test_another_save_pretrained_refuses_and_says_what_to_call(tmp_path: Path) -> None:
    whole, part = converted(Mixin()), Mixin()
    converted(part.proj)
    for name, model in {"whole": whole, "part": part, "pipeline": Pipeline(whole)}.items():
        with pytest.raises(StateError, match=r"proj\.0: save_pretrained of .*fp4pass\.save\(model"):
            model.save_pretrained(tmp_path / name)
    # The state dict itself is everyone's own.
    assert "proj.0.weight_packed" in whole.state_dict()


def test_save_pretrained_that_asks_fp4pass_writes_what_loads(tmp_path: Path) -> None:
    model = converted(Asking())
    model.save_pretrained(tmp_path / "q")
    again = fp4pass.load(tmp_path / "q", model=Asking())
    x = torch.randn(2, 32)
    assert torch.equal(again(x), model(x))


def test_what_wraps_a_model_of_transformers_is_not_taken_for_one(tmp_path: Path) -> None:
    model = converted(Sentences(encoder(), nn.Identity()))
    fp4pass.save(model, tmp_path / "q")
    assert not (tmp_path / "q" / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"has no config\.json.*load\(dir, model=model\)"):
        fp4pass.load(tmp_path / "q")
    again = fp4pass.load(tmp_path / "q", model=Sentences(encoder(), nn.Identity()))
    assert torch.equal(again[0](torch.arange(8)[None])[0], model[0](torch.arange(8)[None])[0])
    model.save_pretrained(tmp_path / "other")
    inner = fp4pass.load(tmp_path / "other")
    assert torch.equal(inner(torch.arange(8)[None])[0], model[0](torch.arange(8)[None])[0])


def test_a_converted_part_that_says_how_it_is_packed_is_written_by_what_wraps_it(
    tmp_path: Path,
) -> None:
    inner = encoder()
    converted(inner)
    Sentences(inner, nn.Identity()).save_pretrained(tmp_path / "q")
    declared = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert declared["format"] == "nvfp4-pack-quantized"
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight_packed"
    assert torch.equal(tensors[name], inner.state_dict()[name])
