"""Hold the result of `allocate`: the scheme of each group, the measurements, and the curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...quantization.recipe import Recipe
from ...record.config import Rule
from .sensitivity import Cost


@dataclass(frozen=True)
class GroupScheme:
    """A group of layers that engines fuse, and its scheme.

    Attributes:
        layers: their names.
        weights: how many they have.
        scheme: the chosen one; "float" for layers that stay as they are.
        costs: bytes and KL by scheme, as measured with this group alone.
        is_fixed: whether a rule decided.

    Example:
        >>> costs = {"nvfp4a16": fp4pass.lab.budget.Cost(bytes=576, kl=0.01)}
        >>> fp4pass.lab.budget.GroupScheme(("q", "k", "v"), 1024, "nvfp4a16", costs).bits
        4.5
    """

    layers: tuple[str, ...]
    weights: int
    scheme: str
    costs: Mapping[str, Cost] = field(hash=False)
    is_fixed: bool = False

    @property
    def bits(self) -> float:
        """Bits of a weight in the chosen scheme."""
        return 8 * self.costs[self.scheme].bytes / self.weights


@dataclass(frozen=True)
class Candidate:
    """A whole model that was converted and measured on held-out text.

    Attributes:
        label: of the kind of choice: "allocated", or the name of a uniform one.
        bits: of a weight, codes and block scales included.
        bytes: the same for all weights.
        predicted: the sum of the KL of the groups.
        kl: KL(original || model) on held-out text, nats per token.
        low: lower end of the interval of `kl`; None for a single window.
        high: its upper end.
        schemes: of each group, in order.

    Example:
        >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
        >>> found.uniform.label
        'uniform nvfp4a16'
    """

    label: str
    bits: float
    bytes: int
    predicted: float
    kl: float
    low: float | None
    high: float | None
    schemes: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Point:
    """The best choice under a budget, by prediction.

    Attributes:
        bits: of a weight.
        bytes: of all weights.
        predicted: the sum of the KL of the groups.

    Example:
        >>> fp4pass.lab.budget.Point(bits=4.5, bytes=576, predicted=0.01).bits
        4.5
    """

    bits: float
    bytes: int
    predicted: float


@dataclass(frozen=True)
class Allocation:
    """The scheme of each layer under a budget; print it for a table.

    Attributes:
        budget: what was asked for, {"bits": ...} or {"kl": ...}.
        recipe: of the model, for `convert(model, **allocation.recipe.arguments())`.
        groups: each with its scheme, in the order of layers.
        chosen: the model that was converted and measured.
        uniform: the best uniform model of at most the same bytes, None if there is none; a uniform
            one has one scheme, or a larger one for the first layers.
        measured: all models that were measured, `chosen` and `uniform` among them.
        curve: predicted KL by bytes, from the smallest model to the largest.
        text: tokens of the parts of the data.
        is_uniform: whether a uniform model was no worse, and is chosen.

    Example:
        >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
        >>> found.chosen.kl <= found.uniform.kl, found.bits <= 6
        (True, True)
    """

    budget: Mapping[str, float] = field(hash=False)
    recipe: Recipe
    groups: tuple[GroupScheme, ...]
    chosen: Candidate
    uniform: Candidate | None
    measured: tuple[Candidate, ...]
    curve: tuple[Point, ...]
    text: Mapping[str, int] = field(hash=False)
    is_uniform: bool = False

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules for `convert`, those of the user behind them; `recipe` has the method, too."""
        return self.recipe.rules

    @property
    def bits(self) -> float:
        """Bits of a weight of the chosen model, codes and block scales included."""
        return self.chosen.bits

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return self.chosen.bytes

    @property
    def predicted(self) -> float:
        """The KL that the groups have together, each measured alone."""
        return self.chosen.predicted

    @property
    def kl(self) -> float:
        """The KL of the chosen model on held-out text, nats per token."""
        return self.chosen.kl

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it.

        Example:
            >>> found = fp4pass.allocate(model, bits=6, schemes=("nvfp4a16", "bf16"), data=batches)
            >>> sorted(found.to_dict())[:4]
            ['budget', 'chosen', 'curve', 'groups']
        """
        plain = {name: _plain(value) for name, value in vars(self).items() if name != "recipe"}
        return {**plain, "recipe": self.recipe.to_dict()}

    def __str__(self) -> str:
        lines = [self._sentence(), "", *_table(_HEADER, map(_line, self.measured)), ""]
        kinds: dict[str, tuple[int, int]] = {}
        for group in self.groups:
            count, weights = kinds.get(group.scheme, (0, 0))
            kinds[group.scheme] = count + 1, weights + group.weights
        whole = sum(group.weights for group in self.groups)
        rows = [
            (scheme, str(count), f"{weights / whole:.1%}")
            for scheme, (count, weights) in kinds.items()
        ]
        lines += _table(("scheme", "groups", "weights"), rows)
        return "\n".join(
            [*lines, "", *_table(("layers", "scheme", "bits", "KL alone"), self._rows())]
        )

    def _sentence(self) -> str:
        asked = " ".join(f"{name}={value:g}" for name, value in self.budget.items())
        found = f"{asked}: {self.bits:.3f} bits a weight, KL {self.kl:.5f} on held-out text"
        if self.is_uniform:
            return f"{found}. No mixture was better at this size: {self.chosen.label}."
        if self.uniform is None:
            return f"{found}."
        return f"{found}, {self.kl / self.uniform.kl:.2f} of uniform's {self.uniform.kl:.5f}."

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                _short(group.layers),
                group.scheme + (" (by a rule)" if group.is_fixed else ""),
                f"{group.bits:.2f}",
                f"{group.costs[group.scheme].kl:.6f}",
            )
            for group in self.groups
        ]


_HEADER = ("model", "bits", "KL predicted", "KL held out", "interval")


def _line(each: Candidate) -> tuple[str, ...]:
    ends = "-" if each.low is None else f"{each.low:.5f} to {each.high:.5f}"
    return each.label, f"{each.bits:.3f}", f"{each.predicted:.5f}", f"{each.kl:.5f}", ends


def _short(names: tuple[str, ...]) -> str:
    """Return the names of a group in a few words."""
    first, *others = names
    last = [name.rpartition(".")[2] for name in others]
    if len(names) > 4:
        return f"{first} and {len(others)} more"
    return ", ".join([first, *last])


def _table(header: tuple[str, ...], rows: Any) -> list[str]:
    """Return the lines of a table, the first column to the left."""
    every = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _plain(value: Any) -> Any:
    """Return values as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value
