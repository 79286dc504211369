"""Checkpoints as other libraries write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def compressed_tensors(
    model: Any, folder: Path, scheme: str, ids: Tensor, rotation: int = 0
) -> dict[str, Tensor]:
    """Quantize and save a transformers model with compressed-tensors alone, by one of its presets.

    Inputs are calibrated on `ids`. The model computes with the dequantized weights afterwards,
    which are returned by the names of the layers.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    config = QuantizationConfig(
        config_groups={scheme: ["Linear"]},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    inputs = largest_inputs(model, ids)
    if rotation:
        apply_transforms(model, transform_config(rotation))
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        args, weight = module.quantization_scheme.weights, module.weight.data
        blocks = weight.float().unflatten(-1, (-1, args.group_size))
        low, high = blocks.amin(-1), blocks.amax(-1)
        given = {}
        if args.strategy == "tensor_group":
            given["global_scale"] = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data = given["global_scale"].float().reshape(1)
        scale, _ = calculate_qparams(low, high, args, **given)
        module.weight_scale.data = scale
        if hasattr(module, "input_global_scale"):
            amax = inputs[name]
            module.input_global_scale.data = generate_gparam(-amax, amax).float().reshape(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = model.state_dict()
    # The matrices, which every reader makes by itself.
    kept = {name: tensor for name, tensor in state.items() if "rotated_" not in name}
    model.save_pretrained(folder, state_dict=kept)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {n: m.weight.data for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}


def transform_config(rotation: int, *locations: str) -> dict[str, Any]:
    """The transform_config of Hadamard matrices on inputs, and on the weights that meet them."""
    apply = [
        {"targets": ["Linear"], "ignore": ["lm_head"], "location": each, "inverse": i > 0}
        for i, each in enumerate(locations or ("input", "weight_input"))
    ]
    return {"config_groups": {"rotated": dict(type="hadamard", head_dim=rotation, apply=apply)}}


def apply_transforms(model: nn.Module, config: dict[str, Any]) -> None:
    """Rotate inputs at each call, and weights now, with compressed-tensors."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    apply_transform_config(model, TransformConfig(**config))


def largest_inputs(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The largest magnitude in the input of every linear."""
    found: dict[str, Tensor] = {}
    names = {m: name for name, m in model.named_modules() if isinstance(m, nn.Linear)}

    def look(module: nn.Module, args: Any) -> None:
        found[names[module]] = args[0].abs().amax()

    handles = [module.register_forward_pre_hook(look) for module in names]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def modelopt(source: Path, folder: Path, names: list[str], algorithm: str) -> dict[str, Tensor]:
    """The checkpoint `source` of a float model as ModelOpt exports it: global scales of
    amax / 2688, which have no exact reciprocal. Returns the weights in bfloat16, by module."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    dense = {}
    for i, name in enumerate(names):
        weight = tensors.pop(f"{name}.weight").float()
        second = weight.abs().amax() / (6 * 448)
        blocks = weight.unflatten(-1, (-1, 16))
        scale = (blocks.abs().amax(-1) / (6 * second)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        step = (scale.float() * second).unsqueeze(-1)
        codes = nearest_codes(blocks / step)
        values = torch.tensor(GRID + [-v for v in GRID])[codes.int()]
        dense[name] = (values * step).flatten(-2).bfloat16()
        pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
        tensors[f"{name}.weight"] = pairs[..., 0] | pairs[..., 1] << 4
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.weight_scale_2"] = second
        if algorithm == "NVFP4":
            tensors[f"{name}.input_scale"] = torch.tensor((3.0 + i) / 2688)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
    quantization["exclude_modules"] = ["lm_head"]
    facts = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(facts))
    return dense


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_codes(x: Tensor) -> Tensor:
    """The code of the nearest magnitude, and the sign."""
    index = (x.abs().unsqueeze(-1) - torch.tensor(GRID)).abs().argmin(-1)
    return (index + 8 * x.signbit()).to(torch.uint8)
