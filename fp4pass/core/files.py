"""Paths as callers give them, and the plain values of YAML and JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import OptionError, expected

# Levels of objects and lists in each other; no file of a model has ten.
_DEEPEST = 200


def path_of(path: object, what: str, wanted: str = "a path, as a string or a pathlib.Path") -> Path:
    """Return a path. Raises OptionError for what is none, calling it `what`."""
    if not isinstance(path, str | os.PathLike) or str(path) == "" or "\0" in str(path):
        raise OptionError(expected(what, wanted, repr(path)))
    return Path(os.fspath(path))


def parse_json(text: str | bytes) -> Any:
    """Return the values of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level: list[Any] = [[data]]
    for _ in range(_DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    if level:
        raise ValueError("it is nested too deeply")
    return data


def parse_file(path: Path) -> Any:
    """Return the plain values of a file. Raises OptionError with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(f"{path} cannot be read as a recipe: {problem}.") from error
    if path.suffix == ".json":
        try:
            return parse_json(text)
        except ValueError as error:
            raise OptionError(f"{path} is not JSON: {error}.") from error
    try:
        import yaml
    except ImportError as error:
        raise OptionError(
            f"{path}: reading YAML needs PyYAML: pip install 'fp4pass[cli]'. Or write JSON."
        ) from error

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise OptionError(f"{path}, line {line}: the key {key!r} is there twice.")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        hint = " Put names that begin with * in quotes." if "alias" in str(error) else ""
        raise OptionError(f"{where}: this is not YAML: {problem}.{hint}") from error
