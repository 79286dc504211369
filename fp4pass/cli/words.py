"""Errors and warnings of the library in the words of a shell."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import yaml

from ..errors import expected
from ..methods import METHODS

# The options of commands for parameters of Python with another name.
_OPTIONS = {
    "batches": ("calib",),
    "data": ("calib",),
    "directory": ("output",),
    "layout": ("export", "to"),
    "path": ("output",),
    "window": ("seq_len", "length"),
}

# Phrases about arguments that commands pass by themselves.
_PHRASES = {
    ", with resume= to keep what was searched": "",
    "Give batches as data=": "Give --calib FILE",
    "True or False": "true or false",
    ", or None for": ", or left out for",
    ", or None": ", or left out",
}

# Pydantic's names of what is wrong with a value.
_WANTED = {
    "bool_parsing": "true or false",
    "float_parsing": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
}

# A call of Python, with calls in it.
CALL = re.compile(r"([\w.]+\((?:[^()]|\([^()]*\))*\))")

_QUOTES = r"['\"]"

_VALUE = r"'[^']*'(?:(?:,| or|, or) '[^']*')*|\"[^\"]*\"|True|False|-?[\d.]*\d"


class Words:
    """The parameters of a command as its options."""

    def __init__(self, parameters: Iterable[Any] = ()) -> None:
        self._on: dict[str, str] = {}
        self._off: dict[str, str] = {}
        for each in parameters:
            flags = [flag for flag in each.opts if flag.startswith("--")]
            if flags:
                self._on[each.name] = flags[0]
                self._off[each.name] = next(iter(each.secondary_opts), f"no {flags[0]}")
        for name, options in _OPTIONS.items():
            for option in options:
                if option in self._on and name not in self._on:
                    self._on[name] = self._on[option]

    def translate(self, text: str) -> str:
        """Return a text with the options of the command in place of Python's arguments."""
        for phrase, here in _PHRASES.items():
            text = text.replace(phrase, here)
        if "rules" in self._on:
            text = re.sub(r"rules=(\[\(.*?\)\])(?=[\s,.)]|$)", self._rules, text)
        text = re.sub(rf"\b([A-Z]\w+)\((\w+=(?:{_VALUE}))\)", _method, text)
        names = "|".join(sorted(map(re.escape, self._on), key=len, reverse=True))
        if not names:
            return text
        # Of `prepare` or `convert` there is nothing to say: a command is all of them.
        calls = r"(?: (?:to|of|in) (?:prepare|convert|save|calibrate)\b)?"
        # Values that a task reads are a user's own.
        own = r"(?<!--metadata )(?<!KEY=VALUE, as in )"
        option = rf"(?<![\w.\-'\"]){own}({names})=({_VALUE})?{calls}"
        # Calls of Python stay as they are to be typed.
        parts = [
            part if i % 2 else re.sub(option, self._option, part)
            for i, part in enumerate(re.split(CALL, text))
        ]
        text = "".join(parts)
        return re.sub(rf"^({names})(?=: )", lambda match: self._on[match[1]], text)

    def _option(self, match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        flag = self._on[name]
        if value == "True" or value is None:
            return flag
        if value == "False":
            return self._off.get(name, "")
        return f"{flag} {re.sub(_QUOTES, '', value)}"

    def _rules(self, match: re.Match[str]) -> str:
        """Return the rules as lines of a recipe."""
        try:
            rules = ast.literal_eval(match[1])
        except (SyntaxError, ValueError):
            return match[0]
        lines = in_yaml([{pattern: options} for pattern, options in rules])
        return f"{self._on['rules']} FILE (with {lines})"


def in_yaml(value: Any) -> str:
    """Return a list or a mapping of plain values on one line, as a recipe has it."""
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1e9)).strip()


def parsing_problem(error: Any) -> str:
    """Return what the parser of options found wrong, without the words of pydantic."""
    message = str(error.format_message()).rstrip(".")
    details = getattr(error.__cause__, "errors", None)
    flags = [
        flag for flag in getattr(getattr(error, "param", None), "opts", ()) if flag.startswith("--")
    ]
    if details is None or not flags:
        return message
    (first, *_) = details()
    wanted = _WANTED.get(first["type"])
    if wanted is None:
        return f"{flags[0]}: {str(first['msg']).removeprefix('Value error, ').rstrip('.')}"
    return expected(flags[0], wanted, str(first["input"])).rstrip(".")


def _method(match: re.Match[str]) -> str:
    """Return the options of a method, as a recipe has them."""
    for name, method in METHODS.items():
        if method.options.__name__ == match[1] and dataclasses.is_dataclass(method.options):
            key, _, value = match[2].partition("=")
            return f"method {in_yaml({'name': name, key: ast.literal_eval(value)})}"
    return match[0]
