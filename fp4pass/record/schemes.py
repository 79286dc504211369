"""Names of schemes and of qualities, and the options that they stand for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.formats import FORMATS, Format
from ..errors import OptionError, as_option, named, nearest, unknown_name
from ..methods import Gptq, Hessian, Sse

# The names that type checkers know; a test holds them equal to those of `schemes`.
Scheme = (
    Literal["nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "nvint4", "nvint4a16"]
    | Literal["fp8", "fp8a16", "fp8_block", "fp8_blocka16", "fp8_tensor", "fp8_tensora16"]
    | Literal["mxfp8", "mxfp8a16", "mxfp8_e5m2", "mxfp8_e5m2a16", "int8", "int8a16"]
    | Literal["mxfp6_e2m3", "mxfp6_e2m3a16", "mxfp6_e3m2", "mxfp6_e3m2a16"]
    | Literal["nvfp4_ue4m4", "nvfp4_ue4m4a16", "nvfp4_ue5m3", "nvfp4_ue5m3a16"]
    | Literal["nvfp4a8", "nvfp4a8_block", "nvfp4a8_tensor"]
    | Literal["mxfp4a8", "mxfp4a8_block", "mxfp4a8_tensor"]
)

# Inputs ("activations") stay in 16 bits.
WEIGHTS_ONLY = "a16"

# Inputs in 8 bits of weights in 4: formats of these, and by the end of the scheme's name of those.
WITH_EIGHT_BITS = ("nvfp4", "mxfp4")
EIGHT_BITS = {"a8": "fp8", "a8_block": "fp8_block", "a8_tensor": "fp8_tensor"}

# The fields of `LinearConfig` that a scheme and its block decide.
SCHEME_FIELDS = ("fmt", "weight_only", "inputs", "block")

# Where none is named: it needs no FP4 tensor cores, and is the closest to the original.
DEFAULT = "nvfp4a16"

# Parts of the names that other libraries give to schemes, which say nothing of the format.
_ELSEWHERE = re.compile(r"default|awq|lite|full|mlp|cfg|[^a-z0-9]")


def schemes() -> dict[str, dict[str, Any]]:
    """Return the fields of `LinearConfig` that each scheme stands for; formats may be added."""
    found: dict[str, dict[str, Any]] = {}
    for name in FORMATS:
        found[name] = {"fmt": name, "weight_only": False}
        found[name + WEIGHTS_ONLY] = {"fmt": name, "weight_only": True}
    for name in WITH_EIGHT_BITS:
        for end, inputs in EIGHT_BITS.items():
            found[name + end] = {"fmt": name, "weight_only": False, "inputs": inputs}
    return found


def scheme_fields(name: object) -> dict[str, Any]:
    """Return the fields of a scheme; a block may follow ("NVFP4A16:32"). Raises OptionError."""
    known = schemes()
    base = _base(name, known)
    if base in known:
        return {**known[base], "fmt": weight_format(str(name))}
    problem = f"{named('fmt')}: Scheme {name!r} does not exist"
    near = nearest(_ELSEWHERE.sub("", base.replace("weight_only", "a16")), known)
    raise OptionError(f"{problem}.{near} Known: {', '.join(sorted(known))}.")


def weight_format(name: str) -> str:
    """Return the format of the weights of a scheme; a name that is no scheme is returned as is."""
    known = schemes()
    _, colon, block = str(name).partition(":")
    fields = known.get(_base(name, known))
    return name if fields is None else f"{fields['fmt']}{colon}{block}"


def expand_scheme(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of a scheme in place of its name. Raises OptionError."""
    if options.get("fmt") is None:
        return dict(options)
    name = str(options["fmt"])
    fields = scheme_fields(options["fmt"])
    if options.get("weight_only") is False and fields["weight_only"]:
        both = as_option("weight_only", False)
        raise OptionError(
            f"{named('fmt')}: scheme {name!r} leaves inputs in floating point, and {both} "
            f"quantizes them. Choose {scheme_name(fields['fmt'], weight_only=False)!r}, or leave "
            f"{both} out."
        )
    if options.get("inputs") is not None and (options.get("weight_only") or fields["weight_only"]):
        beside = as_option("inputs", options["inputs"])
        raise OptionError(
            f"{named('fmt')}: scheme {name!r} leaves inputs in floating point here, and {beside} "
            "quantizes them. Leave one of them out."
        )
    given = {key: value for key, value in options.items() if value is not None}
    if options.get("weight_only"):
        fields.pop("inputs", None)
    return {**options, **fields, **given, "fmt": fields["fmt"]}


def scheme_name(fmt: Format | str, weight_only: bool, inputs: str | None = None) -> str:
    """Return the name of the scheme with a format, or its key; another block follows it."""
    key = fmt if isinstance(fmt, str) else fmt.with_multiplier(False).key
    base, colon, block = key.partition(":")
    fields = {"fmt": base, "weight_only": weight_only} | ({"inputs": inputs} if inputs else {})
    return next(name for name, each in schemes().items() if each == fields) + colon + block


def _base(name: object, known: Collection[str]) -> str:
    """Return the name of a scheme without its block, in small letters unless it has capitals."""
    base = str(name).partition(":")[0]
    return base if base in known else base.lower()


# The key of fp4pass.json, and the keyword of `convert`.
QUALITY = "quality"
QualityName = Literal["fast", "good", "best", "tuned"]

# Tokens that a model writes to calibrate the scales of its inputs alone, for the largest value.
INPUT_TOKENS = 1 << 12


@dataclass(frozen=True)
class Quality:
    """A recipe with a name."""

    options: Mapping[str, Any]  # the fields of `LinearConfig` that it decides
    # Those that it decides where inputs are in the format of the weights.
    input_options: Mapping[str, Any] = field(default_factory=dict)
    # In place of `options`, for layers that cannot be calibrated one after the other: stacks of
    # experts, and layers outside of the model's stacks.
    alone: Mapping[str, Any] = field(default_factory=dict)
    sequential: bool = False  # calibrate one layer at a time
    smoothing: float = 0.0  # the strength of `fp4pass.smooth` for such inputs
    tokens: int = 0  # of text where there is no data
    distilled: int = 0  # windows that `fp4pass.distill` trains on then

    @property
    def decides(self) -> tuple[str, ...]:
        """The fields of `LinearConfig` that nobody else may give."""
        return tuple({**self.options, **self.input_options})

    def options_for(self, weights_alone: bool) -> dict[str, Any]:
        """Return the fields that it decides, also for layers whose weights alone lose much."""
        return {**self.options, **({} if weights_alone else self.input_options)}


# As measured: docs/quality.md.
_BEST = Quality(
    {"method": Gptq(target="cross")},
    # Part of the input error is the rounding of the layer's own inputs. A target that corrects it
    # too shrinks the weights.
    input_options={"method": Gptq(target="cross", target_damping=2.0), "activation_scales": "sse"},
    alone={"method": Gptq()},
    sequential=True,
    smoothing=0.5,
    tokens=1 << 15,
)
QUALITIES: dict[str, Quality] = {
    "fast": Quality({"method": Sse()}),
    "good": Quality({"method": Hessian()}, smoothing=0.5, tokens=1 << 15),
    "best": _BEST,
    "tuned": dataclasses.replace(_BEST, distilled=1 << 13),
}


def get_quality(name: str) -> Quality:
    """Return the recipe of a name. Raises OptionError for any other."""
    if name not in QUALITIES:
        raise unknown_name("Quality", name, QUALITIES)
    return QUALITIES[name]
