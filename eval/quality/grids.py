"""Runs that real_model.py measures, by the name of their grid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fp4pass.methods import method_from_dict

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """A conversion to measure.

    Attributes:
        by: its name in the table.
        scheme: as `convert` takes it.
        method: name and options; None where `options` has the quality.
        options: of `convert`, beside.
        data: what to calibrate on.
        tokens: how many; 0 for none.
        window: tokens of a window.
        seed: of the data.
    """

    KEY: ClassVar[tuple[str, ...]] = ("by", "scheme", "data", "tokens", "window", "seed")

    by: str
    scheme: str = "nvfp4a16"
    method: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "own"
    tokens: int = 1 << 15
    window: int = 512
    seed: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells runs apart."""
        return tuple(getattr(self, name) for name in self.KEY)

    def arguments(self) -> dict[str, Any]:
        """Return the keywords of `convert`."""
        method = {} if self.method is None else {"method": method_from_dict(self.method)}
        return {**method, **self.options}

    def row(self) -> dict[str, Any]:
        """Return the run as JSON has it."""
        return dataclasses.asdict(self)


GRIDS: dict[str, list[Run]] = {}
