"""Names of schemes: which operands of a linear layer are quantized, and in which format.

The name of a format quantizes weights and inputs ("nvfp4"); with the suffix "a16", weights only
("nvfp4a16"). A scheme is a name for fields of `LinearConfig`, and every format has its two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..core.formats import FORMATS, Format
from ..errors import OptionError, as_option, named, unknown_name
from .misnamed import require_scheme_name

# Inputs ("activations") stay in 16 bits.
WEIGHTS_ONLY = "a16"

# Where none is named: it needs no FP4 tensor cores, and is the closest to the original.
DEFAULT = "nvfp4a16"


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
    require_scheme_name(name, known)
    base = _base(name, known)
    if base not in known:
        raise unknown_name("fmt: Scheme", name, known)
    return {**known[base], "fmt": weight_format(str(name))}


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
        other = scheme_name(fields["fmt"], weight_only=False)
        raise OptionError(
            f"{named('fmt')}: scheme {name!r} leaves inputs in floating point, and "
            f"{as_option('weight_only', False)} "
            f"quantizes them. Choose {other!r}, or leave {as_option('weight_only', False)} out."
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
