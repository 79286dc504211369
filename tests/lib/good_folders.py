"""Good folders of several writers, made of what the repository ships."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import native
import torch
from mixtures import build
from mixtures import logits as run_mixture
from safetensors.torch import load_file, save_file
from small_models import TINY, change_json, converted, language_model, linears, tokens

import fp4pass

WEIGHTS = "model.safetensors"

# What llm-compressor adds to the config that compressed-tensors writes.
LLM_COMPRESSOR: dict[str, Any] = {"global_compression_ratio": None, "kv_cache_scheme": None}
LLM_COMPRESSOR |= {"sparsity_config": {}, "transform_config": {}, "version": "0.19.0"}


def _tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    return folder


def _saved(model: Any, folder: Path, layout: str = "compressed-tensors", own: bool = True) -> Path:
    fp4pass.save(model, folder, layout=layout, source=TINY)
    if not own:
        (folder / "fp4pass.json").unlink()
    return folder


def ours_mxfp4(folder: Path) -> Path:
    return _saved(converted("mxfp4"), folder, own=False)


def ours_inputs(folder: Path) -> Path:
    return _saved(converted(weight_only=False), folder)


def ours_alone(folder: Path) -> Path:
    return _saved(converted("nvfp4", block=32), folder, "fp4pass")


def ours_modelopt(folder: Path) -> Path:
    return _saved(converted(weight_only=False), folder, "modelopt", own=False)


def ours_mixture(folder: Path) -> Path:
    """Experts one by one, as engines read them."""
    model = build("qwen3_moe", torch.bfloat16)
    fp4pass.prepare(model, "naive")
    run_mixture(model)
    fp4pass.convert(model, "nvfp4", "naive")
    fp4pass.save(model, folder, layout="modelopt")
    (folder / "fp4pass.json").unlink()
    return _tokenizer(folder)


def compressed_tensors(folder: Path) -> Path:
    foreign.compressed_tensors(language_model(), folder, "NVFP4A16", tokens())
    _fuse(folder)
    return _tokenizer(folder)


def llm_compressor(folder: Path) -> Path:
    """Inputs quantized, and the config with all that llm-compressor says."""
    foreign.compressed_tensors(language_model(), folder, "NVFP4", tokens())
    _fuse(folder)

    def say(config: dict[str, Any]) -> None:
        declared = config["quantization_config"]
        declared |= LLM_COMPRESSOR
        for group in declared["config_groups"].values():
            for args in (group["weights"], group["input_activations"]):
                args |= {"actorder": None, "block_structure": None, "observer_kwargs": {}}
            group["weights"]["observer"] = "memoryless_minmax"

    change_json(folder / "config.json", say)
    return _tokenizer(folder)


def auto_round(folder: Path) -> Path:
    """In mxfp4, by names of layers in place of their class."""
    foreign.compressed_tensors(language_model(), folder, "MXFP4A16", tokens())
    names = sorted(linears(converted()))

    def say(config: dict[str, Any]) -> None:
        declared = config["quantization_config"] | {"provider": "auto-round"}
        for group in declared["config_groups"].values():
            group["targets"] = names
        config["quantization_config"] = declared

    change_json(folder / "config.json", say)
    return folder if (folder / "tokenizer.json").is_file() else _tokenizer(folder)


def modelopt(folder: Path) -> Path:
    names = sorted(linears(converted()))
    # Each with a scale of its own, of which the first version of an export has one for all.
    foreign.modelopt(TINY, folder, names, "W4A16_NVFP4")
    _fuse(folder)
    return folder


def gpt_oss(folder: Path) -> Path:
    """Stacked experts in blocks, with the router and attention dense; in two files."""
    native.gpt_oss(folder)
    split(folder)
    return _tokenizer(folder)


def _fuse(folder: Path) -> None:
    """Give what engines fuse one global scale, as exports of these libraries have it."""
    tensors = load_file(folder / WEIGHTS)
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for last in ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale"):
            found: dict[str, list[str]] = {}
            for name in tensors:
                path, _, end = name.rpartition(".")
                if end == last and path.endswith(group):
                    found.setdefault(path.rpartition(".")[0], []).append(name)
            for names in found.values():
                for name in names:
                    tensors[name] = tensors[names[0]].clone()
    save_file(tensors, folder / WEIGHTS)


def split(folder: Path) -> None:
    """Put the weights of a folder into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names, index = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    data = {"metadata": {}, "weight_map": index}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(data))


Maker = Callable[[Path], Path]

GOOD: dict[str, Maker] = {
    each.__name__: each
    for each in (
        *(ours_mxfp4, ours_inputs, ours_alone, ours_modelopt, ours_mixture),
        *(compressed_tensors, llm_compressor, auto_round, modelopt, gpt_oss),
    )
}
