"""Bad input: what the message says, and that the model is what it was before."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import assert_same_bits
from torch import Tensor, nn

import fp4pass
from fp4pass import errors
from fp4pass.errors import (
    CalibrationError,
    Fp4PassError,
    NonFiniteError,
    OptionError,
    RuleError,
    ShapeError,
    StateError,
    unknown_name,
)
from fp4pass.nn.linear import QuantizedLinear
from fp4pass.quantization.plan import plan_layers, with_statistics


class Mlp(nn.Module):
    """Two linears with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 64)
        self.down_proj = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


class Model(nn.Module):
    """Two layers, a head, and a layer that no input reaches."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.lm_head = nn.Linear(32, 16)
        if unused:
            self.unused = nn.Linear(32, 32)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(seed))


def calibrated(method: str = "hessian", **options: Any) -> Model:
    model = build(**options)
    fp4pass.prepare(model, method)
    return fp4pass.calibrate(model, [batch()], progress=False)


def rows(model: nn.Module) -> dict[str, Any]:
    return {row.name: row for row in fp4pass.report(model).rows}


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.skip_reason for row in fp4pass.report(model).skipped}


def check_untouched(model: nn.Module, call: Callable[[], Any], error: Any, *parts: str) -> None:
    """The call raises, says all parts, and leaves modules, weights, hooks and outputs alone."""

    def look() -> tuple[Any, ...]:
        return (
            [(name, type(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()],
            [(name, id(t)) for name, t in model.state_dict(keep_vars=True).items()],
        )

    before, output = look(), model(batch()).clone()
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))
    assert look() == before
    assert torch.equal(model(batch()), output)


def test_every_error_has_one_base() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    raised = [c for c in classes if issubclass(c, Exception)]
    assert all(issubclass(c, Fp4PassError) for c in raised) and len(raised) > 8
    assert fp4pass.Fp4PassError is Fp4PassError


def test_unknown_names() -> None:
    message = str(unknown_name("Color", "geren", ["red", "Green"]))
    assert message == "Color 'geren' does not exist. Did you mean 'Green'? Known: Green, red."
    assert "Did you mean" not in str(unknown_name("Color", "xyz", ["red", "green"]))


# Weights.


@pytest.mark.parametrize(
    "bad, method, fmt", [(math.nan, "hessian", "nvfp4"), (math.inf, "naive", "mxfp4")]
)
@pytest.mark.core
def test_a_weight_that_is_not_finite(bad: float, method: str, fmt: str) -> None:
    model = calibrated(method)
    with torch.no_grad():
        model.layers[1].down_proj.weight[3, 4] = bad
    with pytest.raises(NonFiniteError) as caught:
        fp4pass.convert(model, fmt, method)
    for part in ("layers.1.down_proj", "NaN or infinity", "rules=[('layers.1.down_proj', None)]"):
        assert part in str(caught.value)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    fp4pass.convert(model, fmt, method, rules=[("layers.1.down_proj", None)])
    assert set(reasons(model)) == {"layers.1.down_proj", "lm_head"}


class Scaled(nn.Linear):
    """A linear that does more than its forward when it is called."""

    def __call__(self, x: Tensor) -> Tensor:
        return 100 * super().__call__(x)


def with_weight(dtype: torch.dtype) -> nn.Module:
    linear = nn.Linear(32, 32)
    linear.weight = nn.Parameter(torch.ones(32, 32).to(dtype), requires_grad=False)
    return linear


def with_computed(name: str) -> nn.Module:
    linear = nn.Linear(32, 32)
    nn.utils.parametrize.register_parametrization(linear, name, nn.Tanh())
    return linear


# A layer, why it is skipped, and whether it can be called.
SKIPPED: list[tuple[Callable[[], nn.Module], str, bool]] = [
    (lambda: with_weight(torch.int8), "torch.int8, not float32, bfloat16, float16 or", False),
    (lambda: nn.Linear(40, 32), "in_features=40 is not a multiple of 16 (the block of", False),
    (lambda: Scaled(32, 32), "its class Scaled is more than an nn.Linear", True),
    (lambda: with_computed("bias"), "its bias is computed", True),
    (lambda: with_computed("weight"), "its weight is computed", True),
    (lambda: nn.utils.weight_norm(nn.Linear(32, 32)), "its weight is computed", True),
    (lambda: nn.LazyLinear(32), "run the model once", False),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("make", "reason", "runs"), SKIPPED)
@pytest.mark.core
def test_what_cannot_be_packed_is_skipped_and_refused_by_name(
    make: Callable[[], nn.Module], reason: str, runs: bool
) -> None:
    model, x = nn.Sequential(make(), nn.Linear(32, 32)), batch()
    before = model[0](x) if runs else None
    with pytest.raises(ShapeError, match=r"^0: .* Skip this layer with rules=\[\('0', None\)\]"):
        fp4pass.convert(model, "nvfp4", "sse", rules=[("0", {"method": "naive"})])
    fp4pass.convert(model, "nvfp4", method="sse")
    assert set(reasons(model)) == {"0"} and reason in reasons(model)["0"]
    assert not runs or torch.equal(model[0](x), before)


def test_a_rule_with_a_wildcard_takes_what_fits() -> None:
    model = build()
    model.layers[0].up_proj, model.layers[0].down_proj = nn.Linear(32, 48), nn.Linear(48, 32)
    fp4pass.convert(model, "nvfp4", method="sse", rules=[("*.down_proj", {"block": 32})])
    assert "not a multiple of 32" in reasons(model)["layers.0.down_proj"]
    assert rows(model)["layers.1.down_proj"].config.block == 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, r"no linear layer to quantize\. There is none"),
        (lambda: nn.Sequential(nn.Linear(5, 5)), r"to quantize\. 0: in_features=5 is not a mul"),
        (lambda: nn.Linear(5, 5), r"no linear layer to quantize\. the model: in_features=5"),
        (lambda: nn.Sequential(nn.Linear(32, 32, device="meta")), "0: its weight is on the meta"),
    ],
)
def test_a_model_without_linears(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(StateError, match=message):
        fp4pass.convert(model, method="sse")
    if "meta" not in message:
        with pytest.raises(StateError, match=message):
            fp4pass.prepare(model, method="sse")


# Options.


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        ("lm_head", ("rules: expected a list of (glob, options), got str",)),
        (["lm_head"], ("a rule: expected (glob, None)", "('*.down_proj', None)")),
        ([("*.up_proj", "mxfp4")], ("The rule for '*.up_proj': expected None or a dict, got 'mx",)),
        (
            [("*.up_proj", {"format": "mxfp4"})],
            ("In the rule for '*.up_proj', option 'format'", "Did you mean 'fmt'?", "Known: acti"),
        ),
        ([("*.donw_proj", None)], ("'*.donw_proj' matches no linear", ".down_proj'?")),
        ([("model.lm_head", None)], ("matches no linear", "Did you mean 'lm_head'?")),
    ],
    ids=str,
)
@pytest.mark.core
def test_bad_rules(rules: Any, parts: tuple[str, ...]) -> None:
    model = build()
    for call in (fp4pass.prepare, fp4pass.convert):
        wrong = functools.partial(call, model, method="sse", rules=rules)
        check_untouched(model, wrong, (RuleError, OptionError), *parts)


# What rules do.


@pytest.mark.core
def test_the_first_match_wins() -> None:
    model = build()
    rules = [
        ("layers.0.up_proj", {"fmt": "mxfp4"}),
        ("layers.0.*", None),
        ("*_proj", {"block": 32, "method": "naive", "weight_only": True}),
    ]
    fp4pass.convert(model, method="sse", rules=rules)
    found = rows(model)
    first, third = found["layers.0.up_proj"], found["layers.1.down_proj"]
    assert first.config == fp4pass.LinearConfig("mxfp4", "sse")
    assert found["layers.0.down_proj"].skip_reason == "rule ('layers.0.*', None)"
    assert third.config == fp4pass.LinearConfig("nvfp4", "naive", weight_only=True, block=32)
    assert model.layers[0].up_proj.config.format.key == "mxfp4"
    assert model.layers[1].down_proj.config.format.key == "nvfp4:32"


@pytest.mark.parametrize("options", [{"fmt": "mxfp4"}, {"weight_only": True}, None], ids=str)
@pytest.mark.core
def test_rules_cannot_take_apart_what_shares_a_weight(options: dict[str, Any] | None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    check_untouched(
        model,
        lambda: fp4pass.convert(model, "nvfp4", method="sse", rules=[("1", options)]),
        RuleError,
        "0 and 1 share one weight",
    )
    fp4pass.convert(model, "nvfp4", method="sse", rules=[("*", options or {})])
    assert model[0].weight_packed is model[1].weight_packed


def test_a_rule_can_take_the_head() -> None:
    model = build()
    fp4pass.convert(model, "nvfp4", method="sse")
    assert "output embedding; add a rule to quantize it" in reasons(model)["lm_head"]
    model = build()
    fp4pass.convert(model, "nvfp4", method="sse", rules=[("lm_head", {})])
    assert not reasons(model) and isinstance(model.lm_head, QuantizedLinear)


def test_a_method_of_a_rule_is_prepared_for() -> None:
    model = build()
    fp4pass.prepare(model, "sse", rules=[("*.down_proj", {"method": "hessian"})])
    fp4pass.calibrate(model, [batch()], progress=False)
    fp4pass.convert(model, "nvfp4", method="sse")
    found = rows(model)
    methods = {row.config.method_name for row in found.values() if row.config is not None}
    assert methods == {"hessian", "sse"}
    assert found["layers.0.down_proj"].config.method_name == "hessian"


# Order of calls, and calibration.


def prepared(**options: Any) -> Model:
    return fp4pass.prepare(build(), **options)


def given(model: nn.Module, x: Any) -> nn.Module:
    return fp4pass.calibrate(model, x, progress=False)


OBSERVED = "layers.0.up_proj: prepare did not observe it (rule ('layers.0.*', None))"
UP_MXFP4 = [("*.up_proj", {"fmt": "mxfp4"})]
UNLIKE = "prepared for a method or a rotation that does not collect what 'hessian' needs"
AGAIN = ("already converted, as 'layers.0.up_proj' is", "float model")
MAKE: dict[str, Callable[[], Any]] = {
    "float": build,
    "sse": lambda: calibrated("sse"),
    "hessian": calibrated,
    "few": lambda: given(prepared(rules=[("layers.0.*", None)]), [batch()]),
    "packed": lambda: fp4pass.convert(build(), "nvfp4", method="sse"),
    "no batch": prepared,
    "NaN": lambda: given(prepared(), [batch(), batch() * math.nan, batch()]),
    "infinity": lambda: given(prepared(method="sse"), [batch() / 0]),
    "large": lambda: given(prepared(), [1e25 * torch.ones(3, 32)]),
}
# A model, a call, its error, and what it says.
WRONG_ORDER: list[tuple[str, Callable[[Any], Any], type[Exception], tuple[str, ...]]] = [
    (
        "float",
        lambda m: fp4pass.convert(m, "nvfp4"),
        CalibrationError,
        ("Method 'hessian' needs calibration data", "prepare(model, 'hessian')", "method='sse'"),
    ),
    ("sse", lambda m: fp4pass.convert(m, method="hessian"), CalibrationError, (UNLIKE,)),
    (
        "sse",
        lambda m: fp4pass.prepare(m, "hessian"),
        StateError,
        ("a method or a rotation that needs other statistics", "fresh copy"),
    ),
    # What prepare skipped has not been observed.
    ("few", lambda m: fp4pass.convert(m, rules=UP_MXFP4), CalibrationError, (OBSERVED,)),
    ("few", lambda m: fp4pass.prepare(m, rules=UP_MXFP4), StateError, ("other rules", "convert")),
    ("packed", fp4pass.convert, StateError, (*AGAIN, "nothing to convert")),
    ("packed", fp4pass.prepare, StateError, (*AGAIN, "nothing to prepare")),
    ("packed", lambda m: fp4pass.convert(nn.Sequential(m)), StateError, ("already converted",)),
    ("packed", lambda m: given(m, [batch()]), StateError, ("not prepared",)),
    ("float", lambda m: given(m, [batch()]), StateError, ("not prepared", "prepare(model)")),
    ("no batch", lambda m: given(m, iter(())), CalibrationError, ("no batches to calibrate on",)),
    (
        "NaN",
        lambda m: fp4pass.convert(m, "nvfp4"),
        CalibrationError,
        ("layers.0.up_proj", "NaN or infinity during calibration", "calibrate again"),
    ),
    (
        "infinity",
        lambda m: fp4pass.convert(m, "nvfp4", method="sse"),
        CalibrationError,
        ("layers.0.up_proj", "NaN or infinity during calibration"),
    ),
    (
        "large",
        lambda m: fp4pass.convert(m, "nvfp4"),
        CalibrationError,
        ("layers.0.up_proj: its inputs reached 1e+25, whose square",),
    ),
]


@pytest.mark.parametrize(("made", "call", "error", "parts"), WRONG_ORDER)
def test_calls_in_a_wrong_order(
    made: str, call: Callable[[Any], Any], error: type[Exception], parts: tuple[str, ...]
) -> None:
    model = MAKE[made]()
    check_untouched(model, functools.partial(call, model), error, *parts)


def test_rules_of_convert_come_before_those_of_prepare() -> None:
    rules = [("*.up_proj", {"fmt": "mxfp4", "method": "sse"})]
    found = rows(fp4pass.convert(MAKE["few"](), rules=rules))
    assert found["layers.0.up_proj"].config.fmt == "mxfp4"
    assert found["layers.0.down_proj"].skip_reason


def counts(model: nn.Module) -> dict[str, int]:
    plan = with_statistics(plan_layers(model, fp4pass.LinearConfig()))
    return {layer.name: layer.stats.tokens for layer in plan.layers}


@pytest.mark.core
def test_preparing_twice_keeps_the_statistics() -> None:
    model = calibrated()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    assert fp4pass.prepare(model) is model and set(counts(model).values()) == {15}
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    twice = fp4pass.convert(given(model, [batch(1)]), "nvfp4")
    straight = fp4pass.convert(given(prepared(), [batch(), (batch(1),)]), "nvfp4")
    assert_same_bits(straight, twice)
    assert rows(twice)["layers.0.up_proj"].tokens == 30


def test_a_part_that_was_prepared_alone_is_not_prepared_any_more() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    fp4pass.prepare(model[0])
    fp4pass.convert(model, "nvfp4", method="sse")
    with pytest.raises(StateError):
        fp4pass.calibrate(model[0], [torch.ones(2, 32)], progress=False)


def test_inputs_that_a_linear_refuses_are_not_observed() -> None:
    model = nn.Linear(32, 32)
    fp4pass.prepare(model)
    model(torch.ones(4, 32))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(1e3 * torch.ones(2, 33))
    fp4pass.convert(model, "nvfp4")
    assert rows(model)[""].tokens == 4
    assert model.input_global_scale.item() == 2048.0


NO_BATCH = r"No batch was run: call fp4pass\.calibrate\(model, data\), or run the model on some"


def test_no_batch_was_run() -> None:
    model = fp4pass.prepare(build(), unreached="sse")
    fp4pass.calibrate(copy.deepcopy(model), [batch()], progress=False)
    with pytest.raises(CalibrationError, match=NO_BATCH) as caught:
        fp4pass.convert(model, "nvfp4")
    assert "a copy of the model do not count" in str(caught.value)
    assert "rules=" not in str(caught.value)
    # A call by hand is a batch.
    model(batch())
    fp4pass.convert(model, "nvfp4")


def test_batches_without_tokens() -> None:
    model = fp4pass.prepare(build())
    fp4pass.calibrate(model, [torch.empty(0, 32)], progress=False)
    with pytest.raises(CalibrationError, match="some batches with tokens"):
        fp4pass.convert(model, "nvfp4")
    # With tokens as well, the empty one changes nothing.
    fp4pass.calibrate(model, [batch(), torch.empty(2, 0, 32)], progress=False)
    fp4pass.convert(model, "nvfp4")
    assert rows(model)["layers.0.up_proj"].tokens == 15
    assert model(torch.empty(0, 32)).shape == (0, 16)


def test_training_mode_warns() -> None:
    model = fp4pass.prepare(build().train())
    with pytest.warns(UserWarning, match=r"training mode: dropout is on .* model.eval\(\) first"):
        fp4pass.calibrate(model, [batch()], progress=False)


def test_the_default_dtype_changes_nothing() -> None:
    expected, model, x = build(), build(), batch()
    for each, default in ((expected, torch.float32), (model, torch.float64)):
        torch.set_default_dtype(default)
        try:
            fp4pass.prepare(each)
            each(x)
            fp4pass.convert(each, "nvfp4")
        finally:
            torch.set_default_dtype(torch.float32)
    assert fp4pass.report(model) == fp4pass.report(expected)
    assert torch.equal(model(x), expected(x))
