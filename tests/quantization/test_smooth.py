"""Scales that are folded leave the float model as it was, and outliers cost less."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import bits
from torch import Tensor, nn

import fp4pass
from fp4pass.calibration.smoothing import Smoothed, nearest_octaves
from fp4pass.errors import CalibrationError, OptionError, StateError, TraceError
from fp4pass.quantization.observers.observer import OBSERVERS
from fp4pass.quantization.recipe import Recipe
from fp4pass.record.state import get_state

K = 48


class GatedMlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, 80, bias=bias)
        self.up_proj = nn.Linear(K, 80, bias=bias)
        self.down_proj = nn.Linear(80, K, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RmsNorm(nn.Module):
    """As in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(K) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class AffineNorm(RmsNorm):
    """With a bias, and cast at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(K))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide + self.bias).to(x.dtype)


class GemmaNorm(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class Block(nn.Module):
    """norm -> q, k, v, which are not projected again, and norm -> gate, up -> down."""

    def __init__(self, norm: type[nn.Module] = RmsNorm) -> None:
        super().__init__()
        self.norm, self.norm2 = norm(), norm()
        self.q, self.k, self.v = (nn.Linear(K, K) for _ in range(3))
        self.mlp = GatedMlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return x + self.mlp(self.norm2(x))


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(up) + self.other(up)


class Product(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(up) * up)


class Residual(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(up) + up


class CalledTwice(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.up(x + 1)


class ReadsWeight(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.up.weight.sum()


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Inputs whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (4, 12)), K, generator=generator) * torch.logspace(-1, 1, K)


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    """A model whose parameters differ in size from channel to channel."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand(parameter.shape[:1] + (1,) * (parameter.ndim - 1)) * 3)
    return model.to(dtype).eval()


def exported(model: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    x = wide().to(dtype)
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    graph_module = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    graph_module.training = False
    return graph_module


def graph(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    return exported(made(make, dtype), dtype)


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [wide(seed=seed).to(dtype) for seed in range(3)]


def smooth(
    model: Any, strength: float = 0.5, dtype: torch.dtype = torch.float32
) -> tuple[Smoothed, ...]:
    return fp4pass.smooth(model, strength, data=batches(dtype), progress=False)


def calibrated(model: Any, method: str = "hessian") -> Any:
    return fp4pass.calibrate(fp4pass.prepare(model, method), batches(), progress=False)


def names(folded: tuple[Smoothed, ...]) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.producer, each.linears) for each in folded]


def conv1d() -> nn.Module:
    """Weights stored as [K, N]."""
    layer = pytest.importorskip("transformers").pytorch_utils.Conv1D
    return nn.Sequential(layer(K, K), nn.LeakyReLU(), layer(24, K))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(K), nn.Linear(K, 24)), [("0", ("1",))]),
    "torch's rms norm": (lambda: nn.Sequential(nn.RMSNorm(K), nn.Linear(K, 24)), [("0", ("1",))]),
    "affine norm": (lambda: nn.Sequential(AffineNorm(), nn.Linear(K, 24)), [("0", ("1",))]),
    "conv1d": (conv1d, [("0", ("2",))]),
    "gated mlp": (GatedMlp, [("up_proj", ("down_proj",))]),
    "relu": (
        lambda: nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Dropout(), nn.Linear(K, 24)),
        [("0", ("3",))],
    ),
    "two readers": (TwoReaders, [("up", ("down", "other"))]),
}
BLOCK = [
    ("norm", ("q", "k", "v")),
    ("norm2", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
]


def check(model: Any, expected: list[Any], dtype: torch.dtype) -> None:
    """The folds are those expected, change no bit of any output, and are none the second time."""
    x = wide(seed=9).to(dtype)
    with torch.no_grad():
        before, state = model(x), copy.deepcopy(dict(model.named_parameters()))
        folded = smooth(model, 0.6, dtype)
        assert names(folded) == expected
        assert all(each.smallest < each.largest for each in folded)
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, state[n])]
        folds = {part for each in folded for part in (each.producer, *each.linears)}
        assert {name.removesuffix(".weight").removesuffix(".bias") for name in changed} == folds
        assert smooth(model, 0.6, dtype) == ()
        assert torch.equal(bits(model(x)), bits(before))


# All in float32, and in bfloat16 those whose norms are cast.
@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MODELS),
        *((name, torch.bfloat16) for name in ("affine norm", "block")),
    ],
)
def test_models_compute_the_same_bits(name: str, dtype: torch.dtype) -> None:
    make, expected = MODELS.get(name, (Block, BLOCK))
    check(graph(make, dtype), expected, dtype)


UNTOUCHED: dict[str, Callable[[], nn.Module]] = {
    "gelu between": lambda: nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, 24)),
    "a norm without weight": lambda: nn.Sequential(
        nn.LayerNorm(K, elementwise_affine=False), nn.Linear(K, 24)
    ),
    "1 + weight": lambda: nn.Sequential(GemmaNorm(), nn.Linear(K, 24)),
    "no producer": lambda: nn.Sequential(nn.Linear(K, 24)),
    "a product with what is made of it": Product,
    "a residual sum": Residual,
    "called twice": CalledTwice,
    "a weight that is read": ReadsWeight,
}


class Overlapping(nn.Module):
    """Two weights that are overlapping slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.a, self.b = nn.Linear(K, 24), nn.Linear(K, 24)
        rows = torch.randn(36, K)
        self.a.weight, self.b.weight = nn.Parameter(rows[:24]), nn.Parameter(rows[12:])

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.norm(x)) + self.b(x)


UNTOUCHED |= {"a weight that overlaps another": Overlapping}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_read_elsewhere_stays_as_it_is(name: str) -> None:
    model = graph(UNTOUCHED[name])
    state = copy.deepcopy(dict(model.named_parameters()))
    assert smooth(model) == ()
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def test_channels_whose_parameters_would_lose_bits_keep_scale_1() -> None:
    live = made(lambda: nn.Sequential(nn.LayerNorm(K), nn.Linear(K, 24)), torch.float16)
    model = exported(live, torch.float16)
    with torch.no_grad():
        # Large inputs would have the norm's weight divided, and it is near the end of float16.
        live[0].weight[7] = 2.0**-14 * 1.0009765625
        live[1].weight[:, 7] = 2.0**-14 * 1.0009765625
        live[0].bias.copy_(torch.logspace(-2, 2, K))
    weight = live[0].weight.clone()
    assert smooth(model, 1.0, torch.float16)
    changed = live[0].weight != weight
    assert changed.any() and not changed[7]


@pytest.mark.core
def test_octaves_leave_the_least_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    for spread in (0.2, 0.8, 3.0):
        wanted = 0.5 + spread * torch.randn(7, generator=generator, dtype=torch.float64)
        found = nearest_octaves(wanted)
        least = (wanted - found).var(correction=0)
        around = range(-1, 2)
        for steps in itertools.product(around, repeat=7):
            other = wanted - found + torch.tensor(steps, dtype=torch.float64)
            assert least <= other.var(correction=0) + 1e-12, (spread, steps)
        assert abs(found.mean()) <= 0.5 and not nearest_octaves(wanted - found).any()
    # Channels of one size keep one scale, wherever that lies between two octaves.
    for size in torch.arange(0, 1, 0.125, dtype=torch.float64):
        assert not nearest_octaves(size + torch.tensor([-0.2, 0.0, 0.2, 0.1])).any(), size


def test_outliers_cost_less() -> None:
    """One channel of the inputs is 100 times the others: all others of its blocks suffer."""
    errors = []
    for strength in (None, 0.5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, 24)).eval()
        with torch.no_grad():
            model[0].weight[::16] = 100
            model[1].weight[:, ::16] /= 100
        float_model = copy.deepcopy(model)
        model = exported(model)
        if strength is not None:
            assert smooth(model, strength)
        fp4pass.convert(calibrated(model), "nvfp4", "sse")
        x = wide(25, 2, seed=5)
        with torch.no_grad():
            errors.append(float((model(x) - float_model(x)).norm() / float_model(x).norm()))
    print(f"output error {errors[0]:.3f} as it is, {errors[1]:.3f} smooth")
    assert errors[1] < 0.6 * errors[0]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.named_parameters()))


def test_a_live_model_is_smoothed_as_its_graph_is() -> None:
    live, twin = made(Block), made(Block)
    before, hooks = live(wide(seed=9)), dict(live.norm._forward_pre_hooks)
    folded = smooth(live, 0.6)
    assert names(folded) == BLOCK
    assert folded == smooth(exported(twin), 0.6)
    assert all(torch.equal(p, state_of(twin)[n]) for n, p in live.named_parameters())
    assert torch.equal(bits(live(wide(seed=9))), bits(before))
    # It is not prepared, and a balanced model stays as it is.
    assert get_state(live) is None and live.norm._forward_pre_hooks == hooks
    assert not any(OBSERVERS in module.__dict__ for module in live.modules())
    assert smooth(live, 0.6) == ()


def test_the_recipe_of_a_live_model_says_so() -> None:
    model, method = made(GatedMlp), "hessian"
    assert fp4pass.smooth(model, 0.25, data=[wide(1)[0]], progress=False)
    calibrated(model, method)
    fp4pass.convert(model, "nvfp4a16", method)
    recipe = get_state(model).recipe  # type: ignore[union-attr]
    assert recipe["smooth"] == 0.25 and Recipe.from_dict(recipe).config.method_name == method


class Untraceable(GatedMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_a_model_that_cannot_be_traced_stays_as_it_is() -> None:
    model = made(Untraceable)
    before = state_of(model)
    with pytest.raises(TraceError, match="Untraceable"):
        fp4pass.smooth(model, data=[wide()], progress=False)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert get_state(model) is None


def test_errors() -> None:
    for model in (made(GatedMlp), graph(GatedMlp)):
        with pytest.raises(StateError, match=r"is prepared already.*before prepare"):
            fp4pass.smooth(calibrated(model), data=[wide()])
    for strength in (-0.1, 1.5, "0.5", True, float("nan")):
        with pytest.raises(OptionError, match="0 to 1"):
            fp4pass.smooth(made(GatedMlp), strength)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="already converted"):
        fp4pass.smooth(fp4pass.convert(made(GatedMlp), "nvfp4", method="sse"), data=[wide()])
    with pytest.raises(CalibrationError, match="no batches"):
        fp4pass.smooth(made(GatedMlp), data=iter(()))
    with pytest.raises(OptionError, match="tokenizer"):
        fp4pass.smooth(made(GatedMlp))
    with pytest.raises(CalibrationError, match="held NaN"):
        fp4pass.smooth(made(GatedMlp), data=[wide() * torch.nan], progress=False)
