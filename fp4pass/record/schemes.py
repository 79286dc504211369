"""Names of schemes: which operands of a linear layer are quantized, and in which format.

The name of a format quantizes weights and inputs ("nvfp4"); with the suffix "a16", weights only
("nvfp4a16"). A scheme is a name for fields of `LinearConfig`, and every format has its two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ..core.formats import FORMATS, Format
from ..errors import OptionError, as_option, named, nearest
from ..methods import METHODS

# The names that type checkers know; a test holds them equal to those of `schemes`.
Scheme = (
    Literal["nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "nvint4", "nvint4a16"]
    | Literal["fp8", "fp8a16", "fp8_block", "fp8_blocka16", "fp8_tensor", "fp8_tensora16"]
    | Literal["mxfp8", "mxfp8a16", "mxfp8_e5m2", "mxfp8_e5m2a16", "int8", "int8a16"]
    | Literal["mxfp6_e2m3", "mxfp6_e2m3a16", "mxfp6_e3m2", "mxfp6_e3m2a16"]
    | Literal["nvfp4_ue4m4", "nvfp4_ue4m4a16", "nvfp4_ue5m3", "nvfp4_ue5m3a16"]
)

# Inputs ("activations") stay in 16 bits.
WEIGHTS_ONLY = "a16"

# Where none is named: it needs no FP4 tensor cores, and is the closest to the original.
DEFAULT = "nvfp4a16"

# Parts of the names that other libraries give to schemes, which say nothing of the format.
_ELSEWHERE = re.compile(r"default|awq|lite|full|mlp|cfg|[^a-z0-9]")


def schemes() -> dict[str, dict[str, Any]]:
    """Return the fields of `LinearConfig` that each scheme stands for, by its name.

    Formats may be registered at any time, so they are read at each call. A scheme whose name is not
    made of a format's is one more entry here.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in FORMATS:
        found[name] = {"fmt": name, "weight_only": False}
        found[name + WEIGHTS_ONLY] = {"fmt": name, "weight_only": True}
    return found


def scheme_fields(name: object) -> dict[str, Any]:
    """Return the fields of a scheme; its name may end in a block, as in "nvfp4a16:32".

    Capitals are as good as small letters, as in "NVFP4A16".

    Raises:
        OptionError: there is no such scheme.
    """
    known = schemes()
    base = _base(name, known)
    if base in known:
        return {**known[base], "fmt": weight_format(str(name))}
    problem = f"{named('fmt')}: Scheme {name!r} does not exist"
    if base in METHODS:
        raise OptionError(f"{problem}: it is a method. Give {as_option('method', base)}.")
    near = nearest(_ELSEWHERE.sub("", base.replace("weight_only", "a16")), known)
    raise OptionError(f"{problem}.{near} Known: {', '.join(sorted(known))}.")


def weight_format(name: str) -> str:
    """Return the format of the weights of a scheme; a name that is no scheme is returned as is."""
    known = schemes()
    _, colon, block = str(name).partition(":")
    fields = known.get(_base(name, known))
    return name if fields is None else f"{fields['fmt']}{colon}{block}"


def expand_scheme(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of a scheme in place of its name under "fmt".

    `weight_only=True` beside the name of a format makes the scheme weights only.

    Raises:
        OptionError: there is no such scheme, or another option contradicts it.
    """
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
    given = {key: value for key, value in options.items() if value is not None}
    return {**options, **fields, **given, "fmt": fields["fmt"]}


def scheme_name(fmt: Format | str, weight_only: bool) -> str:
    """Return the name of the scheme with a format, or its key, and with inputs quantized or not.

    A block that is not the format's own follows it, as in "nvfp4a16:32".
    """
    key = fmt if isinstance(fmt, str) else fmt.with_multiplier(False).key
    base, colon, block = key.partition(":")
    fields = {"fmt": base, "weight_only": weight_only}
    return next(name for name, each in schemes().items() if each == fields) + colon + block


def _base(name: object, known: Collection[str]) -> str:
    """Return the name of a scheme without its block, in small letters unless it has capitals."""
    base = str(name).partition(":")[0]
    return base if base in known else base.lower()
