"""Tables of cases: in the quick part those that each catch what no other does, the rest slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import oracle
import pytest
import torch
from blocks import VARIANTS
from torch import Tensor

from fp4pass.core.formats import Format
from fp4pass.ops.registration import OPERATORS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KEYS = [fmt.key for fmt in VARIANTS]

formats = pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f.key)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# What the interpreter's numpy says of infinite and absent quotients, which nothing uses.
quiet = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|divide by zero|invalid value) encountered:RuntimeWarning"
)


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test for a GPU alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="there is no CUDA device")(test))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def divisor_of(fmt: Format, global_scale: float, device: str = "cpu") -> Tensor | None:
    """The stored global scale of a format, None for one without."""
    return torch.tensor([1.0 / global_scale], device=device) if fmt.has_global_scale else None


def divisor(fmt: Format, global_scale: float) -> Tensor | None:
    return divisor_of(fmt, global_scale, DEVICE)


def cases(quick: Sequence[tuple[Any, ...]], product: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The quick cases, and what the full product has besides, marked slow."""
    rest = [case for case in product if case not in quick]
    return [
        *(pytest.param(*case, id=_id(case)) for case in quick),
        *(pytest.param(*case, id=_id(case), marks=pytest.mark.slow) for case in rest),
    ]


def codes_at(x: Tensor, scale: Tensor, g: float, fmt: Format) -> Tensor:
    """Packed codes of 4 bits of x [R, K], rounded to nearest at scale bytes: by the oracle."""
    step = (oracle.scales(fmt.name)[scale.long() - 1] * g).float()
    codes = oracle.codes(x.float() / step.repeat_interleave(fmt.block, 1))
    return (codes[:, ::2] | codes[:, 1::2] << 4).byte()


def covering(names: Sequence[str], *axes: Sequence[Any], rest: bool = True) -> Any:
    """Cases that have every value of every axis; what the product has besides is slow."""
    quick = [
        tuple(axis[(i + j * (i // len(axis))) % len(axis)] for j, axis in enumerate(axes))
        for i in range(max(map(len, axes)))
    ]
    return pytest.mark.parametrize(names, cases(quick, itertools.product(*axes) if rest else ()))


def flat(name: str, kind: str = "triton") -> Callable[..., Any]:
    """An operator's "reference", "triton" or "cpu", called as the operator is, or with a Format."""
    operator = OPERATORS[name]
    found = operator.reference
    if kind != "reference":
        module, _, function = getattr(operator, kind).partition(":")
        found = getattr(import_module(f"fp4pass.{module}"), function)

    def call(*args: Any, **options: Any) -> Any:
        schema = getattr(torch.ops.fp4pass, name).default._schema.arguments
        rest = (options.get(each.name, each.default_value) for each in schema[len(args) :])
        # Formats that are in no table have no key.
        given = ("nvfp4" if isinstance(each, Format) else each for each in args)
        crossed = operator._arguments((*given, *rest))
        for each in args:
            if isinstance(each, Format):
                crossed[operator._record_at] = each
        return found(*crossed)

    return call


def _id(case: tuple[Any, ...]) -> str:
    return "-".join(each.key if isinstance(each, Format) else str(each) for each in case)


formats_and_dtypes = covering(("fmt", "dtype"), VARIANTS, DTYPES)
