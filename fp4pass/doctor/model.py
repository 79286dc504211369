"""Compare the tensors of a folder with the model that its config makes, on the meta device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._compat.transformers import config_faults, meta_model, tied_weights
from .._compat.transformers_loading import names_in_model
from ..checkpoint.float_models import model_class
from ..checkpoint.layouts import CACHE_SCALES
from .kinds import Finding
from .structure import EXPERT, Layers
from .survey import Survey

# Parts of a config that would take hours to build, and are none of a model.
_MOST_PARTS = 10_000


@dataclass(frozen=True)
class FloatModel:
    """The float model of a config, without memory.

    Attributes:
        shapes: of its tensors, by their names.
        linears: the names of its linear layers.
        tied: names that it has of other tensors.
        names: the name in the model of each tensor of the folder.
    """

    shapes: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    tied: frozenset[str]
    names: Mapping[str, str]


def build_model(found: Survey, layers: Layers) -> tuple[FloatModel | None, str]:
    """Return the float model of a folder's config, or why there is none."""
    if not found.config:
        return None, "there is no config.json"
    if not found.config.get("model_type"):
        return None, "config.json names no model_type"
    try:
        import transformers
    except ImportError:
        return None, "transformers is not installed: pip install 'fp4pass[hf]'"
    if any(_too_many(found.config)):
        return None, "config.json counts more parts than a model has"
    try:
        # Else transformers asks on the terminal whether it may run the files of a folder.
        config: Any = transformers.AutoConfig.from_pretrained(found.folder, trust_remote_code=False)
        config.__dict__.pop("quantization_config", None)
        model = meta_model(model_class(config), config)
        names = names_in_model(model, _float_names(found, layers), merged=True)
    except config_faults() as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"transformers {transformers.__version__} makes no model of it: {line:.200}"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    linears = {n for n, each in model.named_modules() if isinstance(each, nn.Linear)}
    tied = frozenset(tied_weights(model))
    return FloatModel(shapes, frozenset(linears), tied, names), ""


def _too_many(config: Any) -> Iterator[bool]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _too_many(value)
            yield type(value) is int and "layers" in str(key) and value > _MOST_PARTS


def _float_names(found: Survey, layers: Layers) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that the tensors of a folder have in the float model's."""
    packed = {each.name for held in layers.parts.values() for each in held.values()}
    packed |= layers.broken
    result = {
        name: each.shape
        for name, each in found.tensors.items()
        if name not in packed and not name.endswith(CACHE_SCALES)
    }
    renamed = (found.own or {}).get("renamed") or {}
    for layer, record in layers.records.items():
        result[layer if record.is_stacked else f"{layer}.weight"] = record.dense_shape
    return {renamed.get(name, name): shape for name, shape in result.items()}


def check_model(found: Survey, layers: Layers, model: FloatModel | None) -> Iterator[Finding]:
    """Yield tensors that the folder lacks, or has in other shapes, by the model of its config."""
    if model is None:
        yield from _counted(found)
        return
    held = _float_names(found, layers)
    sources: dict[str, list[str]] = {}
    for name in held:
        sources.setdefault(model.names.get(name, name), []).append(name)
    # Parts that are wrong otherwise are named already.
    broken = {each.where for each in layers.findings}
    damaged = bool(broken or layers.unread) or any(
        each.kind in ("file-missing", "file-damaged", "tensor-missing") for each in found.findings
    )
    stacks = {
        (found.own or {}).get("renamed", {}).get(n, n)
        for n in (found.own or {}).get("joined") or {}
    }
    aliases = set((found.own or {}).get("aliases") or {})
    mixtures = {match[1] for each in held if (match := EXPERT.match(each))}
    for name, shape in model.shapes.items():
        names = sources.get(name, [])
        if len(names) == 1 and names[0] in held and _is_kept(names[0], name):
            if held[names[0]] != shape:
                what = f"expected {list(shape)}, as the config says, got {list(held[names[0]])}"
                yield Finding("config-model", names[0], "config.json", what)
        elif len(names) > 1 and not damaged:
            # A stack, which transformers makes of its experts; some have none on disk.
            size = sum(math.prod(held[each]) for each in names)
            experts = len({match[2] for each in names if (match := EXPERT.match(each))})
            wanted = math.prod(shape[1:] if experts else shape) * (experts or 1)
            if size != wanted:
                what = f"expected {wanted} numbers, as the config says, got {size}"
                yield Finding("config-model", names[0], "config.json", what)
        elif not names and name not in model.tied and not damaged and name not in stacks:
            if (
                name.rpartition(".")[0] in mixtures
                or name in aliases
                or _is_packed_alias(name, aliases)
            ):
                continue
            what = "expected this tensor, as the config says, got none"
            yield Finding("config-model", name, "config.json", what)
    forms = {_form(name) for name in model.shapes}
    extra = [n for n in held if model.names.get(n, n) not in model.shapes]
    beyond = [
        n for n in extra if _form(model.names.get(n, n)) in forms and not _is_predicted(found, n)
    ]
    for name in beyond:
        what = f"expected no such layer, as the config says, got {name}"
        yield Finding("config-model", name, "config.json", what)


def _counted(found: Survey) -> Iterator[Finding]:
    """Yield that a folder has more or fewer layers than its config says."""
    text = found.config.get("text_config")
    count = found.config.get("num_hidden_layers") or (text or {}).get("num_hidden_layers")
    matches = (re.match(r"(?:\w+\.)*?layers\.(\d+)\.", name) for name in found.tensors)
    numbers = {int(match[1]) for match in matches if match}
    if type(count) is not int or not numbers or isinstance(found.config.get("vision_config"), dict):
        return
    further = sum(predicted_layers(found.config).values())
    if not count <= len(numbers) <= count + further:
        what = f"expected {count} layers, as num_hidden_layers says, got {len(numbers)}"
        yield Finding("config-model", "num_hidden_layers", "config.json", what)


def _is_kept(name: str, target: str) -> bool:
    """Return whether a tensor becomes that of the model as it is, and is no part of it."""
    return name.rpartition(".")[2] == target.rpartition(".")[2]


def _is_packed_alias(name: str, aliases: set[str]) -> bool:
    path = name.rpartition(".")[0]
    return any(alias.rpartition(".")[0] == path for alias in aliases)


def _form(name: str) -> str:
    return re.sub(r"\d+", "*", name)


# The names in configs of the number of layers that predict further tokens.
PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def predicted_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return what a config says of layers that predict further tokens, by its keys."""
    text = config.get("text_config")
    parts = [("", config), *([("text_config.", text)] if isinstance(text, Mapping) else [])]
    return {
        f"{prefix}{key}": part[key]
        for prefix, part in parts
        for key in PREDICTED
        if type(part.get(key)) is int and part[key] > 0
    }


def is_of_prediction(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens."""
    if re.search(r"(^|\.)(mtp|nextn|multi_token)", name):
        return True
    text = config.get("text_config")
    count = config.get("num_hidden_layers") or (text or {}).get("num_hidden_layers")
    numbers = re.findall(r"(?:^|\.)layers\.(\d+)\.", name)
    return type(count) is int and any(int(number) >= count for number in numbers)


def _is_predicted(found: Survey, name: str) -> bool:
    return bool(predicted_layers(found.config)) and is_of_prediction(found.config, name)
