"""Estimate the time that work of several kinds still takes, from the pieces that are done."""

from __future__ import annotations

from collections.abc import Mapping

# A stage, what is done in it, and what makes one piece dearer than another: ("convert", "search",
# "gptq", "nvfp4/16", "1536x576"). Kinds that begin alike are measured in the same units.
Kind = tuple[str, ...]

# Kinds that have no more than this in common say nothing of each other.
_ALIKE = 2

# Before this share of the work is done, what the first piece of it took says little of the others.
_EARLY = 0.1

# Sums of floats may miss their end by so much.
_ROUNDING = 1e-9


class _Sample:
    """Units and seconds of what is done of a kind; the first piece, which warms up, is apart."""

    def __init__(self) -> None:
        self.first = self.units = self.seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        if self.first:
            self.units, self.seconds = self.units + units, self.seconds + seconds
        else:
            self.first = seconds / units

    @property
    def rate(self) -> float:
        return self.seconds / self.units if self.units else self.first


class WorkLog:
    """The work that is planned, the work that is done, and its time."""

    def __init__(self) -> None:
        self._planned: dict[Kind, float] = {}
        self._done: dict[Kind, float] = {}
        # Planned by an outer call, until the stage itself says what it has to do.
        self._foreseen: dict[Kind, float] = {}
        self._given: dict[Kind, float] = {}
        self._samples: dict[Kind, _Sample] = {}
        self._spent = 0.0

    def expect(self, costs: Mapping[Kind, float]) -> None:
        """Add work of stages that begin, in place of what was foreseen of them."""
        stages = {kind[0] for kind in costs}
        self._foreseen = {k: each for k, each in self._foreseen.items() if k[0] not in stages}
        for kind, units in costs.items():
            self._planned[kind] = self._planned.get(kind, 0.0) + units

    def foresee(self, costs: Mapping[Kind, float]) -> None:
        """Add work of later stages."""
        for kind, units in costs.items():
            self._foreseen[kind] = self._foreseen.get(kind, 0.0) + units

    def assume(self, rates: Mapping[Kind, float]) -> None:
        """Take these seconds for a unit of what begins with a kind, until one is measured."""
        self._given.update(rates)

    def add(self, kind: Kind, units: float, seconds: float | None) -> None:
        """Add a piece that is done; None seconds for one that says nothing of others."""
        self._done[kind] = self._done.get(kind, 0.0) + units
        if seconds is None or not units:
            return
        self._spent += seconds
        for end in range(min(_ALIKE, len(kind)), len(kind) + 1):
            self._samples.setdefault(kind[:end], _Sample()).add(units, seconds)

    def rate(self, kind: Kind) -> float | None:
        """Return the seconds of a unit, by the most similar kind that is measured or assumed."""
        return self._rate(kind)[0]

    def _rate(self, kind: Kind) -> tuple[float | None, bool]:
        """Return the rate of a kind, and whether it is that of others."""
        for end in range(len(kind), min(_ALIKE, len(kind)) - 1, -1):
            if sample := self._samples.get(kind[:end]):
                return sample.rate, end < len(kind)
            if kind[:end] in self._given:
                return self._given[kind[:end]], False
        return None, False

    @property
    def is_planned(self) -> bool:
        """Whether there is, or was, anything to do."""
        return bool(self._planned or self._foreseen)

    def left(self) -> tuple[float, list[str]]:
        """Return the seconds that are left, and the stages whose seconds are not known."""
        seconds, guessed = 0.0, 0.0
        unknown, guesses = list[str](), list[str]()
        for kind in {**self._planned, **self._foreseen}:
            planned = self._planned.get(kind, 0.0)
            units = planned - self._done.get(kind, 0.0)
            units = units if units > _ROUNDING * planned else 0.0
            units += self._foreseen.get(kind, 0.0)
            if not units:
                continue
            rate, is_guess = self._rate(kind)
            if rate is None:
                unknown.append(kind[0])
                continue
            seconds += units * rate
            if is_guess:
                guessed += units * rate
                guesses.append(kind[0])
        if guessed > seconds / 2 and self._spent < _EARLY * seconds:
            unknown += guesses
        return seconds, list(dict.fromkeys(unknown))
