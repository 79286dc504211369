"""Operators: gradients, observation, what they refuse, and calls that pass the dispatcher by."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import VARIANTS
from kernel_cases import covering, formats, seeded
from ops.test_operators import divisor_of, packed_weight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp4pass import ops
from fp4pass.core.elements import Element
from fp4pass.core.formats import FORMATS, Format
from fp4pass.errors import DtypeError, OptionError, ShapeError
from fp4pass.kernels.linear.naive import linear_ref
from fp4pass.ops import registration
from fp4pass.ops.registration import OPERATORS, implementation_on

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(4, 64), (2, 3, 64), (0, 64), (64,)]


def test_search_of_a_stack() -> None:
    """The same as of each weight by its own global scale."""
    stack, scales = torch.randn(3, 5, 64, generator=seeded()), [2.0**-8, 2.0**-6, 2.0**-10]
    for objective in ("naive", "sse"):
        codes, scale = ops.search_stack(stack, scales, "nvfp4", objective)
        for i, g in enumerate(scales):
            expected = ops.search(stack[i], None, g, "nvfp4", objective)
            assert torch.equal(codes[i], expected[0]) and torch.equal(scale[i], expected[1])


@pytest.mark.core
def test_rotations_say_what_they_want() -> None:
    x = torch.randn(3, 96)
    with pytest.raises(ShapeError, match="multiple of 64"):
        ops.rotate(x, 64)
    with pytest.raises(OptionError, match="expected one of 32, 64, 128, got 48"):
        ops.rotate_quantize(x, 48, None, "mxfp4")
    with pytest.raises(DtypeError):
        ops.rotate(x.int(), 32)
    with pytest.raises(OptionError, match="naive"):
        ops.rotate_quantize(x, 32, None, "mxfp4", "best")


@formats
def test_gradients_of_norms_are_those_of_the_sum(fmt: Format) -> None:
    x, residual = (torch.randn(4, 64, generator=seeded(i), requires_grad=True) for i in (0, 1))
    rest = (None, None, "layer", 1e-6, divisor_of(fmt), fmt.key)
    total, *codes = ops.norm_quantize(x, residual, *rest)
    grad = torch.randn(4, 64)
    for each in torch.autograd.grad(total, (x, residual), grad):
        assert torch.equal(each, grad)
    alone = ops.norm_quantize(x + residual, None, *rest)
    assert not any(each.requires_grad for each in alone)
    assert torch.equal(total, x + residual) and all(map(torch.equal, codes, alone[1:]))


@covering(("fmt", "shape", "dtype", "quantized"), VARIANTS, SHAPES, DTYPES, (0, 1))
def test_gradients(
    fmt: Format, shape: tuple[int, ...], dtype: torch.dtype, quantized: bool
) -> None:
    """Those of the dense product: grad @ W for x and the sum of grad for the bias."""
    packed, scale = packed_weight(fmt)
    x = torch.randn(shape, generator=seeded()).to(dtype).requires_grad_()
    bias = torch.randn(5, generator=seeded(), requires_grad=True)
    weight = (packed, scale, divisor_of(fmt))
    if quantized:
        divisor = ops.dynamic_global_scale(x, fmt.key) if fmt.has_global_scale else None
        x_packed, x_scale = ops.quantize(x, divisor, fmt.key)
        y = ops.linear_quantized(x, x_packed, x_scale, divisor, *weight, bias, fmt.key)
    else:
        y = ops.linear(x, *weight, bias, fmt.key)
    grad = torch.randn(y.shape, generator=seeded(1)).to(dtype)
    y.backward(grad)
    assert x.grad is not None and bias.grad is not None
    assert torch.equal(x.grad, grad @ ops.dequantize(*weight, fmt.key, dtype))
    assert bias.grad.dtype == torch.float32
    wanted = grad.reshape(-1, 5).sum(0).float()
    assert torch.equal(bias.grad, wanted)


@formats
def test_gradients_only_where_they_are_wanted(fmt: Format) -> None:
    packed, scale = packed_weight(fmt)
    x = torch.randn(4, 64)
    bias = torch.randn(5, requires_grad=True)
    y = ops.linear(x, packed, scale, divisor_of(fmt), bias, fmt.key)
    (grad,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(grad, torch.full((5,), 4.0))
    codes, bits = ops.quantize(x.requires_grad_(), None, fmt.key)
    assert not codes.requires_grad and not bits.requires_grad
    assert not ops.dynamic_global_scale(x, fmt.key).requires_grad


@formats
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_inputs_of_other_dtypes(fmt: Format, dtype: torch.dtype) -> None:
    packed, scale = packed_weight(fmt)
    x = torch.ones(2, 64).to(dtype)
    with pytest.raises(DtypeError, match=f"expected float32, bfloat16, .* got {dtype}. Cast it"):
        ops.quantize(x, divisor_of(fmt), fmt.key)
    with pytest.raises(DtypeError, match=f"got {dtype}"):
        ops.linear(x, packed, scale, divisor_of(fmt), None, fmt.key)


@pytest.mark.parametrize("name", ["observe", "observe_full"])
def test_observe_leaves_hidden_tokens_out_whatever_they_hold(name: str) -> None:
    x = torch.randn(2, 5, 64, generator=seeded())
    visible = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    shape = (2, 32, 32) if name == "observe" else (64, 64)
    states = [
        (torch.zeros(shape), torch.zeros(1, dtype=torch.int64), torch.zeros(1)) for _ in range(2)
    ]
    getattr(ops, name)(x.view(10, 64)[visible], *states[0])
    x.view(10, 64)[~visible] = math.nan
    getattr(ops, name)(x, *states[1], visible)
    assert all(map(torch.equal, *states)) and int(states[0][1]) == 7
    for bad in (visible[:9], visible.int(), visible.view(2, 5)):
        with pytest.raises(ShapeError, match="expected a boolean for each of 10 tokens"):
            getattr(ops, name)(x, *states[1], bad)


@pytest.mark.parametrize("columns", [31, 65, 200])
def test_observe_refuses_inputs_of_another_width(columns: int) -> None:
    state = (torch.zeros(2, 32, 32), torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    with pytest.raises(ShapeError, match=r"Hessian: expected .* columns, got \(2, 32, 32\)"):
        ops.observe(torch.ones(3, columns), *state)
    with pytest.raises(ShapeError, match=r"got \(64, 64\)"):
        ops.observe_full(torch.ones(3, columns), torch.zeros(64, 64), *state[1:])
    assert not any(tensor.any() for tensor in state)


def test_what_a_gpu_cannot_run_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, fmt = torch.device("cuda", 0), FORMATS["nvfp4"]
    five_bits = Element("five", bits=5, magnitudes=tuple(float(i) for i in range(16)))
    cases = [
        ("13.0", (7, 5), fmt, "expected compute capability 8.0 or more, got 7.5"),
        ("13.0", (9, 0), dataclasses.replace(fmt, element=five_bits), "do not know nvfp4"),
        (None, (9, 0), fmt, "for NVIDIA GPUs"),
        ("13.0", (8, 0), fmt, None),
    ]
    for cuda, capability, chosen, reason in cases:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        implementation_on.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp4pass"):
            operator = OPERATORS["linear"]
            arguments = (device, operator.reference, operator.triton, chosen)
            found = [implementation_on(*arguments) for _ in range(3)]
        assert (found[0] is linear_ref) == (reason is not None)
        assert [reason in record.getMessage() for record in caplog.records] == [True] * (
            reason is not None
        )
    implementation_on.cache_clear()


WEIGHT = ops.search(torch.linspace(-1, 1, 5 * 64).view(5, 64), None, 2.0**-8, "nvfp4", "naive")
NUMBER = torch.tensor([2.0**8])


class Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


# What wants to see a call, or changes what it does: to an input, and around the call.
WATCHED: dict[str, Callable[..., Tensor]] = {
    "a gradient": lambda run, x: run(x.requires_grad_()),
    "a mode": lambda run, x: _under(Noting(), run, x),
    "a profiler": lambda run, x: _under(torch.autograd.profiler.profile(), run, x),
    "a transform": lambda run, x: torch.vmap(run)(x[None])[0],
    "a subclass": lambda run, x: run(x.as_subclass(Own)),
    "another sign": lambda run, x: run(torch.complex(x, -x).conj().imag),
    "a trace": lambda run, x: torch.jit.trace(run, x, check_trace=False)(x),
}


def _under(context: Any, run: Any, x: Tensor) -> Tensor:
    with context:
        return run(x)


def _linear_called(x: Tensor) -> Tensor:
    return ops.call(ops.linear, x, *WEIGHT, NUMBER, None, "nvfp4")


@pytest.mark.parametrize("watched", ["nothing", "no gradient", *WATCHED])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_on_a_cpu_passes_the_dispatcher_by_where_nothing_watches(
    watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 64)
    expected = _linear_called(x)
    ran: list[str] = []
    plain = registration.only_calls_kernel

    def noting(*args: Any) -> bool:
        found = plain(*args)
        ran.append("kernel" if found else "dispatcher")
        return found

    monkeypatch.setattr(registration, "only_calls_kernel", noting)
    if watched == "no gradient":
        y = _under(torch.no_grad(), _linear_called, x.requires_grad_())
    else:
        y = WATCHED.get(watched, lambda run, x: run(x))(_linear_called, x)
    assert torch.equal(y, expected)
    assert set(ran) == {"dispatcher" if watched in WATCHED else "kernel"}
    assert y.requires_grad == (watched == "a gradient")
