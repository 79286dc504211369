"""LinearConfig: the one record of the options of a linear layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, get_args

from torch import Tensor

from ..core.formats import FORMATS, FP8_E4M3, Format, get_format
from ..errors import OptionError, RuleError, as_option, expected, require_number, unknown_name
from ..kernels.rotate.naive import ROTATIONS, rotate_weight
from ..kernels.statistics.naive import HESSIAN_BLOCK, headroom
from ..methods import METHODS, Method, Stats, method_from_dict, method_to_dict, resolve_method
from ..ops import rotate
from .schemes import (
    DEFAULT,
    EIGHT_BITS,
    WITH_EIGHT_BITS,
    Scheme,
    expand_scheme,
    scheme_name,
    schemes,
)

Rule = tuple[str, Mapping[str, Any] | None]

# Names of how block scales of inputs are chosen, of dtypes of products of many rows, and of the
# treatments of layers that calibration never reached.
ActivationScales = Literal["naive", "sse"]
Compute = Literal["input", "fp8"]
Inputs = Literal["fp8", "fp8_block", "fp8_tensor"]
Unreached = Literal["error", "skip", "sse"]
InputRange = Literal["amax", "headroom"]


class LinearOptions(TypedDict, total=False):
    """The options of a linear layer as keywords, beside the scheme and the method."""

    weight_only: bool | None
    inputs: Inputs | None
    block: int | None
    activation_scales: ActivationScales
    input_range: InputRange
    rotation: int
    unreached: Unreached
    expert_prior: float | None
    compute: Compute


class SchemeOptions(LinearOptions, total=False):
    """The same with the scheme."""

    fmt: Scheme | None


class HasRules(Protocol):
    """A record with rules, as the `Allocation` of `fp4pass.allocate`."""

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules."""


Rules = Sequence[Rule] | HasRules


def _option(default: Any, help: str, choices: Collection[Any] = (), option: bool = True) -> Any:
    """Return a field: a keyword of `convert`, a key of a rule, a command-line option."""
    metadata = {"option": option, "help": help, "choices": tuple(choices)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LinearConfig:
    """The options of one linear layer.

    Keywords of `convert` and `prepare`, rules, recipes, command-line options, report rows and
    fp4pass.json are all made from these fields. To add an option, add a field here, read it in
    `fp4pass.nn.linear`, and test it.

    Attributes:
        fmt: a scheme: "nvfp4", "mxfp4", "fp8", "fp8_block" and "mxfp8" quantize weights and
            inputs, "nvfp4a16" (the default), "fp8a16" and so on weights only. Kept as the name of
            the format; `scheme` is the name of both.
        method: chooses scales and codes: a name, an options object such as `Gptq()`, or None
            if another library chose them. Kept as the options object.
        weight_only: leave the input in floating point; None to follow `fmt`. Kept as a bool.
        block: elements that share a scale; None for the format's own. Kept as a number.
        inputs: the format of the input of weights in 4 bits: "fp8" has a scale for each token,
            "fp8_block" for 128 columns of it, "fp8_tensor" one that calibration finds; None for
            the format of the weight.
        activation_scales: how the block scales of the input are chosen at each call; float32 ones
            are "naive".
        input_range: what the global scale of inputs reaches, of formats that have one: "amax" of
            calibration, or "headroom" for larger ones, too.
        rotation: columns of input and weight that are rotated together; 0 for none.
        unreached: the treatment of a layer whose method needs data, and that calibration never
            reached: "error", "skip", or "sse", which quantizes its weight alone by that method.
        expert_prior: the number of average tokens of the layer that are added to the own tokens of
            each expert of a mixture; None for 32, and for K / 2 where a method takes the whole
            Hessian.
        compute: "fp8" rounds both operands of products of many rows to E4M3, for FP8 tensor cores;
            fewer rows, and weights that are E4M3, are computed as by "input", in the dtype of the
            input. Layers with `inputs` in FP8 are computed so by themselves.
        folded: the input comes rotated from the layer before it.
        output_rotation: rows of the weight that are rotated together, for a folded layer behind.
        multiplies: the stored global scales multiply (ModelOpt) instead of divide.

    Raises:
        OptionError: a value does not exist or does not fit the others.

    Example:
        >>> config = fp4pass.LinearConfig("mxfp4a16", "sse", rotation=32)
        >>> config.block, config.scheme, config.options()["weight_only"]
        (32, 'mxfp4a16', True)
        >>> fp4pass.LinearConfig("mxfp4a8").input_format.tile
        'a row'
        >>> config.override({"fmt": "nvfp4"}).format.key
        'nvfp4'
        >>> fp4pass.LinearConfig.from_dict(config.to_dict()) == config
        True
        >>> torch.allclose(config.restored(config.stored(torch.eye(32))), torch.eye(32), atol=1e-6)
        True
    """

    fmt: str = _option(
        DEFAULT,
        "The scheme: nvfp4a16 or mxfp4a16 for weights in 4 bits, nvfp4 or mxfp4 for inputs too, "
        "mxfp4a8 for inputs in 8 bits, fp8 or fp8_block for both; docs/formats.md has the others.",
    )
    method: Any = _option("hessian", "How block scales are chosen.", METHODS)
    weight_only: bool | None = _option(None, "Leave inputs in floating point.")
    block: int | None = _option(None, "Elements that share a scale; default: the format's own.")
    inputs: Inputs | None = _option(
        None,
        "Format of inputs of weights in 4 bits; default: that of the weights.",
        EIGHT_BITS.values(),
    )
    activation_scales: ActivationScales = _option(
        "naive", "How block scales of quantized inputs are chosen.", get_args(ActivationScales)
    )
    input_range: InputRange = _option(
        "amax", "What the global scale of inputs reaches.", get_args(InputRange)
    )
    rotation: int = _option(0, "Number of columns rotated together; helps mxfp4.", ROTATIONS)
    unreached: Unreached = _option(
        "error",
        "Layers that no batch reached: raise an error, skip them, or use sse.",
        get_args(Unreached),
    )
    expert_prior: float | None = _option(None, "Average tokens to add to those of each expert.")
    compute: Compute = _option(
        "input", "Compute dtype of products of many rows.", get_args(Compute)
    )
    # These fp4pass sets itself, and stores with the layer.
    folded: bool = _option(False, "The input comes rotated.", option=False)
    output_rotation: int = _option(0, "Rows rotated for the layer behind.", option=False)
    multiplies: bool = _option(False, "Stored global scales multiply.", option=False)
    # The record of `fmt` with this block, made once: forward asks for it.
    format: Format = field(init=False, repr=False, compare=False, default=FORMATS["nvfp4"])
    # That of the input, None where it stays in floating point. All that asks about inputs asks it.
    input_format: Format | None = field(init=False, repr=False, compare=False, default=None)
    # Layers with equal ones make the same of an input: all fields but those of the weight alone.
    input_key: tuple[Any, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        for name in ("weight_only", "folded", "multiplies"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name == "weight_only")):
                raise OptionError(expected(name, "True or False", repr(value)))
        if self.fmt is None:
            raise OptionError(expected("fmt", "the name of a scheme", "None"))
        given = {name: getattr(self, name) for name in ("fmt", "weight_only", "inputs")}
        scheme = expand_scheme(given)
        inputs = None if scheme["weight_only"] else scheme.get("inputs")
        for name in ("rotation", "output_rotation"):
            size = getattr(self, name)
            if type(size) is not int or size not in ROTATIONS:
                choices = ", ".join(map(str, ROTATIONS))
                raise OptionError(expected(name, f"one of {choices}", repr(size)))
        for each in OPTIONS:
            value, known = getattr(self, each.name), each.metadata["choices"]
            if each.name in ("method", "rotation") or (each.name == "inputs" and value is None):
                continue
            if known and value not in known:
                raise unknown_name(each.name, value, known)
        if self.expert_prior is not None:
            wanted = "a number from 0 on, or None"
            require_number("expert_prior", wanted, self.expert_prior, float, 0)
        method = None if self.method is None else resolve_method(self.method)[1]
        fmt = get_format(scheme["fmt"], "default" if self.block is None else self.block)
        if self.multiplies:
            fmt = fmt.with_multiplier()
        if inputs is not None and f"{fmt.name}a8" not in schemes():
            raise OptionError(
                f"{as_option('inputs', inputs)} is for weights in {' or '.join(WITH_EIGHT_BITS)}, "
                f"got {fmt.name}. Leave it out: its inputs are in its own format."
            )
        of_inputs = None if scheme["weight_only"] else get_format(inputs) if inputs else fmt
        settled = {"method": method, "fmt": fmt.name, "block": fmt.block, "format": fmt}
        settled |= {"inputs": inputs, "input_format": of_inputs}
        if (of_inputs or fmt).has_float_scale:
            settled["activation_scales"] = "naive"
        if fmt.element == FP8_E4M3 or inputs is not None:
            settled["compute"] = "input"
        settled |= {"weight_only": bool(scheme["weight_only"]), "multiplies": fmt.multiplies}
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        others = "method output_rotation unreached expert_prior compute input_range".split()
        key = tuple(getattr(self, each.name) for each in FIELDS if each.name not in others)
        object.__setattr__(self, "input_key", key)
        if fmt.has_float_scale and getattr(method, "needs_block_scales", False):
            raise OptionError(
                f"method: {method} chooses 8-bit block scales, and those of {fmt.key} are float32. "
                "Give its layers another one, in a rule for some: (glob, {'method': 'hessian'})."
            )
        if "block_hessian" in self.needs and not fmt.has_float_scale and fmt.block > HESSIAN_BLOCK:
            raise OptionError(
                f"Method {self.method_name!r} needs Hessians of blocks of {fmt.block}; calibration "
                f"collects them up to {HESSIAN_BLOCK}. Choose a smaller block, or "
                f"{as_option('method', 'sse')}."
            )

    @property
    def method_name(self) -> str:
        """The registered name of the method, "-" if it is unknown."""
        return "-" if self.method is None else self._method.name

    @property
    def _method(self) -> Method:
        return resolve_method(self.method)[0]

    @property
    def needs(self) -> tuple[str, ...]:
        """The statistics to collect."""
        if self.method is None:
            return ()
        needs = self._method.needs
        # A rotation over more than one block of the Hessian needs the whole of it.
        if self.rotation > HESSIAN_BLOCK and "block_hessian" in needs:
            needs = (*needs, "hessian")
        is_scaled = self.input_format is not None and self.input_format.has_global_scale
        return (*needs, "magnitudes") if is_scaled and self.input_range == "headroom" else needs

    @property
    def has_input_scale(self) -> bool:
        """Whether calibration finds a scale of the input."""
        return self.input_format is not None and self.input_format.has_input_scale

    @property
    def has_own_inputs(self) -> bool:
        """Whether inputs are in the format of the weights, so that they lose as much as these."""
        return self.input_format is not None and self.inputs is None

    @property
    def input_rotation(self) -> int:
        """The columns of the input that the layer itself rotates together."""
        return 0 if self.folded else self.rotation

    @property
    def is_rotated(self) -> bool:
        """Whether rows or columns of the stored weight are rotated."""
        return bool(self.rotation or self.output_rotation)

    @property
    def scheme(self) -> str:
        """The name of the scheme, such as "nvfp4a16", with a block that is not the format's own."""
        return scheme_name(self.format, bool(self.weight_only), self.inputs)

    @property
    def label(self) -> str:
        """The scheme, and the options that change its computation, in a few words."""
        words = [self.scheme]
        if self.activation_scales != "naive" and self.input_format is not None:
            words.append(f"input scales by {self.activation_scales}")
        if "magnitudes" in self.needs:
            words.append("inputs with headroom")
        if self.rotation:
            words.append(f"rotated by {self.rotation}")
        if self.compute != "input":
            words.append(f"{self.compute} products")
        return ", ".join(words)

    def stored(self, weight: Tensor) -> Tensor:
        """Return the weight [N, K] as it is stored: in float32 if it is rotated."""
        if self.output_rotation:
            weight = rotate_weight(weight.t(), self.output_rotation).t()
        return rotate_weight(weight, self.rotation) if self.rotation else weight

    def restored(self, stored: Tensor) -> Tensor:
        """Return the weight [N, K] that a stored one stands for: the inverse of `stored`."""
        if self.rotation:
            stored = rotate(stored, self.rotation)
        if self.output_rotation:
            stored = rotate(stored.t(), self.output_rotation).t()
        return stored

    def override(self, options: Mapping[str, Any]) -> LinearConfig:
        """Return a copy with other options; `fmt` brings its own block and `weight_only`."""
        check_options(options)
        own: dict[str, Any] = {"block": None, "inputs": None} if "fmt" in options else {}
        # Either of them decides about inputs.
        own |= {"weight_only": False} if options.get("inputs") is not None else {}
        own |= {"inputs": None} if options.get("weight_only") else {}
        return dataclasses.replace(self, **{**own, **expand_scheme(options)})

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        return {each.name: getattr(self, each.name) for each in OPTIONS}

    def to_dict(self) -> dict[str, Any]:
        """Return every field as JSON has it; `from_dict` reads it."""
        return plain({each.name: getattr(self, each.name) for each in FIELDS})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LinearConfig:
        """Read what `to_dict` returned. Raises OptionError or TypeError for anything else."""
        if not isinstance(data, Mapping):
            raise OptionError(expected("LinearConfig", "what to_dict returned", data))
        method = data.get("method")
        if isinstance(method, Mapping):
            data = {**data, "method": method_from_dict(method)}
        return LinearConfig(**data)


# The fields that are stored, and those of them that users set.
FIELDS = tuple(each for each in dataclasses.fields(LinearConfig) if each.init)
OPTIONS = tuple(each for each in FIELDS if each.metadata["option"])


def input_scale_for(config: LinearConfig, stats: Stats) -> float | None:
    """Return the stored scale of inputs with such statistics, None for what stores none."""
    amax = stats.input_amax * math.sqrt(config.rotation or 1)
    if amax and "magnitudes" in config.needs and stats.magnitudes is not None:
        amax = max(amax, headroom(stats.magnitudes))
    return None if config.input_format is None else config.input_format.input_scale_for(amax)


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raise OptionError for a key that is no option of a linear layer."""
    names = [each.name for each in OPTIONS]
    for key in options:
        if key == "scheme":
            raise OptionError(f"{where}scheme: a scheme is given as fmt={options[key]!r}.")
        if key not in names:
            raise unknown_name(f"{where}option" if where else "Option", key, names)


def check_rules(rules: Rules, weight_only: bool | None = None) -> tuple[Rule, ...]:
    """Return rules as (glob, None) or (glob, options). Raises RuleError or OptionError."""
    # weight_only: as it is given beside the rules; True holds in rules that name a format.
    rules = getattr(rules, "rules", rules)
    if isinstance(rules, str | Mapping) or not isinstance(rules, Sequence):
        raise RuleError(expected("rules", "a list of (glob, options)", type(rules).__name__))
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
            pairs = "(glob, None) or (glob, options), as in ('*.down_proj', None)"
            raise RuleError(expected("rules: a rule", pairs, rule))
        pattern, options = rule
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise RuleError(expected(f"The rule for {pattern!r}", "None or a dict", repr(options)))
        check_options(options, f"In the rule for {pattern!r}, ")
    return tuple(
        (pattern, options and _expanded(pattern, options, weight_only))
        for pattern, options in rules
    )


def _expanded(pattern: str, options: Mapping[str, Any], weight_only: bool | None) -> dict[str, Any]:
    """Return the options of a rule with the fields of a scheme in place of its name."""
    if weight_only and "fmt" in options:
        options = {**options, "weight_only": options.get("weight_only", True)}
    try:
        return expand_scheme(options)
    except OptionError as error:
        raise OptionError(f"In the rule for {pattern!r}: {error}") from error


def plain(value: Any) -> Any:
    """Return options as JSON has them: a method as its name and its options."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return method_to_dict(value)
    return value
