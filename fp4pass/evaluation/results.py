"""Results of an evaluation, and the difference of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import StateError
from .intervals import Bootstrap, Change, changes


@dataclass(frozen=True)
class Evaluation:
    """Measures of a model on a text.

    Attributes:
        windows: windows that were run.
        tokens: tokens that were scored.
        perplexity: of the scored tokens.
        bits_per_byte: over the bytes that the scored tokens stand for; None without a tokenizer.
        kl: KL(reference || model), nats per token; None without a reference.
        kl_999: the KL that 99.9 % of the tokens stay below; None without a reference.
        top1: share of tokens whose likeliest successor is the reference's; None without one.
        delta_p: mean of what the model gives the right token more than the reference, as
            probabilities; None without a reference.
        rms_delta_p: root of the mean square of the same; None without a reference.
        top_p_kl: KL in the reference's nucleus of mass `top_p`, both renormalized there; None
            without a reference.
        top_p: mass of the nucleus.
        unit: what is resampled: "document", or "window" where documents are not known.
        units: units with scored tokens.
        confidence: of the intervals.
        intervals: lower and upper end by the name of the measure; empty for fewer than two units.
        digest: SHA-256 of the tokens and of the scored positions.
        sums: [units, SUMS] float64, sums over the tokens of each unit.

    Example:
        >>> found = fp4pass.evaluate(model, tokenizer, text, model, window=16, progress=False)
        >>> found.kl, found.top1
        (0.0, 1.0)
    """

    windows: int
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None
    kl: float | None = None
    top1: float | None = None
    top_p_kl: float | None = None
    top_p: float = 0.95
    kl_999: float | None = None
    delta_p: float | None = None
    rms_delta_p: float | None = None
    unit: str = "window"
    units: int = 0
    confidence: float = 0.95
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    digest: str = ""
    sums: Tensor | None = field(default=None, repr=False, compare=False)

    def to_dict(self, *, sums: bool = False) -> dict[str, Any]:
        """Return the fields as JSON values; with `sums`, those of each unit too.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> found.to_dict()["unit"]
            'window'
        """
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain["intervals"] = {name: list(ends) for name, ends in self.intervals.items()}
        of_units = plain.pop("sums")
        if sums:
            plain["sums"] = None if of_units is None else of_units.tolist()
        return plain

    def row(self, text: str, before: Evaluation | None = None) -> dict[str, Any]:
        """Return the row that `fp4pass eval --json` prints; `before` is that of the original.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, model, window=16, progress=False)
            >>> found.row("a text", before=found)["difference"]["perplexity"]["value"]
            0.0
        """
        found = {"text": text, **self.to_dict()}
        if before is not None:
            found["reference_perplexity"] = before.perplexity
            found["reference_intervals"] = before.to_dict()["intervals"]
            found["difference"] = self.difference(before).to_dict()
        return found

    def difference(
        self, other: Evaluation, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> Difference:
        """Return this evaluation minus another of the same tokens, with intervals.

        Units are resampled for both together, so that what a hard document costs both cancels.

        Args:
            other: an evaluation by `fp4pass.evaluate` of the same tokens.
            confidence: of the intervals, in (0, 1).
            resamples: of the bootstrap.
            seed: of the bootstrap.

        Raises:
            StateError: the tokens differ, or an evaluation has no sums.
            OptionError: confidence or resamples is out of range.

        Example:
            >>> before = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> packed = fp4pass.convert(model, "nvfp4a16", "sse")
            >>> found = fp4pass.evaluate(packed, tokenizer, text, window=16, progress=False)
            >>> change = found.difference(before).perplexity_ratio
            >>> change.low < change.value < change.high
            True
        """
        if self.sums is None or other.sums is None:
            raise StateError(
                "Expected two evaluations by fp4pass.evaluate, got one that has no sums. Make "
                "both with fp4pass.evaluate."
            )
        if self.digest != other.digest:
            raise StateError(
                "Expected evaluations of the same tokens, got different tokens: "
                f"{self.tokens} scored in {self.windows} windows (digest {self.digest}), and "
                f"{other.tokens} in {other.windows} (digest {other.digest}). Evaluate both on the "
                "same text, with the same window and stride."
            )
        options = Bootstrap(confidence, resamples, seed)
        found = changes(self.sums.numpy(), other.sums.numpy(), options)
        if self.top_p != other.top_p:
            found.pop("top_p_kl", None)
        return Difference(confidence=confidence, **found)


@dataclass(frozen=True)
class Difference:
    """One evaluation minus another of the same tokens.

    A measure that one of them lacks is None, as is the KL in nuclei of different mass.

    Attributes:
        confidence: of the intervals.
        perplexity: the difference.
        perplexity_ratio: perplexity over perplexity.
        bits_per_byte: the difference.
        kl: the difference, nats per token.
        top_p_kl: the difference, nats per token.
        top1: the difference of the shares.
        delta_p: the difference of the means.
        rms_delta_p: the difference.

    Example:
        >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
        >>> found.difference(found).perplexity.value
        0.0
    """

    confidence: float
    perplexity: Change
    perplexity_ratio: Change
    bits_per_byte: Change | None = None
    kl: Change | None = None
    top_p_kl: Change | None = None
    top1: Change | None = None
    delta_p: Change | None = None
    rms_delta_p: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values.

        Example:
            >>> found = fp4pass.evaluate(model, tokenizer, text, window=16, progress=False)
            >>> found.difference(found).to_dict()["kl"] is None
            True
        """
        return dataclasses.asdict(self)
