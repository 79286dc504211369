"""Packed weights of what is no linear layer, as others write them, are dense in the model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp4pass
from fp4pass.checkpoint import transcode
from fp4pass.checkpoint.reader import open_checkpoint

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
}
MOE = {
    **{"num_experts": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"decoder_sparse_step": 2},
}
IDS = torch.arange(4, 36).reshape(2, 16)

# The class, its config, and the module that others pack.
MODELS = {
    "embedding": ("Llama", {}, "model.embed_tokens"),
    "tied": ("Gemma3", {"layer_types": ["full_attention"] * 2}, "model.embed_tokens"),
    "router": ("Qwen3Moe", MOE, "model.layers.1.mlp.gate"),
}
SCHEMES = {
    "nvfp4": ("compressed-tensors", "nvfp4a16"),
    "mxfp4": ("compressed-tensors", "mxfp4a16"),
    "fp8": ("compressed-tensors", "fp8"),
    "fp8_block": ("compressed-tensors", "fp8_block"),
    "modelopt": ("modelopt", "nvfp4a16"),
    "modelopt-fp8": ("modelopt", "fp8"),
    "quark": ("quark", "mxfp4a16"),
    "finegrained": ("finegrained-fp8", "fp8_block"),
}


def packed_folder(kind: str, scheme: str, folder: Path) -> tuple[str, torch.Tensor]:
    """A folder with a packed module that is no linear layer: its name, and its numbers."""
    family, options, name = MODELS[kind]
    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config(**SIZES, **options), dtype=torch.bfloat16
    )
    layout, fmt = SCHEMES[scheme]
    # In its place stands a linear layer while it is packed and saved.
    linear = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight)
    linear.weight.data[0] *= 100
    model.set_submodule(name, linear)
    # We write no embedding there, and others do.
    beside = kind != "router" and layout == "finegrained-fp8"
    if beside:
        model.set_submodule(name, copy.deepcopy(linear))
        fp4pass.convert(linear, fmt, "naive")
    if kind == "tied":
        model.lm_head.weight = model.get_submodule(name).weight
    skipped = [("*.experts.*", None)] if kind == "router" else []
    fp4pass.convert(model, fmt, "naive", rules=[(name, None if beside else {}), *skipped])
    fp4pass.save(model, folder, layout=layout)
    (folder / "fp4pass.json").unlink()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if beside:
        tensors[f"{name}.weight"] = linear.weight_packed.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = linear.weight_scale
    if kind == "tied":
        tensors.pop("lm_head.weight", None)
        config_file = folder / "config.json"
        declared = json.loads(config_file.read_text()) | {"tie_word_embeddings": True}
        config_file.write_text(json.dumps(declared))
    save_file(tensors, file, metadata={"format": "pt"})
    assert name in open_checkpoint(folder).layers
    return name, linear.weight.detach().clone()


@pytest.mark.filterwarnings("ignore:The folder has no tokenizer", "ignore:transformers cannot load")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_it_has_the_numbers_of_the_folder_and_a_row(tmp_path: Path, kind: str, scheme: str) -> None:
    name, weight = packed_folder(kind, scheme, tmp_path / "q")
    loaded = fp4pass.load(tmp_path / "q")
    config = fp4pass.integrations.PackedConfig()
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", quantization_config=config
    )
    logits = []
    for model in (loaded, other):
        module: Any = model.get_submodule(name)
        assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.bfloat16
        assert torch.equal(module.weight, weight)
        assert (model.lm_head.weight is module.weight) == (kind == "tied")
        (row,) = (row for row in fp4pass.report(model).rows if row.name == name)
        scheme_name = open_checkpoint(tmp_path / "q").layers[name].scheme
        kind_name = type(module).__name__
        assert row.config is None and row.skip_reason == (
            f"stored in {scheme_name}; {kind_name} is no linear layer, so its weight is dense here"
        )
        logits.append(model(IDS).logits)
    assert torch.equal(*logits)
    # Saved again it is dense, for whoever reads it.
    fp4pass.save(loaded, tmp_path / "r")
    again = fp4pass.load(tmp_path / "r")
    assert torch.equal(again(IDS).logits, logits[0])
    (tmp_path / "r" / "fp4pass.json").unlink()
    assert torch.equal(fp4pass.load(tmp_path / "r")(IDS).logits, logits[0])
    transcode(tmp_path / "q", tmp_path / "dense", "bf16")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(plain.get_submodule(name).weight, weight)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.mT)


class More(nn.Linear):
    """A subclass that is more than an nn.Linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


@pytest.mark.parametrize("make", [Odd, lambda: More(32, 32, bias=False)], ids=["bare", "subclass"])
def test_so_has_a_module_of_ones_own(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    packed = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    fp4pass.save(fp4pass.convert(packed, "nvfp4a16", "sse"), tmp_path / "q")
    model: Any = nn.Sequential(nn.Linear(32, 32), make())
    loaded: Any = fp4pass.load(tmp_path / "q", model=model)
    assert torch.equal(loaded[1].weight, packed[1].weight)
    rows = {row.name: row.skip_reason for row in fp4pass.report(loaded).rows}
    assert not rows["0"] and "is no linear layer, so its weight is dense here" in rows["1"]
    x = torch.randn(4, 32)
    torch.testing.assert_close(loaded(x), torch.relu(packed(x)))
