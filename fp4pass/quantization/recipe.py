"""Recipes as data: the options of `convert` in a YAML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Rule, Settings, check_rules, make_settings
from ..errors import Fp4PassError, OptionError, unknown_name
from ..methods import METHODS, resolve_method

KEYS = ("fmt", "method", "weight_only", "block", "activation_scales", "rotation", "rules")

# What fp4pass.json says beside them, which is not an option.
_FACTS = ("calibration", "smooth")


@dataclass(frozen=True)
class Recipe:
    """What `convert` is to do: `fp4pass.convert(model, **recipe.arguments())`.

    The fields are its options, checked as it checks them. Raises OptionError or RuleError.
    """

    fmt: str = "nvfp4"
    method: object = "hessian"
    weight_only: bool = False
    block: int | str = "default"
    activation_scales: str = "naive"
    rotation: int = 0
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", check_rules(self.rules))
        defaults = self._defaults()
        make_settings(**defaults)
        for pattern, options in self.rules:
            try:
                make_settings(**rule_options(defaults, options or {}))
            except Fp4PassError as error:
                raise type(error)(f"In the rule for {pattern!r}: {error}") from error

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Recipe:
        """The recipe of a file: YAML, or JSON if its name ends so.

        Read too: a list, which is rules alone, and a file that holds a recipe under the key
        "recipe", as fp4pass.json does. Raises OptionError or RuleError, with the file, the line
        if it is YAML, and the key.
        """
        data, lines = _parse(Path(path))
        return _Reader(str(path), lines).recipe(data)

    @staticmethod
    def from_dict(data: Mapping[str, Any] | Sequence[Any], where: str = "The recipe") -> Recipe:
        """The recipe of plain values, as `to_dict` and fp4pass.json have them."""
        return _Reader(where, {}).recipe(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads, and that a file may hold as YAML or JSON."""
        rules = [{pattern: _plain(options)} for pattern, options in self.rules]
        return {**{key: _plain(value) for key, value in self._defaults().items()}, "rules": rules}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `convert`."""
        return {**self._defaults(), "rules": self.rules}

    def settings(self) -> list[Settings]:
        """What linears can be given: by each rule, and by none unless a rule matches them all."""
        options: list[Mapping[str, Any]] = []
        for pattern, own in self.rules:
            if own is not None:
                options.append(rule_options(self._defaults(), own))
            if pattern == "*":
                break
        else:
            options.append(self._defaults())
        return [make_settings(**each) for each in options]

    def _defaults(self) -> dict[str, Any]:
        """The options of a linear that no rule matches."""
        return {
            "fmt": self.fmt,
            "method": self.method,
            "weight_only": self.weight_only,
            "block": self.block,
            "activation_scales": self.activation_scales,
            "rotation": self.rotation,
        }


def rule_options(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a linear that a rule matches: a format of its own brings its own block."""
    block = {"block": "default"} if "fmt" in options else {}
    return {**defaults, **block, **options}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"name": resolve_method(value)[0].name, **dataclasses.asdict(value)}
    return value


# A place in a file: the keys and indices that lead to it.
_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Reader:
    """Plain values to a recipe; an error says where in `file` it is.

    lines: the line of each place, as far as they are known.
    """

    file: str
    lines: Mapping[_Path, int]

    def recipe(self, data: Any) -> Recipe:
        at: _Path = ()
        if isinstance(data, Mapping) and isinstance(data.get("recipe"), Mapping):
            data, at = data["recipe"], ("recipe",)
        if isinstance(data, list | tuple):
            return self.with_rules(Recipe(), data, at)
        if not isinstance(data, Mapping):
            wanted = f"a mapping with {', '.join(KEYS)}, or a list of rules"
            raise self.error(at, f"there is {_shown(data)}; {wanted} is wanted.")
        self.keys(data, KEYS, at, ignored=_FACTS)
        found: dict[str, Any] = {}
        recipe = Recipe()
        for key in KEYS[:-1]:
            if key in data:
                place = (*at, key)
                found[key] = self.method(data[key], place) if key == "method" else data[key]
                # One more each time, so that the error has the place of the one that is wrong.
                recipe = self.checked(found, place)
        return self.with_rules(recipe, data.get("rules", ()), (*at, "rules"))

    def with_rules(self, recipe: Recipe, data: Any, at: _Path) -> Recipe:
        rules = self.rules(data, at)
        for i, (pattern, options) in enumerate(rules):
            both = rule_options(recipe._defaults(), options or {})
            self.checked(both, (*at, i), f"the rule for {pattern!r}: ")
        return dataclasses.replace(recipe, rules=rules)

    def checked(self, options: Mapping[str, Any], at: _Path, what: str = "") -> Recipe:
        """A recipe with these options and no rules."""
        try:
            return Recipe(**options)
        except Fp4PassError as error:
            raise self.error(at, f"{what}{error}") from error

    def rules(self, data: Any, at: _Path) -> tuple[Rule, ...]:
        if not isinstance(data, list | tuple):
            raise self.error(at, f"there is {_shown(data)}; a list of rules is wanted.")
        rules = []
        for i, rule in enumerate(data):
            # As fp4pass.json has it, or as one writes it by hand.
            pair = isinstance(rule, list | tuple) and len(rule) == 2
            if isinstance(rule, Mapping) and len(rule) == 1:
                rule = next(iter(rule.items()))
            elif not pair:
                wanted = '"*.down_proj": {fmt: mxfp4}, or "*.down_proj": null'
                raise self.error((*at, i), f"there is {_shown(rule)}; one rule is {wanted}.")
            pattern, options = rule
            if not isinstance(pattern, str):
                raise self.error((*at, i), f"a rule is for {pattern!r}; a name is wanted.")
            place = (*at, i, 1 if pair else pattern)
            rules.append((pattern, self.options(pattern, options, place)))
        return tuple(rules)

    def options(self, pattern: str, options: Any, at: _Path) -> dict[str, Any] | None:
        if options is None:
            return None
        if not isinstance(options, Mapping):
            wanted = "null, which leaves alone, or a mapping of options"
            raise self.error(at, f"the rule has {_shown(options)}; {wanted} is wanted.")
        self.keys(options, KEYS[:-1], at)
        read = dict(options)
        if "method" in read:
            read["method"] = self.method(read["method"], (*at, "method"))
        return read

    def method(self, data: Any, at: _Path) -> object:
        """A name as it is, a mapping as the options of a method."""
        if not isinstance(data, Mapping):
            return data
        name = data.get("name")
        if not isinstance(name, str):
            raise self.error(at, "a method without name; {name: hessian} is wanted.")
        if name not in METHODS:
            raise self.error((*at, "name"), str(unknown_name("method", name, METHODS)))
        kind = METHODS[name].options
        known = tuple(field.name for field in dataclasses.fields(kind))
        self.keys(data, ("name", *known), at)
        try:
            return kind(**{key: value for key, value in data.items() if key != "name"})
        except (Fp4PassError, TypeError) as error:
            raise self.error(at, f"method {name!r}: {error}") from error

    def keys(
        self,
        data: Mapping[Any, Any],
        known: Sequence[str],
        at: _Path,
        ignored: Sequence[str] = (),
    ) -> None:
        for key in data:
            if key not in known and key not in ignored:
                raise self.error((*at, key), str(unknown_name("the key", key, known)))

    def error(self, at: _Path, problem: str) -> OptionError:
        """What is wrong, behind where."""
        inner = (at[:end] for end in range(len(at), -1, -1))
        line = next((self.lines[place] for place in inner if place in self.lines), None)
        where = self.file if line is None else f"{self.file}, line {line}"
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)
        return OptionError(f"{where}{', ' if name else ''}{name.removeprefix('.')}: {problem}")


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"


def _parse(path: Path) -> tuple[Any, dict[_Path, int]]:
    """The plain values of a file, and the line of each place in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(f"{path} cannot be read: {problem}. A recipe is wanted.") from error
    if path.suffix == ".json":
        try:
            return json.loads(text), {}
        except ValueError as error:
            raise OptionError(f"{path} is not JSON: {error}.") from error
    try:
        import yaml
    except ImportError as error:
        raise OptionError(
            f"{path}: reading YAML needs PyYAML: pip install 'fp4pass[cli]'. Or write JSON."
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = dict(_lines(root, ()))
        repeated = [at for at, line in lines.items() if line < 0]
        if repeated:
            line = -lines[repeated[0]]
            raise OptionError(f"{path}, line {line}: the key {repeated[0][-1]!r} is there twice.")
        return yaml.safe_load(text), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        hint = " Put names that begin with * in quotes." if "alias" in str(error) else ""
        raise OptionError(f"{where}: this is not YAML: {problem}.{hint}") from error


def _lines(node: Any, at: _Path) -> Iterator[tuple[_Path, int]]:
    """The line of every place below a node of YAML, negative for a key that is there twice."""
    if node is None:
        return
    if isinstance(node.value, str):
        return
    seen = set()
    for i, item in enumerate(node.value):
        key, child = (item[0].value, item[1]) if isinstance(item, tuple) else (i, item)
        if not isinstance(key, str | int):
            continue
        line = (item[0] if isinstance(item, tuple) else item).start_mark.line + 1
        place = (*at, key)
        if key in seen:
            yield place, -line
            continue
        seen.add(key)
        yield place, line
        yield from _lines(child, place)
