"""Settings: what is to be done with a linear, from the options and rules that are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .core.formats import Format, get_format
from .errors import OptionError, RuleError, unknown_name
from .kernels.quantize.reference import ACTIVATION_SCALES
from .kernels.rotate.reference import ROTATIONS
from .kernels.statistics.reference import HESSIAN_BLOCK
from .linear import Usage
from .methods import Method, Stats, resolve_method

Rule = tuple[str, Mapping[str, Any] | None]

RULE_KEYS = ("fmt", "method", "block", "weight_only", "activation_scales", "rotation")


@dataclass(frozen=True)
class Settings:
    """What is to be done with one linear."""

    format: Format
    method: Method
    options: Any
    weight_only: bool
    activation_scales: str
    rotation: int = 0
    folded: bool = False
    output_rotation: int = 0

    @property
    def usage(self) -> Usage:
        inputs = (self.weight_only, self.activation_scales, self.rotation, self.folded)
        return Usage(self.format.key, *inputs, self.output_rotation)

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of Stats that it takes: a rotation that mixes blocks of the Hessian makes
        new ones from the whole of it."""
        if self.rotation <= HESSIAN_BLOCK or "block_hessian" not in self.method.needs:
            return self.method.needs
        return (*self.method.needs, "hessian")

    def target(self, weight: Tensor, stats: Stats) -> Tensor:
        """What the method is given in place of a weight [N, K], by what calibration saw."""
        return self.method.target(weight, stats, self.options)


def make_settings(
    fmt: str,
    method: object,
    block: int | str,
    weight_only: bool,
    activation_scales: str = "naive",
    rotation: int = 0,
) -> Settings:
    """Check and resolve the options of `convert`. Raises OptionError."""
    if not isinstance(weight_only, bool):
        raise OptionError(f"weight_only is {weight_only!r}; True or False is wanted.")
    if activation_scales not in ACTIVATION_SCALES:
        raise unknown_name("activation_scales", activation_scales, ACTIVATION_SCALES)
    if type(rotation) is not int or rotation not in ROTATIONS:
        raise OptionError(
            f"rotation is {rotation!r}; one of {', '.join(map(str, ROTATIONS))} is wanted, the "
            "columns that are rotated together."
        )
    found, options = resolve_method(method)
    form = get_format(fmt, block)
    if "block_hessian" in found.needs and form.block > HESSIAN_BLOCK:
        raise OptionError(
            f"Method {found.name!r} needs Hessians of blocks of {form.block}, and calibration "
            f"collects them up to {HESSIAN_BLOCK}. Choose a smaller block, or method='sse'."
        )
    return Settings(form, found, options, weight_only, activation_scales, rotation)


def check_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules in the form (glob, None) or (glob, options). Raises RuleError or OptionError."""
    if isinstance(rules, str | Mapping) or not isinstance(rules, Sequence):
        raise RuleError(f"rules is a {type(rules).__name__}; a list of (glob, options) is wanted.")
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
            raise RuleError(
                f"The rule {rule!r} is not (glob, None) or (glob, options), as in "
                "('*.down_proj', None)."
            )
        options = rule[1]
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise RuleError(f"The rule for {rule[0]!r} has {options!r}; None or a dict is wanted.")
        for key in options:
            if key not in RULE_KEYS:
                raise unknown_name(f"In the rule for {rule[0]!r}, the option", key, RULE_KEYS)
    return tuple((pattern, options) for pattern, options in rules)
