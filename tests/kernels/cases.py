"""Tables of cases: in the quick part those that each catch what no other does, the rest slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from blocks import VARIANTS

from fp4pass.core.formats import Format, get_format
from fp4pass.ops.registration import OPERATORS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def cases(quick: Sequence[tuple[Any, ...]], product: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The quick cases, and what the full product has besides, marked slow."""
    rest = [case for case in product if case not in quick]
    return [
        *(pytest.param(*case, id=_id(case)) for case in quick),
        *(pytest.param(*case, id=_id(case), marks=pytest.mark.slow) for case in rest),
    ]


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


# Every format and every dtype; blocks of 16 and 32, scales with mantissas and powers of two.
_QUICK = [
    (get_format("nvfp4"), torch.bfloat16),
    (get_format("nvfp4:32"), torch.float16),
    (get_format("mxfp4"), torch.float32),
    (get_format("mxfp4:16"), torch.bfloat16),
]

formats_and_dtypes = pytest.mark.parametrize(
    ("fmt", "dtype"), cases(_QUICK, itertools.product(VARIANTS, DTYPES))
)
