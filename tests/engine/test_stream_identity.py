"""Layers of a folder are taken for those of a model only if everything that decides them is."""

from __future__ import annotations

import functools
import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass.core.fingerprint import Unknown, identity_of
from fp4pass.quantization import quantize as search

slow = pytest.mark.slow

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = 1.0
        self.activation: Callable[[Tensor], Tensor] = nn.functional.relu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.down(self.activation(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.Sequential(Block(), Block(), Block())

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embedding(ids))


def made() -> Any:
    torch.manual_seed(0)
    return Model().eval()


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(seed))


def converted(
    model: Any,
    method: str = "sse",
    data: Tensor | None = None,
    sequential: bool = True,
    own_loop: bool = False,
    **options: Any,
) -> Any:
    if method != "sse":
        fp4pass.prepare(model, method, sequential=sequential)
        batch = ids() if data is None else data
        if own_loop:
            model(batch)
        else:
            fp4pass.calibrate(model, [batch], progress=False)
    return fp4pass.convert(model, "mxfp4", method, weight_only=True, **options)


def identities(folder: Path) -> list[str]:
    paths = [folder / f"layers.{i}.json" for i in range(3)]
    return [json.loads(path.read_text())["identity"] for path in paths]


def changes(model: Any) -> dict[str, Callable[[], Any]]:
    """What makes another model of one: its middle layer, or what is in front of all layers."""
    layer = model.layers[1]

    def far(weight: Tensor) -> Tensor:
        return weight.view(-1)[10 * WIDTH : -10 * WIDTH].mul_(-3)

    def strided() -> None:
        weight = layer.up.weight.detach().t().contiguous().t()
        weight[1:, 5] *= -3
        layer.up.weight = nn.Parameter(weight)

    return {
        "weight": lambda: far(layer.up.weight),
        "top bits": lambda: layer.up.weight.view(-1)[301:304:2].neg_(),
        "not contiguous": strided,
        "bias": lambda: layer.up.bias.mul_(-3),
        "norm": lambda: layer.norm.weight.mul_(-3),
        "embedding": lambda: far(model.embedding.weight),
        "number": lambda: setattr(layer, "factor", 2.0),
        "function": lambda: setattr(layer, "activation", nn.functional.silu),
        "code": lambda: setattr(layer, "activation", lambda x: x.neg()),
        "class": lambda: setattr(layer, "norm", nn.RMSNorm(WIDTH)),
        "hook": lambda: layer.up.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    }


QUICK = ("norm", "embedding", "number", "code")


# Where no layer runs, only tensors of the layer count; of these the norm need not.
@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("method", "change"),
    [("sse", name) for name in ("weight", "top bits", "not contiguous")]
    + [("hessian", name) for name in QUICK]
    + [pytest.param("hessian", n, marks=slow) for n in changes(made()) if n not in QUICK],
)
@torch.no_grad()
@pytest.mark.core
def test_another_model_is_another_model(method: str, change: str, tmp_path: Path) -> None:
    first = converted(made(), method, stream=tmp_path)
    before = identities(tmp_path)
    other, expected = made(), made()
    for model in (other, expected):
        changes(model)[change]()
    assert_same_bits(converted(other, method, stream=tmp_path), converted(expected, method))
    same = [a == b for a, b in zip(before, identities(tmp_path), strict=True)]
    # Behind a layer that runs everything may be another; the first one is not.
    wanted = [True, False, method == "sse"] if change != "embedding" else [False] * 3
    assert same == wanted
    assert_same_bits(converted(made(), method, stream=tmp_path), first)


@pytest.mark.core
@torch.no_grad()
def test_the_same_model_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("sse", "hessian"):
        folder = tmp_path / method
        expected = converted(made(), method, stream=folder)
        with monkeypatch.context() as patch:
            patch.setattr(search, "_search", lambda *_: pytest.fail("a weight is searched"))
            model = made()
            for layer in model.layers:
                # The same bits elsewhere.
                layer.up.weight = nn.Parameter(layer.up.weight.t().contiguous().t())
            assert_same_bits(converted(model, method, stream=folder), expected)


@pytest.mark.parametrize(("sequential", "own_loop"), [(False, False), (True, True)])
@torch.no_grad()
def test_other_data_are_other_layers(sequential: bool, own_loop: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sequential": sequential, "own_loop": own_loop}
    converted(made(), "hessian", ids(0), stream=tmp_path, **options)
    before = identities(tmp_path)
    found = converted(made(), "hessian", ids(1), stream=tmp_path, **options)
    assert_same_bits(found, converted(made(), "hessian", ids(1), **options))
    assert not set(before) & set(identities(tmp_path))


@pytest.mark.core
@torch.no_grad()
def test_what_cannot_be_identified_is_quantized_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for _ in range(2):
        model = made()
        model.layers[1].rows = (row for row in ())
        converted(model, "hessian", stream=tmp_path)
        found.append(identities(tmp_path))
        assert "what decides it cannot be identified: cannot pickle" in caplog.text
        caplog.clear()
    assert [a == b for a, b in zip(*found, strict=True)] == [True, False, False]


@pytest.mark.core
@torch.no_grad()
def test_one_changed_byte_is_another_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = converted(made())
    converted(made(), stream=tmp_path)
    raw = bytearray((tmp_path / "layers.0.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "layers.0.safetensors").write_bytes(raw)
    facts = tmp_path / "layers.2.json"
    facts.write_text(facts.read_text().replace('"tokens": 0', '"tokens": 1'))
    before, searched = search._search, set[str]()

    def noted(*args: Any) -> Any:
        searched.add(args[2].name.rpartition(".")[0])
        return before(*args)

    monkeypatch.setattr(search, "_search", noted)
    found = converted(made(), stream=tmp_path)
    assert_same_bits(found, expected)
    assert fp4pass.report(found) == fp4pass.report(expected)
    assert searched == {"layers.0", "layers.2"}


class Named:
    def __init__(self, number: int) -> None:
        self.number, self.owner = number, self


@pytest.mark.core
def test_identities() -> None:
    def scaled(scale: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * scale

    tensor = torch.arange(4)
    cycle: list[Any] = [1]
    cycle.append(cycle)
    others: list[Any] = [[1, 2], [1, 2.0], [[1], 2], ["1", 2], {"a": 1}, {"b": 1}, cycle, {1, 2}]
    others += [[tensor, tensor], [tensor, tensor.clone()], torch.arange(3).numpy(), deque([1, 2])]
    others += [scaled(1.0), scaled(2.0), functools.partial(scaled, 1.0), Named(1), Named(2)]
    others += [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    others += [torch.relu, torch.sigmoid, nn.Linear, threading.Lock()]
    assert len({identity_of(each) for each in others}) == len(others)
    assert identity_of(Named(1)) == identity_of(Named(1))
    assert identity_of(scaled(1.0)) == identity_of(scaled(1.0))
    assert identity_of([tensor.clone()]) == identity_of([tensor])
    with pytest.raises(Unknown, match="generator"):
        identity_of({"a": [(row for row in ())]})
    with pytest.raises(Unknown, match="not in memory"):
        identity_of(torch.empty(2, device="meta"))
