"""A small language model, and what checkpoint tests ask of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp4pass
from fp4pass.nn.linear import QuantizedLinear

# The fixtures `saved` and `packed`: the tiny model by format, weight_only and layout.
Saved = Callable[..., Path]
Packed = Callable[..., Any]

TINY = Path(__file__).parents[2] / "examples" / "tiny_lm"


def language_model(path: Path = TINY, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, **{"dtype": torch.bfloat16} | options).eval()


def tokens(count: int = 2, length: int = 48) -> Tensor:
    return torch.randint(1, 2000, (count, length), generator=torch.Generator().manual_seed(0))


def converted(fmt: str = "nvfp4", weight_only: bool = True, **options: Any) -> Any:
    model = language_model()
    if not weight_only:
        fp4pass.prepare(model, "naive")
        fp4pass.calibrate(model, [tokens()], progress=False)
    return fp4pass.convert(model, fmt, "naive", weight_only=weight_only, **options)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))


def packed_model(model: nn.Module, **options: Any) -> nn.Module:
    """Any model, converted without calibration."""
    options = {"fmt": "nvfp4", "method": "sse", "weight_only": True} | options
    return fp4pass.convert(model, **options)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(tokens()).logits


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape, name
        assert torch.equal(bits(tensor), bits(second[name])), name


def linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def change(folder: Path, name: str, edit: Any) -> None:
    """Edit a tensor on disk; what becomes None goes."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors.pop(name))
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def change_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Edit what a JSON file holds."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
