"""Damages of folders, each with the kind of finding that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from good_folders import WEIGHTS, split
from safetensors.torch import load_file, save_file
from small_models import change_json
from torch import Tensor

# Names of the parts of a layer in every layout.
CODES = r"(weight_packed|_blocks|(?<=proj\.)weight)"
SCALE = r"(weight_scale|_scales)"
GLOBAL = r"(weight_global_scale|weight_scale_2)"
INPUT = r"(input_global_scale|input_scale)"
UP = "model.layers.1.mlp.up_proj"
ONE = r".*layers\.1\..*(mlp|experts\.1)\.(up_proj|experts\.gate_up_proj)\.?"


# Deeper than any reader goes.
NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000


class Damage(NamedTuple):
    """The kind of the finding, and what is done: whether the folder has what it damages."""

    kind: str
    act: Callable[[Path], bool]


def _read(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def tensors(where: str, edit: Callable[[Tensor], Tensor | None], kind: str = "") -> Any:
    """Edit the tensors whose names match; what becomes None goes."""

    def act(folder: Path) -> bool:
        found = False
        for file, held in _read(folder).items():
            for name in [n for n in held if re.fullmatch(where, n)]:
                if "weight" in where and where.endswith(CODES) and held[name].dtype != torch.uint8:
                    continue
                edited = edit(held.pop(name))
                found = True
                if edited is not None:
                    held[name] = edited.contiguous()
            save_file(held, folder / file, metadata={"format": "pt"})
        if found and (folder / f"{WEIGHTS}.index.json").is_file():
            index = {n: file for file, held in _read(folder).items() for n in held}
            data = {"metadata": {}, "weight_map": index}
            (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(data))
        return found

    return act


def put(where: str, place: tuple[int, ...], byte: int) -> Any:
    def edit(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.uint8).clone()
        bits[(..., *place)] = byte
        return bits.view(tensor.dtype)

    return tensors(where, edit)


def bits_of(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: change(tensor.view(torch.uint8)).contiguous().view(tensor.dtype)


def swap_nibbles(tensor: Tensor) -> Tensor:
    return tensor << 4 | tensor >> 4


def swap_rows(tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def in_tiles(tensor: Tensor) -> Tensor:
    """Scales as products of 4-bit numbers read them."""
    if tensor.shape[0] % 128 or tensor.shape[1] % 4:
        return tensor
    rows, columns = tensor.shape
    tiles = tensor.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def lose_rows(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[tensor.shape[0] // 2 :] = 0
    return tensor


def config(edit: Callable[[dict[str, Any]], object]) -> Any:
    """Edit config.json; False of the edit is that there is nothing to damage."""

    def act(folder: Path) -> bool:
        done: list[object] = []
        change_json(folder / "config.json", lambda data: done.append(edit(data)))
        return done[0] is not False

    return act


def declared(edit: Callable[[dict[str, Any]], object]) -> Any:
    def change(data: dict[str, Any]) -> object:
        found = data.get("quantization_config")
        return edit(found) if found else False

    return config(change)


def ignore_packed(data: dict[str, Any]) -> object:
    key = "modules_to_not_convert" if "modules_to_not_convert" in data else "ignore"
    if key not in data:
        return False
    data[key] = [*data[key], "re:.*layers.1.*" if key == "ignore" else "re:.*experts.*"]
    if "quant_algo" in data:
        data[key][-1] = "model.layers.1.*"
    return True


def ignore_nothing(data: dict[str, Any]) -> object:
    if data.get("quant_method") == "mxfp4" or not data.get("ignore"):
        return False
    targets = [g.get("targets") for g in data.get("config_groups", {}).values()]
    if targets and all("Linear" not in each for each in targets):
        return False
    data["ignore"] = []
    return True


def without_config(folder: Path) -> bool:
    if (folder / "fp4pass.json").is_file():
        return False
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    change_json(folder / "config.json", lambda data: data.pop("quantization_config", None))
    return True


def other_layout(folder: Path) -> bool:
    if (folder / "fp4pass.json").is_file():
        return False
    (folder / "hf_quant_config.json").unlink(missing_ok=True)

    def edit(data: dict[str, Any]) -> None:
        found = data.get("quantization_config") or {}
        is_stack = found.get("quant_method") == "mxfp4"
        other = {"quant_method": "modelopt", "quant_algo": "NVFP4"} if is_stack else None
        data["quantization_config"] = other or {"quant_method": "mxfp4"}

    change_json(folder / "config.json", edit)
    return True


def disagree(folder: Path) -> bool:
    side = folder / "hf_quant_config.json"
    if not side.is_file() or "quantization_config" not in (folder / "config.json").read_text():
        return False
    change_json(side, lambda data: data["quantization"].update(quant_algo="W4A16_NVFP4"))
    return "W4A16" not in (folder / "config.json").read_text()


def tie(folder: Path) -> bool:
    """A packed output embedding in a model that ties it."""
    found = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else {}
    of_ours = (folder / "fp4pass.json").is_file()
    if of_ours or f"{UP}.weight_packed" not in found:
        return False
    for name in [n for n in found if n.startswith(f"{UP}.")]:
        tensor = found[name]
        if tensor.ndim == 2:
            bits = tensor.view(torch.uint8).repeat(-(-2048 // len(tensor)), 1)[:2048].contiguous()
            tensor = bits.view(tensor.dtype)
        found[f"lm_head.{name.rpartition('.')[2]}"] = tensor.clone()
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    def edit(data: dict[str, Any]) -> None:
        data["tie_word_embeddings"] = True
        data["quantization_config"]["ignore"] = []
        for group in data["quantization_config"].get("config_groups", {}).values():
            group["targets"] = [*group["targets"], "lm_head"]

    change_json(folder / "config.json", edit)
    return True


def second_of_a_name(folder: Path) -> None:
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    held, other = load_file(second), load_file(first)
    name = sorted(other)[0]
    save_file({**held, name: other[name]}, second)


def no_template(folder: Path) -> bool:
    change_json(folder / "config.json", lambda data: data.update(_name_or_path="x/y-8B-Instruct"))
    change_json(folder / "tokenizer_config.json", lambda data: data.pop("chat_template", None))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return True


def floats(tensor: Tensor) -> Tensor:
    return tensor.int() if tensor.dtype == torch.uint8 else tensor.float()


def high_bit(folder: Path) -> bool:
    """Flip the highest bit of one scale that is a power of two; a row of few has no usual scale."""
    powers = (torch.uint8, torch.float8_e8m0fnu)
    names = [
        re.escape(name)
        for held in _read(folder).values()
        for name, tensor in held.items()
        if re.fullmatch(f"{ONE}{SCALE}", name) and tensor.dtype in powers and tensor.shape[-1] >= 8
    ]

    def edit(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.uint8).clone()
        bits[..., 3, 1] ^= 128
        return bits.view(tensor.dtype)

    return bool(names) and bool(tensors("|".join(names), edit)(folder))


def overwrite(change: Callable[[bytes], bytes]) -> Any:
    def act(folder: Path) -> bool:
        path = sorted(folder.glob("*.safetensors"))[0]
        return bool(path.write_bytes(change(path.read_bytes())))

    return act


def held(edit: Callable[[dict[str, Tensor]], object]) -> Any:
    """Edit the tensors of a folder of one file; False of the edit is that there is no damage."""

    def act(folder: Path) -> bool:
        if not (folder / WEIGHTS).is_file():
            return False
        found = load_file(folder / WEIGHTS)
        done = edit(found) is not False
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
        return done

    return act


def rename(found: dict[str, Tensor]) -> None:
    for name in list(found):
        found[f"_orig_mod.{name}"] = found.pop(name)


def dense_twin(found: dict[str, Tensor]) -> object:
    codes = found.get(f"{UP}.weight_packed")
    if codes is None:
        return False
    found[f"{UP}.weight"] = torch.zeros(codes.shape[0], 2 * codes.shape[1]).bfloat16()
    return True


def in_parts(then: Callable[[Path], object]) -> Any:
    def act(folder: Path) -> bool:
        if (folder / WEIGHTS).is_file():
            split(folder)
        elif not (folder / f"{WEIGHTS}.index.json").is_file():
            return False
        then(folder)
        return True

    return act


def index(edit: Callable[[dict[str, str]], object]) -> Any:
    path = f"{WEIGHTS}.index.json"
    return in_parts(lambda f: change_json(f / path, lambda data: edit(data["weight_map"])))


def other_blocks(data: dict[str, Any]) -> object:
    groups = data.get("config_groups", {}).values()
    for group in groups:
        for args in filter(None, (group["weights"], group.get("input_activations"))):
            args["group_size"] = 64
    return bool(groups)


def more_layers(data: dict[str, Any]) -> None:
    data["num_hidden_layers"] += 1
    if data.get("layer_types"):
        data["layer_types"] = [*data["layer_types"], data["layer_types"][-1]]


DAMAGES: dict[str, Damage] = {
    "NaN scale": Damage("scale-nan", put(f"{ONE}{SCALE}", (3, 1), 255)),
    "the highest bit of a scale": Damage("scale-size", high_bit),
    "zero scale": Damage("scale-zero", put(f"{ONE}{SCALE}", (3, 1), 0)),
    "scales as initialized": Damage(
        "scale-uncalibrated", tensors(f".*{SCALE}", bits_of(lambda t: t.clone().fill_(120)))
    ),
    "no scales": Damage("companion-missing", tensors(f"{ONE}{SCALE}", lambda t: None)),
    "no global scale": Damage("companion-missing", tensors(f"{ONE}{GLOBAL}", lambda t: None)),
    "no codes": Damage("orphan", tensors(f"{ONE}{CODES}", lambda t: None)),
    "NaN global scale": Damage("global-bad", tensors(f"{ONE}{GLOBAL}", lambda t: t * float("nan"))),
    "global scales the wrong way": Damage(
        "global-direction", tensors(f".*{GLOBAL}", lambda t: 1 / t)
    ),
    "global scales as initialized": Damage("weights-size", tensors(f".*{GLOBAL}", torch.ones_like)),
    "two global scales in one product": Damage(
        "fused-scales", tensors(f"{ONE}{GLOBAL}", lambda t: t * 2)
    ),
    "two scales of one input": Damage("fused-scales", tensors(f"{ONE}{INPUT}", lambda t: t * 2)),
    "NaN scale of inputs": Damage(
        "input-bad", tensors(f"{ONE}{INPUT}", lambda t: t * float("nan"))
    ),
    "no scale of inputs": Damage("input-missing", tensors(f"{ONE}{INPUT}", lambda t: None)),
    "scales of inputs as initialized": Damage(
        "input-uncalibrated", tensors(f".*{INPUT}", torch.ones_like)
    ),
    "nibbles swapped": Damage("codes-order", tensors(f".*{CODES}", swap_nibbles)),
    "rows swapped": Damage(
        "rows-order",
        tensors(r".*layers\.\d\.mlp\.up_proj\.(weight_packed|weight_scale)", bits_of(swap_rows)),
    ),
    "scales in tiles": Damage("scale-order", tensors(f".*{SCALE}", bits_of(in_tiles))),
    "a hole in the codes": Damage("codes-zero", tensors(f"{ONE}weight_packed", lose_rows)),
    "a layer of zeros": Damage("dead", tensors(f"{ONE}{CODES}", torch.zeros_like)),
    "codes of fewer rows": Damage("shape", tensors(f"{ONE}{CODES}", lambda t: t[:-1])),
    "scales in another dtype": Damage("dtype", tensors(f"{ONE}{SCALE}", floats)),
    "a cut file": Damage("file-damaged", overwrite(lambda raw: raw[:-999])),
    "a header of nested objects": Damage(
        "file-damaged", overwrite(lambda _: len(NESTED).to_bytes(8, "little") + NESTED.encode())
    ),
    "a file that is gone": Damage(
        "file-missing", in_parts(lambda f: (f / "model-00002-of-00002.safetensors").unlink())
    ),
    "an index that misses tensors": Damage(
        "index", index(lambda listed: [listed.pop(name) for name in sorted(listed)[:3]])
    ),
    "an index of a tensor that is gone": Damage(
        "tensor-missing",
        index(lambda listed: listed.update({"model.x.weight": sorted(listed.values())[0]})),
    ),
    "two tensors of one name": Damage("duplicate", in_parts(second_of_a_name)),
    "a packed layer that is ignored": Damage("ignore-packed", declared(ignore_packed)),
    "a dense layer that is not ignored": Damage("ignore-misses", declared(ignore_nothing)),
    "no quantization_config": Damage("config-absent", without_config),
    "the quantization_config of another layout": Damage("config-layout", other_layout),
    "another group size": Damage("block-size", declared(other_blocks)),
    "two configs that disagree": Damage("config-disagrees", disagree),
    "the config of a deeper model": Damage("config-model", config(more_layers)),
    "declared multi-token prediction": Damage(
        "mtp-absent", config(lambda data: data.update(num_nextn_predict_layers=1))
    ),
    "no tokenizer": Damage(
        "tokenizer-missing", lambda folder: (folder / "tokenizer.json").unlink() is None
    ),
    "no chat template": Damage("chat-template-missing", no_template),
    "a tied head that is packed": Damage("tied-head", tie),
    "packed and dense": Damage("twice", held(dense_twin)),
    "a norm of zeros": Damage("dead", tensors(r"model\.norm\.weight", torch.zeros_like)),
    "a dense NaN": Damage("dense-bad", tensors(r"model\.norm\.weight", lambda t: t * float("nan"))),
    "the names of a wrapper": Damage("names", held(rename)),
    "an expert that is gone": Damage(
        "expert-missing", tensors(r".*layers\.1\..*experts\.3\..*", lambda t: None)
    ),
    "nested JSON": Damage(
        "json-damaged", lambda folder: bool((folder / "config.json").write_text(NESTED))
    ),
    "broken JSON": Damage(
        "json-damaged", lambda folder: bool((folder / "config.json").write_text("{"))
    ),
}
