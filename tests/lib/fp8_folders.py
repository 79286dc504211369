"""Folders in FP8 in the form of other libraries, made by hand.

The names, dtypes and shapes are those of folders that llm-compressor 0.14 and ModelOpt 0.47 wrote
of such models, beside which they were once checked, but for scales of tensors and blocks, which
llm-compressor has in bfloat16. Those of DeepSeek-V3 and of mixed releases are in the form of their
published configs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import foreign
import native
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
SIZES = dict(vocab_size=160, hidden_size=128, num_hidden_layers=2, max_position_embeddings=128)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)

# What quantizes a weight: codes, scale as it is stored, and the dense weight in float32.
Fp8 = tuple[Tensor, Tensor, Tensor]


def dense_model(intermediate_size: int = 192) -> Any:
    """A model whose matrices do not fill whole tiles of 128, by default."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(intermediate_size=intermediate_size, **SIZES, **HEADS)
    return transformers.Qwen3ForCausalLM(config).bfloat16().eval()


def mixture_model(moe_intermediate_size: int = 128) -> Any:
    """A mixture whose experts fill whole tiles, by default."""
    import transformers

    torch.manual_seed(0)
    mixture = dict(num_experts=4, num_experts_per_tok=2)
    mixture |= dict(intermediate_size=192, moe_intermediate_size=moe_intermediate_size)
    config = transformers.Qwen3MoeConfig(**mixture, **SIZES, **HEADS)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()


def _quantized(weight: Tensor, scale: Tensor, stored: Tensor | None = None) -> Fp8:
    codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
    return codes, scale if stored is None else stored, codes.float() * scale


def by_row(weight: Tensor) -> Fp8:
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    return _quantized(weight, scale.float(), scale)


def by_row_float32(weight: Tensor) -> Fp8:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return _quantized(weight, scale, scale.flatten())


def by_tensor(weight: Tensor, shape: tuple[int, ...] = ()) -> Fp8:
    scale = weight.float().abs().amax() / 448
    return _quantized(weight, scale, scale.reshape(shape))


def by_block(weight: Tensor, tall: int = 128, wide: int = 128, ndim: int = 2) -> Fp8:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
    tiles = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale = tiles.abs().amax((1, 3)) / 448
    whole = scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:rows, :columns]
    return _quantized(weight, whole, scale if ndim == 2 else scale[:, None, :, None])


def by_group(weight: Tensor) -> Fp8:
    amax = weight.float().unflatten(1, (-1, 32)).abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 9
    whole = torch.ldexp(torch.ones_like(amax), exponent).repeat_interleave(32, 1)
    return _quantized(weight, whole, (exponent + 127).to(torch.uint8))


def make(
    model: Any, folder: Path, kind: str, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Tensor]:
    """Write a model in FP8 as `KINDS` has it; return the dense weights in float32, by layer."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("proj.weight")]
    attention = [name for name in names if "self_attn" in name]
    quantize, suffix, static, declare, side = {**KINDS, **OTHER_BLOCKS}[kind]
    mixed = "mixed" in kind
    dense: dict[str, Tensor] = {}
    if mixed:
        others = [name for name in names if name not in attention]
        copy = folder.with_name(f"{folder.name}-float")
        shutil.copytree(folder, copy)
        shutil.rmtree(folder)
        algorithm = "NVFP4" if static else "W4A16_NVFP4"
        weights = foreign.modelopt(copy, folder, others, algorithm)
        dense |= {name: weight.float() for name, weight in weights.items()}
        tensors = load_file(folder / "model.safetensors")
        for name in others if static else ():
            tensors[f"{name}.input_scale"] = torch.tensor(3.0 / 2688)
        if side is None:
            tensors = _as_compressed_tensors(tensors, others)
            (folder / "hf_quant_config.json").unlink()
    for name in attention if mixed else names:
        codes, scale, dense[name] = quantize(tensors.pop(f"{name}.weight"))
        packed = "_packed" if side is None and codes.dtype == torch.uint8 else ""
        tensors[f"{name}.weight{packed}"], tensors[f"{name}.{suffix}"] = codes, scale
        if static:
            tensors[f"{name}.input_scale"] = torch.tensor([3.0 / 448])[0 if side else slice(1)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    declared = declare(names, attention, ignore)
    config["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(config))
    if side is not None:
        facts = {"producer": declared["producer"], "quantization": side(declared)}
        (folder / "hf_quant_config.json").write_text(json.dumps(facts))
    return dense


def _as_compressed_tensors(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Give weights in nvfp4 the names of compressed-tensors; it divides by the global scale."""
    found = dict(tensors)
    for name in names:
        found[f"{name}.weight_packed"] = found.pop(f"{name}.weight")
        scale = found.pop(f"{name}.weight_scale_2")
        found[f"{name}.weight_global_scale"] = (1 / scale).reshape(1)
    return found


_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "actorder": None}
_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
_NVFP4 |= {"group_size": 16, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}


_COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def _group(fmt: str, targets: list[str], weights: Any, inputs: Any) -> dict[str, Any]:
    group = {"targets": targets, "format": fmt, "weights": weights, "output_activations": None}
    return {**group, "input_activations": inputs}


def _compressed_tensors(fmt: str, weights: Any, inputs: Any) -> Callable[..., dict[str, Any]]:
    def declare(names: Any, attention: Any, ignore: tuple[str, ...]) -> dict[str, Any]:
        args = inputs and {**_ARGS, **inputs}
        group = _group(fmt, ["Linear"], {**_ARGS, **weights}, args)
        whole = {**_COMPRESSED, "format": fmt, "ignore": [*ignore], "kv_cache_scheme": None}
        return {**whole, "config_groups": {"group_0": group}}

    return declare


def _two_groups(names: Any, attention: Any, ignore: tuple[str, ...]) -> dict[str, Any]:
    """As published mixed folders have it: both groups have patterns, and the first one wins."""
    inputs = {**_ARGS, "strategy": "token", "dynamic": True}
    of_attention = [r"re:.*self_attn\.(q|k|v|o)_proj$"]
    row = _group("float-quantized", of_attention, {**_ARGS, "strategy": "channel"}, inputs)
    rest = _group("nvfp4-pack-quantized", [r"re:.*_proj$"], _NVFP4, None)
    whole = {**_COMPRESSED, "format": "mixed-precision"}
    return {**whole, "config_groups": {"group_0": row, "group_1": rest}, "ignore": [*ignore]}


_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def _modelopt(algorithm: str) -> Callable[..., dict[str, Any]]:
    def declare(names: Any, attention: Any, ignore: tuple[str, ...]) -> dict[str, Any]:
        whole = {"quant_algo": algorithm, "ignore": [*ignore, "model.embed_tokens"]}
        return {**whole, "producer": _PRODUCER, "quant_method": "modelopt"}

    return declare


def _modelopt_mixed(names: Any, attention: Any, ignore: Any) -> dict[str, Any]:
    layers: dict[str, Any] = {name: {"quant_algo": "FP8"} for name in attention}
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    for name in names:
        if name not in attention:
            # All experts of a layer have one entry.
            head, found, _ = name.partition(".experts.")
            layers[f"{head}.experts" if found else name] = nvfp4
    whole = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    return {**whole, "producer": _PRODUCER, "quant_method": "modelopt"}


def _side(declared: Mapping[str, Any]) -> dict[str, Any]:
    layers = declared.get("quantized_layers")
    own = {"quant_algo": declared["quant_algo"], "kv_cache_quant_algo": None}
    more = {} if layers is None else {"quantized_layers": layers}
    return {**own, **more, "exclude_modules": declared["ignore"]}


def _finegrained(tall: int = 128, wide: int = 128) -> Callable[..., dict[str, Any]]:
    def declare(names: Any, attention: Any, ignore: tuple[str, ...]) -> dict[str, Any]:
        whole = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**whole, "weight_block_size": [tall, wide], "modules_to_not_convert": [*ignore]}

    return declare


_TOKEN = {"strategy": "token", "dynamic": True}
_OF_128 = {"strategy": "group", "group_size": 128, "dynamic": True}
_MXFP4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

# By name: what quantizes, the name of its scales, whether inputs have a stored one, what declares
# it, and what is in hf_quant_config.json.
KINDS: dict[str, tuple[Callable[[Tensor], Fp8], str, bool, Callable[..., Any], Any]] = {
    "ct-row": (by_row, "weight_scale", False, _compressed_tensors(
        "float-quantized", {"strategy": "channel"}, _TOKEN), None),
    "ct-row-a16": (by_row, "weight_scale", False, _compressed_tensors(
        "float-quantized", {"strategy": "channel"}, None), None),
    "ct-tensor": (partial(by_tensor, shape=(1,)), "weight_scale", True, _compressed_tensors(
        "float-quantized", {"strategy": "tensor"}, {"strategy": "tensor"}), None),
    "ct-block": (by_block, "weight_scale", False, _compressed_tensors(
        "float-quantized", {"strategy": "block", "block_structure": [128, 128]},
        _OF_128), None),
    "ct-mxfp8": (by_group, "weight_scale", False, _compressed_tensors(
        "mxfp8-quantized", {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": True}),
        None),
    "ct-mixed": (by_row, "weight_scale", False, _two_groups, None),
    "mo-tensor": (by_tensor, "weight_scale", True, _modelopt("FP8"), _side),
    "mo-row": (
        by_row_float32, "weight_scale", False, _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), _side),
    "mo-block": (
        partial(by_block, ndim=4), "weight_scale", False,
        _modelopt("fp8_pb_wo"), _side),
    "mo-mxfp8": (by_group, "weight_scale", False, _modelopt("MXFP8"), _side),
    "mo-mixed": (by_tensor, "weight_scale", True, _modelopt_mixed, _side),
    "finegrained": (by_block, "weight_scale_inv", False, _finegrained(), None),
    # Weights in 4 bits, and inputs in FP8.
    "ct-w4a8": (native.mxfp4, "weight_scale", False, _compressed_tensors(
        "mxfp4-pack-quantized", _MXFP4, _TOKEN), None),
    "ct-w4a8-block": (native.mxfp4, "weight_scale", False, _compressed_tensors(
        "mxfp4-pack-quantized", _MXFP4, _OF_128), None),
    "mo-w4a8": (native.mxfp4, "weight_scale", True, _modelopt("W4A8_MXFP4_FP8"), _side),
}  # fmt: skip

# In blocks that are not read.
OTHER_BLOCKS = {
    "finegrained-64x64": (
        partial(by_block, tall=64, wide=64), "weight_scale_inv", False, _finegrained(64, 64), None),
    "ct-group": (partial(by_block, tall=1, wide=64), "weight_scale", False, _compressed_tensors(
        "float-quantized", {"strategy": "group", "group_size": 64}, None), None),
}  # fmt: skip
