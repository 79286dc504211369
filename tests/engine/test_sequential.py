"""prepare(sequential=True): one layer at a time, on the outputs of those that are quantized."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from small_models import assert_same_bits, bits, linears
from torch import Tensor, nn
from torch.nn import functional as F

import fp4pass
from fp4pass.errors import CalibrationError, OptionError, StateError
from fp4pass.methods import METHODS, Gptq
from fp4pass.nn.linear import quantize_input
from fp4pass.record.state import get_state

CASES = {case.name: case for case in zoo.CASES}
MODELS = ["llama", "qwen3", "gemma3", "gpt2", "mamba2", "t5", "qwen3_moe"]
CROSS = Gptq(target="cross")
K = 64


class Block(nn.Module):
    """A residual layer: `up` and `side` read one tensor."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.side, self.down = nn.Linear(K, 96), nn.Linear(K, 96), nn.Linear(96, K)
        self.scale = scale

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Any:
        hidden = F.silu(self.side(x)) * self.up(x)
        shift = torch.zeros(()) if shift is None else shift
        return x + self.scale * factor * self.down(hidden) + shift, None


class Model(nn.Module):
    def __init__(self, layers: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(scale) for _ in range(layers))
        self.head = nn.Linear(K, 32)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        shift = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x, _ = layer(x, shift=shift)
        self.runs += 1
        return self.head(x)


NO_HEAD = [("head", None)]


def model(layers: int = 3, scale: float = 1.0) -> Model:
    torch.manual_seed(0)
    return Model(layers, scale).eval()


def batches(count: int = 3, rows: int = 80) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(K, K, generator=generator) * 0.95 ** torch.arange(K).view(K, 1)
    return [torch.randn(2, rows, K, generator=generator) @ mix for _ in range(count)]


def prepared(source: Any, method: Any, sequentially: bool = True, **options: Any) -> Any:
    """Any model that takes a tensor, prepared and calibrated."""
    data = options.pop("data", None) or batches()
    fp4pass.prepare(source, method, sequential=sequentially, **options)
    return fp4pass.calibrate(source, data, progress=False)


def converted(source: Any, method: Any = "gptq", sequentially: bool = True, **options: Any) -> Any:
    rules, data = options.pop("rules", ()), options.pop("data", None)
    prepared(source, method, sequentially, rules=rules, data=data)
    return fp4pass.convert(source, **{"fmt": "nvfp4", "method": method, **options})


def layer_bits(module: nn.Module, name: str) -> dict[str, Tensor]:
    found = {k: v for k, v in module.state_dict().items() if k.startswith(name)}
    assert found
    return found


def assert_same_layer(a: nn.Module, b: nn.Module, name: str, same: bool = True) -> None:
    first, second = layer_bits(a, name), layer_bits(b, name)
    equal = [torch.equal(bits(value), bits(second[key])) for key, value in first.items()]
    assert all(equal) == same


@pytest.mark.parametrize(("method", "weight_only"), [("naive", False), ("gptq", True)])
def test_the_first_layer_is_that_of_the_ordinary_flow(method: str, weight_only: bool) -> None:
    """To the bit; those behind it see quantized outputs, which changes them if inputs count."""
    whole = converted(model(), method, False, weight_only=weight_only)
    ours = converted(model(), method, weight_only=weight_only)
    assert_same_layer(whole, ours, "layers.0.")
    if method != "naive":
        assert_same_layer(whole, ours, "layers.2.", same=False)
    # It is not in a layer: as ever, on the outputs of the float model.
    assert_same_layer(whole, ours, "head.")
    names = [row.name for row in fp4pass.report(whole).rows]
    assert [row.name for row in fp4pass.report(ours).rows] == names
    assert all(row.tokens == 480 for row in fp4pass.report(ours).rows)


@pytest.mark.core
def test_layers_see_the_outputs_of_quantized_ones() -> None:
    """The second layer is the first of a model that begins with what the first returns."""
    ours = converted(model(2), rules=NO_HEAD, weight_only=True)
    rest = model(2)
    with torch.no_grad():
        seen = [ours.layers[0](x, shift=x.mean(-1, keepdim=True))[0] for x in batches()]
    fp4pass.prepare(rest.layers[1], "gptq")
    for x, start in zip(seen, batches(), strict=True):
        rest.layers[1](x, shift=start.mean(-1, keepdim=True))
    fp4pass.convert(rest.layers[1], method="gptq", weight_only=True)
    assert_same_layer(ours, rest, "layers.1.")


def inputs_of(module: nn.Module, name: str, data: list[Tensor]) -> np.ndarray:
    """What the linear `name` is called with: float64 [tokens, K]."""
    seen: list[Tensor] = []
    hook = module.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with torch.no_grad():
        for x in data:
            module(x)
    hook.remove()
    return torch.cat([x.flatten(0, 1) for x in seen]).double().numpy()


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[Tensor]]:
    """What gptq was given in place of weights, by shape, in the order of conversion."""
    found: dict[tuple[int, ...], list[Tensor]] = {}
    inner = METHODS["gptq"]

    def watch(weight: Tensor, *args: Any) -> Any:
        found.setdefault(tuple(weight.shape), []).append(weight.clone())
        return inner.function(weight, *args)

    monkeypatch.setitem(METHODS, "gptq", dataclasses.replace(inner, function=watch))
    return found


@pytest.mark.parametrize(
    ("fmt", "how"),
    [
        ("nvfp4", {"weight_only": True}),
        ("nvfp4", {}),
        ("mxfp4", {"activation_scales": "sse"}),
        ("nvfp4", {"rotation": 32}),
    ],
    ids=str,
)
def test_the_cross_target_is_that_of_least_squares(
    targets: dict[tuple[int, ...], list[Tensor]], fmt: str, how: dict[str, Any]
) -> None:
    """Against numpy's least squares on the inputs themselves: the last linear of the last layer."""
    data, name, damping = batches(), "layers.1.down", 0.05
    method = Gptq(target="cross", target_damping=damping)
    ours = converted(model(2), method, rules=NO_HEAD, fmt=fmt, **how)
    wanted = inputs_of(model(2), name, data)
    seen = inputs_of(ours, name, data)
    linear, ops = ours.get_submodule(name), torch.ops.fp4pass
    rotation = linear.config.rotation
    back = (lambda x: ops.rotate(x, rotation)) if rotation else (lambda x: x)
    if not linear.config.weight_only:
        packed, scale, divisor = quantize_input(
            torch.from_numpy(seen).float(), linear.packed_weight, linear.config
        )
        dense = ops.dequantize(packed, scale, divisor, linear.config.format.key, torch.float32)
        seen = back(dense).double().numpy()
    weight = model(2).get_submodule(name).weight.detach().double().numpy()
    # |W a - V x|^2 + lam |W - V|^2, as rows more of x.
    lam = damping * (seen**2).sum() / seen.shape[1]
    rows = np.concatenate([seen, np.sqrt(lam) * np.eye(seen.shape[1])])
    outputs = np.concatenate([wanted @ weight.T, np.sqrt(lam) * weight.T])
    expected = np.linalg.lstsq(rows, outputs, rcond=None)[0].T
    found = back(targets[expected.shape][-1].float()).double().numpy()
    moved = np.abs(expected - weight).max()
    assert moved > 1e-3 and np.abs(found - expected).max() < 1e-3 * moved


@pytest.mark.core
def test_the_global_scale_is_that_of_the_target(
    targets: dict[tuple[int, ...], list[Tensor]],
) -> None:
    """The target of the last linear is proportional to its weight, so that a power of two can be
    put between the largest magnitudes of both."""
    converted(model(2), CROSS, rules=NO_HEAD, weight_only=True)
    before = float(model(2).layers[1].down.weight.detach().abs().max())
    after = float(targets[K, 96][-1].abs().max())
    source = model(2)
    factor = 448 * 6 * 2.0**-12 / (before * after) ** 0.5
    with torch.no_grad():
        source.layers[1].down.weight *= factor
    linear = converted(source, CROSS, rules=NO_HEAD, weight_only=True).layers[1].down
    expected = linear.config.format.global_scale_for(factor * after)
    assert 1.0 / float(linear.weight_global_scale) == expected
    assert expected != linear.config.format.global_scale_for(factor * before)


def test_calibrate_stops_at_the_first_layer() -> None:
    """Behind the first batch of a shape; a loop of one's own runs through, to the same end."""
    data = [*batches(3), *batches(2, rows=40)]
    source = prepared(model(), "gptq", rules=NO_HEAD, data=data)
    assert source.runs == 2
    loop = fp4pass.prepare(model(), "gptq", rules=NO_HEAD, sequential=True)
    with torch.inference_mode():
        for x in data:
            loop(x)
    assert loop.runs == 5
    # What is observed beside the layers takes a whole run.
    assert prepared(model(), "gptq", data=data).runs == 5
    first = fp4pass.convert(source, method="gptq", weight_only=True)
    assert_same_bits(first, fp4pass.convert(loop, method="gptq", weight_only=True))
    calibration = get_state(first).recipe["calibration"]
    assert calibration["sequential"] and (calibration["batches"], calibration["tokens"]) == (5, 640)


def test_a_layer_that_changes_its_input_in_place() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Any:
            up = self.up(x)
            return x.mul_(2).add_(self.down(F.silu(self.side(x)) * up)), None

    class Plain(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Any:
            up, x = self.up(x), x * 2
            return x + self.down(F.silu(self.side(x)) * up), None

    found = []
    for kind in (InPlace, Plain):
        source = model()
        for layer in source.layers:
            layer.__class__ = kind
        data = [x.clone() for x in batches()]
        found.append(converted(source, CROSS, rules=NO_HEAD, data=data))
    assert_same_bits(*found)


def run_case(case: zoo.Case, module: nn.Module) -> Any:
    for i in range(3):
        case.run(module, i)
    return module


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    """Grouped queries, tuples, other masks for other layers, two stacks."""
    case = CASES[name]
    for package in case.requires:
        pytest.importorskip(package)
    # Other tokens reach an expert once layers are quantized.
    rules = [("*.experts.*", {"method": "gptq"})] if name == "qwen3_moe" else []
    source = fp4pass.prepare(case.build(), CROSS, rules=rules, sequential=True)
    fp4pass.convert(run_case(case, source), method=CROSS, weight_only=True, rules=rules)
    whole = run_case(case, fp4pass.prepare(case.build(), "gptq"))
    fp4pass.convert(whole, method="gptq", weight_only=True)
    assert linears(source).keys() == linears(whole).keys()
    reference = case.run(case.build(), 0)
    errors = [float((case.run(m, 0) - reference).norm()) for m in (source, whole)]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.core
def test_what_no_batch_reaches_says_what_is_packed() -> None:
    class Layer(nn.Module):
        def __init__(self, spare: bool) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.spare = nn.Linear(32, 32) if spare else None

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    model = nn.Sequential(Layer(False), Layer(True))
    fp4pass.prepare(model, "gptq", sequential=True)
    model(torch.randn(40, 32))
    with pytest.raises(CalibrationError, match=r"1\.spare: .*before it is packed already.*resume="):
        fp4pass.convert(model, "nvfp4", method="gptq")


def test_after_an_interruption(tmp_path: Path) -> None:
    whole = converted(model(), CROSS, rules=NO_HEAD)
    assert_same_bits(whole, converted(model(), CROSS, rules=NO_HEAD, resume=tmp_path / "r"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").iterdir()}
    again = converted(model(), CROSS, rules=NO_HEAD, resume=tmp_path / "r")
    assert_same_bits(whole, again)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "r").iterdir()}
    assert len(before) == 9 and str(fp4pass.report(whole)) == str(fp4pass.report(again))


def test_the_device_of_the_layers() -> None:
    """Layers come back from it; here it is the one they are on."""
    a = converted(model(), CROSS, rules=NO_HEAD)
    b = converted(model(), CROSS, rules=NO_HEAD, device="cpu")
    assert_same_bits(a, b)
    with pytest.raises(OptionError, match=r"device is 'cpu', .* only after prepare\(model, seq"):
        fp4pass.convert(model(), "nvfp4", method="naive", device="cpu")


class Routed(Block):
    """Tokens choose whether they are routed, by what comes in."""

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Any:
        chosen = x[x[..., 0] > 0]
        return x + self.down(self.up(x)) + self.side(chosen).mean(), None


def routed() -> Model:
    source = model()
    for layer in source.layers:
        layer.__class__ = Routed
    return source


def shared() -> Model:
    source = model()
    source.layers[2].down.weight = source.layers[0].down.weight
    return source


def generate(source: Any) -> None:
    source.generate(zoo._ids(0, 1, 9), max_new_tokens=3, min_new_tokens=3, do_sample=False)


def fp4(method: Any, act: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    return lambda source: act(fp4pass.prepare(source, method, **options))


def around() -> nn.Module:
    """A model that does not call its layers."""
    found = model()
    found.forward = lambda x: found.head(x)
    return found


def convert_after_a_batch(m: nn.Module) -> nn.Module:
    fp4pass.calibrate(m, [torch.ones(2, K)], progress=False)
    return fp4pass.convert(m, "nvfp4", method="gptq")


SEQUENTIAL: dict[str, Any] = {"sequential": True}
ERRORS: list[tuple[Callable[[], Any], Callable[[Any], Any], type[Exception], str]] = [
    (model, fp4(CROSS, id), OptionError, r"layers\.0\.up: .*Give sequential=True, and"),
    (model, fp4(CROSS, id, **SEQUENTIAL), OptionError, r"head: .*another method: rules=\[\('head'"),
    (
        lambda: nn.Sequential(nn.Linear(K, K), nn.ReLU()),
        fp4("gptq", id, **SEQUENTIAL),
        StateError,
        "expected a list of at least two layers .* got Sequential without one",
    ),
    (shared, fp4("gptq", id, **SEQUENTIAL), StateError, "share one weight, but are in"),
    (
        lambda: fp4pass.prepare(model(), "gptq"),
        fp4("gptq", id, **SEQUENTIAL),
        StateError,
        "is prepared with sequential=False",
    ),
    (
        around,
        fp4("gptq", convert_after_a_batch, rules=NO_HEAD, **SEQUENTIAL),
        CalibrationError,
        r"layers: calibration never reached these layers\. Run batches that use them",
    ),
    (
        routed,
        lambda m: converted(m, CROSS, rules=NO_HEAD),
        CalibrationError,
        r"layers\.1\.side: other tokens reach it .*\[\('layers\.1\.side', \{'method': 'gptq'\}\)",
    ),
    (
        CASES["llama"].build,
        fp4("gptq", generate, **SEQUENTIAL),
        CalibrationError,
        r"model\.layers is called with a cache that is filled",
    ),
]


@pytest.mark.core
@pytest.mark.parametrize(("build", "act", "error", "message"), ERRORS)
def test_an_error_says_what_to_do(
    build: Callable[[], Any], act: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        act(build())


# ---- what layers are called with ----------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.proj, self.returns, self.calls = nn.Linear(32, 32), returns, 0

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        self.calls += 1
        y = x + self.proj(x) * scale
        return {"tensor": y, "tuple": (y,), "more": (y, scale)}[self.returns]


class Layered(nn.Module):
    """Layers that are called with a value, which may come from what they return."""

    def __init__(self, returns: str = "tensor", derived: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(returns) for _ in range(6))
        self.derived = derived

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            scale = x.mean() if self.derived and i > 3 else torch.tensor(float(i))
            found = layer(x, scale)
            x = found if isinstance(found, Tensor) else found[0]
        return x


@pytest.mark.core
@pytest.mark.parametrize(
    ("returns", "derived", "counts"),
    [
        ("tensor", False, [2, 1, 0, 0, 0, 0]),
        ("tuple", False, [2, 1, 0, 0, 0, 0]),
        # Whoever returns more, or gets what comes of others, is run.
        ("more", False, [2, 2, 1, 1, 1, 1]),
        ("tensor", True, [3, 2, 1, 1, 1, 1]),
    ],
)
def test_recording_runs_no_layer_that_it_need_not(
    returns: str, derived: bool, counts: list[int]
) -> None:
    torch.manual_seed(0)
    model, x = Layered(returns, derived).eval(), torch.randn(3, 32)
    whole = copy.deepcopy(model)
    seen: list[tuple[Any, ...]] = []
    for layer in whole.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    expected = whole(x)
    fp4pass.prepare(model, sequential=True)
    fp4pass.calibrate(model, [x], progress=False)
    assert [layer.calls for layer in model.layers] == counts
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    (call,) = get_state(model).recording.stacks[0].calls
    assert torch.equal(call.hidden, x)
    for (_, scale), (args, _) in zip(seen, call.arguments, strict=True):
        assert torch.equal(args[1], scale)
    assert torch.equal(model(x), expected)
