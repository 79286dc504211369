"""Names of schemes and methods in each other's place, or in the words of other libraries."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors import OptionError, as_option, named
from ..methods import METHODS

# Spellings of llm-compressor, ModelOpt, vLLM and others, in lower case and without separators.
_ELSEWHERE = re.compile(
    r"(?P<first>nv|mx)?(fp4)?(?P<bits>w4a4|w4a16|a4|a16)?(?P<second>nv|mx)?(fp4)?"
    r"(default|awq\w*|mlp\w*|weightonly)?(cfg)?"
)
_FLOAT_INPUTS = ("a16", "weightonly")


def require_scheme_name(name: object, known: Collection[str]) -> None:
    """Raise OptionError for a method in place of a scheme, or a name that others have for one."""
    if not isinstance(name, str) or {base := name.partition(":")[0], base.lower()} & {*known}:
        return
    problem = f"{named('fmt')}: Scheme {name!r} does not exist"
    if name.lower() in METHODS:
        raise OptionError(f"{problem}: it is a method. Give {as_option('method', name.lower())}.")
    if "int4" in name.lower():
        raise OptionError(
            f"{problem}: fp4pass has no integers with zero points. 'nvfp4a16' takes 4.5 bits, as "
            "int4 in groups of 32."
        )
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    match = _ELSEWHERE.fullmatch(plain)
    if not match or not ("fp4" in plain or "w4a" in plain):
        return
    scheme = f"{match['first'] or match['second'] or 'nv'}fp4"
    scheme += "a16" if any(each in plain for each in _FLOAT_INPUTS) else ""
    raise OptionError(f"{problem}. Did you mean {as_option('fmt', scheme)}?")


def require_method_name(name: object, schemes: Collection[str]) -> None:
    """Raise OptionError for a scheme in place of a method."""
    if isinstance(name, str) and name not in METHODS and name.lower() in schemes:
        raise OptionError(
            f"Method {name!r} does not exist: it is a scheme. Give "
            f"{as_option('fmt', name.lower())}."
        )
