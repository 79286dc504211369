"""Tiny folders with the very keys and dtypes of models that are published in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from foreign import GRID, nearest_codes
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor(GRID + [-value for value in GRID])


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and bytes of E8M0 of a weight [N, K], as the writers of MXFP4 make them, and values."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1).log2().floor() - 2
    step = exponent.exp2().unsqueeze(-1)
    codes = nearest_codes(blocks / step)
    values = (E2M1[codes.int()] * step).flatten(-2).bfloat16()
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8), values


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def quark(model: Any, folder: Path, inputs: bool = False) -> dict[str, Tensor]:
    """A folder as amd-quark 0.13 writes it in MXFP4; returns the weights by their layers."""
    model.save_pretrained(folder)
    tensors, dense = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        tensors[name], tensors[f"{layer}.weight_scale"], dense[layer] = mxfp4(tensors[name])
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    spec = {"dtype": "fp4", "group_size": 32, "ch_axis": -1, "qscheme": "per_group"}
    spec |= {"is_dynamic": False, "round_method": "half_even", "mx_element_dtype": None}
    spec |= {"scale_format": "e8m0", "scale_type": "float", "scale_calculation_mode": "even"}
    layers = {"bias": None, "output_tensors": None, "target_device": None, "weight": spec}
    layers["input_tensors"] = {**spec, "is_dynamic": True} if inputs else None
    declared = {"quant_method": "quark", "version": "0.13", "exclude": ["lm_head"]}
    declared |= {"export": {"pack_method": "reorder", "weight_format": "real_quantized"}}
    declared |= {"global_quant_config": layers, "kv_cache_quant_config": {}}
    declared |= {"layer_quant_config": {}, "layer_type_quant_config": {}}
    change_config(folder, quantization_config=declared)
    return dense


def deepseek_v4(model: Any, folder: Path, fp8: bool = True, mtp: bool = True) -> dict[str, Tensor]:
    """A folder with the keys of DeepSeek-V4; returns weights by their names on disk.

    Experts are int8 with scales in E8M0; others E4M3 with one for each block of 128 x 128.
    """
    model.save_pretrained(folder)
    tensors, dense = _published(load_file(folder / "model.safetensors")), {}
    for name in list(tensors):
        layer = name.removesuffix(".weight")
        if ".experts." in name:
            codes, scale, dense[name] = mxfp4(tensors[name])
            tensors[name] = codes.view(torch.int8)
            tensors[f"{layer}.scale"] = scale.view(torch.float8_e8m0fnu)
        elif fp8 and (".attn.w" in name or ".shared_experts." in name):
            weight = tensors[name].float()
            scale = torch.full([-(-size // 128) for size in weight.shape], 2.0**-9)
            tensors[name] = (weight * 2**9).to(torch.float8_e4m3fn)
            tensors[f"{layer}.scale"] = scale.to(torch.float8_e8m0fnu)
            dense[name] = (tensors[name].float() * 2.0**-9).bfloat16()
    for name in [n for n in tensors if n.startswith("layers.0.ffn.experts.0.")] if mtp else ():
        tensors[name.replace("layers.0", "mtp.0")] = tensors[name].clone()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    declared = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    declared |= {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config=declared, expert_dtype="fp4")
    return dense


def _published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of the folders of DeepSeek, which transformers does not write."""
    changes = {"model.": "", "lm_head.": "head.", "embed_tokens.": "embed.", "hc_head.": "hc_head_"}
    changes["hc_head_hc_"] = "hc_head_"

    def published(name: str) -> str:
        for before, after in changes.items():
            name = after + name.removeprefix(before) if name.startswith(before) else name
        return name

    return {published(name): tensor for name, tensor in tensors.items()}


def gpt_oss(folder: Path, packed: bool = True) -> Any:
    """Write a tiny gpt-oss with packed or float stacks of experts; return the model."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=2000)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, pad_token_id=0)
    kinds = ["full_attention", "sliding_attention"]
    experts = dict(num_local_experts=3, num_experts_per_tok=2)
    config = transformers.GptOssConfig(**sizes, **experts, layer_types=kinds)
    model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)
    if not packed:
        return model
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, tensors[f"{name}_scales"], _ = mxfp4(tensors.pop(name).mT)
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    kept = {"quant_method": "mxfp4", "modules_to_not_convert": [*dense, "lm_head"]}
    change_config(folder, quantization_config=kept)
    return model
