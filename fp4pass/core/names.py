"""Names of modules: patterns that cover them, and those that serving engines fuse."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

# Linear layers of one module that vLLM and SGLang multiply by as one matrix.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


def covering_globs(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return patterns that match all of some names and none of the others, few and short."""
    left, found = list(names), []
    while left:
        best = max(_patterns(left[0]), key=lambda p: (not _matches(p, others), _matches(p, left)))
        found.append(best)
        left = [name for name in left[1:] if not fnmatch.fnmatchcase(name, best)]
    return found


def _patterns(name: str) -> list[str]:
    """Return patterns that match a name, those that say less of it first; the last is the name."""
    parts, numbered = name.split("."), without_numbers(name).split(".")
    found = []
    for i in range(1, len(parts)):
        found += [".".join([*each[:i], "*"]) for each in (numbered, parts) if each[i - 1] != "*"]
    tails = [".".join(["*", *numbered[i:]]) for i in range(len(parts) - 1, 0, -1)]
    return [*found, *tails, ".".join(numbered), name]


def without_numbers(name: str) -> str:
    """Return a name with a * for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _matches(pattern: str, names: Collection[str]) -> int:
    return sum(fnmatch.fnmatchcase(name, pattern) for name in names)
