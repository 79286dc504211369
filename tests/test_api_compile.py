"""torch.compile and torch.export of prepared and converted models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_zoo import COMPILED, params_of, rounding, statistics
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import fp4pass
from fp4pass.evaluation import token_windows
from fp4pass.linear import QuantizedLinear
from fp4pass.quantization.observer import OBSERVERS

TINY = Path(__file__).parents[1] / "examples" / "tiny_lm"

# Kinds of layers differ in them; the others would compile the same code again.
DYNAMIC = ("llama", "gpt2", "mlp")


def params(names: tuple[str, ...]) -> list[object]:
    return params_of({name: case for name, case in COMPILED.items() if name in names})


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def compiled(model: nn.Module, backend: Any = "aot_eager", dynamic: bool | None = None) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)


def run(case: zoo.Case, model: nn.Module, i: int) -> Tensor:
    with torch.no_grad(), zoo.unfused():
        return case.run(model, i)


def assert_close_to_eager(case: zoo.Case, model: nn.Module, code: Any, i: int) -> None:
    expected = run(case, model, i)
    torch.testing.assert_close(run(case, code, i), expected, rtol=0, atol=rounding(expected))


@pytest.mark.parametrize("case", params_of(COMPILED))
def test_converted_models_compile_to_one_graph(case: zoo.Case) -> None:
    model = fp4pass.convert(case.build(), method="naive", weight_only=True)
    code = compiled(model)
    assert_close_to_eager(case, model, code, 0)


@pytest.mark.parametrize("case", params(DYNAMIC))
@pytest.mark.parametrize("weight_only", [True, False])
def test_five_shapes_cause_at_most_three_graphs(case: zoo.Case, weight_only: bool) -> None:
    model = fp4pass.convert(case.build(), method="naive", weight_only=weight_only)
    counter = CompileCounterWithBackend("eager")
    code = compiled(model, counter)
    # Of one kind: every other batch has padding, or fewer dimensions.
    for i in (0, 2, 4, 6, 8):
        expected, got = run(case, model, i), run(case, code, i)
        assert torch.equal(got, expected)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("case", params(("llama", "mlp")))
def test_dynamic_shapes_from_the_start(case: zoo.Case) -> None:
    model = fp4pass.convert(case.build(), method="naive", weight_only=True)
    counter = CompileCounterWithBackend("eager")
    code = compiled(model, counter, dynamic=True)
    for i in (0, 4, 6):
        assert_close_to_eager(case, model, code, i)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", params(("llama", "mlp")))
def test_inductor_gives_what_eager_gives(case: zoo.Case) -> None:
    model = fp4pass.convert(case.build(), method="naive", weight_only=True)
    code = compiled(model, "inductor", dynamic=True)
    for i in (0, 4):
        assert_close_to_eager(case, model, code, i)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", params(("llama", "gemma3", "gpt2", "bert", "mlp")))
def test_inductor_gives_the_bits_of_eager_with_quantized_inputs(
    case: zoo.Case, dtype: torch.dtype
) -> None:
    """Norms, activations and attentions of every kind, on a CPU, with dynamic shapes."""
    model = fp4pass.convert(case.build().to(dtype), method="naive")
    code = compiled(model, "inductor", dynamic=True)
    for i in (0, 4):
        assert torch.equal(run(case, code, i), run(case, model, i))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compiling_a_language_model_changes_no_bit(dtype: torch.dtype, fmt: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    text = (TINY / "eval.txt").read_text(encoding="utf-8")
    ids = token_windows(tokenizer, text, windows=2)
    fp4pass.convert(model, fmt, method="naive")
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        code = compiled(model, "inductor")(ids, use_cache=False).logits
    assert torch.equal(eager, code)


@pytest.mark.parametrize("case", params(("llama", "mlp", "used_twice")))
def test_prepared_models_calibrate_when_compiled(case: zoo.Case) -> None:
    eager = fp4pass.prepare(case.build())
    model = fp4pass.prepare(case.build())
    code = compiled(model)
    for i in (0, 2, 4):
        expected = run(case, eager, i)
        torch.testing.assert_close(run(case, code, i), expected, rtol=0, atol=rounding(expected))
    for a, b in zip(eager.modules(), model.modules(), strict=True):
        if OBSERVERS in a.__dict__:
            one, other = statistics(a), statistics(b)
            assert one.tokens == other.tokens and one.tokens
            torch.testing.assert_close(one.block_hessian, other.block_hessian, rtol=1e-4, atol=1e-3)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))


@pytest.mark.parametrize("how", ["function", "method"])
def test_code_compiled_before_is_forgotten(how: str) -> None:
    model, x = mlp(), torch.randn(5, 64)
    if how == "method":
        # nn.Sequential.compile compiles nothing in some versions of torch, so not at the root.
        model = nn.ModuleDict({"inner": model})
        model.forward = lambda x: model["inner"](x)
        code = model
        model.compile(backend="aot_eager")
    else:
        code = compiled(model)
    with torch.no_grad():
        original = code(x)
        assert fp4pass.prepare(code) is code
        assert torch.equal(code(x), original)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert all(statistics(m).tokens == 5 for m in linears)
        fp4pass.convert(code, method="hessian", weight_only=True)
        assert all(isinstance(m, QuantizedLinear) for m in linears)
        got = code(x)
    assert not torch.equal(got, original)
    expected = copy.deepcopy(linears)
    assert torch.equal(got, expected[1](F.silu(expected[0](x))))
    assert fp4pass.report(code).rows


@pytest.mark.parametrize("case", params(("llama", "gpt2", "qwen3_moe", "t5", "bert", "mlp")))
def test_converted_models_export_as_the_float_model_does(case: zoo.Case) -> None:
    assert case.example
    args, kwargs = case.example()
    model = fp4pass.convert(case.build(), method="naive")
    program = torch.export.export(
        model, args, kwargs, dynamic_shapes=case.dynamic_shapes, strict=False
    )
    with torch.no_grad():
        expected = zoo.tensor_of(model(*args, **kwargs))
        got = zoo.tensor_of(program.module()(*args, **kwargs))
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding(expected))
    names = [str(node.target) for node in program.graph.nodes]
    assert any(name.startswith("fp4pass.linear_quantized") for name in names)


def test_exporting_a_prepared_model_leaves_its_statistics_alone() -> None:
    model, x = mlp(), torch.randn(5, 64)
    expected = model(x)
    fp4pass.prepare(model)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), expected)
    model(x)
    fp4pass.convert(model)
    assert [row.tokens for row in fp4pass.report(model).rows] == [5, 5]


def test_functional_call_runs_a_region_without_warnings() -> None:
    model, x = mlp(), torch.randn(5, 64)
    fp4pass.convert(model, method="sse")
    state = {name: tensor + 1 if "bias" in name else tensor for name, tensor in state_of(model)}
    called = torch.func.functional_call(model, state, (x,))
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    assert torch.equal(called, other(x)) and not torch.equal(called, model(x))


def state_of(model: nn.Module) -> Any:
    return model.state_dict().items()


class Patches(nn.Module):
    """A linear that reads what a convolution leaves with channels first in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_inputs_of_any_memory_layout_compile(fmt: str) -> None:
    model = fp4pass.convert(Patches(), fmt, "sse")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(compiled(model, "inductor")(x), model(x))


class Gated(nn.Module):
    """Two linears that read one tensor, in a forward that is no region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(x) if x.ndim > 1 else x
        return self.down(F.silu(self.left(y)) * self.up(y))


def test_calibration_when_compiled_counts_every_token_once() -> None:
    eager, model = (fp4pass.prepare(Gated()) for _ in range(2))
    code = compiled(model, "inductor")
    for i in (4, 5, 6):
        x = torch.randn(i, 64, generator=torch.Generator().manual_seed(i))
        # With gradients on, equal states that are made in the graph would be merged.
        eager(x), code(x)
    for name in ("left", "up", "down"):
        one, other = (statistics(m.get_submodule(name)) for m in (eager, model))
        assert one.tokens == other.tokens == 15
        torch.testing.assert_close(one.block_hessian, other.block_hessian)
