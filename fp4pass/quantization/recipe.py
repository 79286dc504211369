"""Recipes as data: the options of `convert` in a YAML or JSON file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.files import parse_file, path_of
from ..core.fingerprint import digest_of
from ..distributed import ranks
from ..errors import Fp4PassError, OptionError, as_option, named_as, unknown_name
from ..methods import method_from_dict
from ..nn.kv_cache import KV_CACHE, get_cache_format
from ..record.config import OPTIONS, LinearConfig, Rule, check_rules, plain
from ..record.schemes import QUALITY, get_quality
from ..record.state import SMOOTH, PreparedState

# Keys in fp4pass.json beside the options of a recipe.
_FACTS = ("calibration", SMOOTH, "refine", "distilled", "merged")


@dataclass(frozen=True)
class Recipe:
    """The options of `convert`: `fp4pass.convert(model, **recipe.arguments())`.

    Attributes:
        config: of layers that no rule matches.
        rules: as `convert` takes them.
        kv_cache: as `convert` takes it.
        quality: as `convert` takes it; it sets the fields of `config` that it decides.

    Raises:
        OptionError: an option does not exist or does not fit the others.
        RuleError: a rule is malformed.

    Example:
        >>> config = fp4pass.LinearConfig("nvfp4a16", "sse")
        >>> recipe = fp4pass.Recipe(config, rules=[("2", None)]).override({"block": 32})
        >>> recipe.to_dict()["rules"], len(recipe.configs())
        ([{'2': None}], 1)
        >>> _ = Path("recipe.json").write_text(json.dumps(recipe.to_dict()))
        >>> fp4pass.Recipe.read("recipe.json") == recipe
        True
        >>> fp4pass.Recipe.from_dict({"method": "gptq"}).config.method_name
        'gptq'
        >>> model = fp4pass.convert(model, **recipe.arguments())
    """

    config: LinearConfig = field(default_factory=LinearConfig)
    rules: tuple[Rule, ...] = ()
    kv_cache: str | None = None
    quality: str | None = None

    def __post_init__(self) -> None:
        if self.kv_cache is not None:
            get_cache_format(self.kv_cache)
        if self.quality is not None:
            object.__setattr__(self, "config", with_quality(self.config, self.quality))
        object.__setattr__(self, "rules", check_rules(self.rules))
        self.configs()

    def configs(self) -> list[LinearConfig]:
        """Return the configs of layers: by each rule, and by none unless one matches all."""
        found = []
        for pattern, options in self.rules:
            try:
                config = self.config.override(options or {})
            except Fp4PassError as error:
                raise type(error)(f"In the rule for {pattern!r}: {error}") from error
            if options is not None:
                found.append(config)
            if pattern == "*":
                return found
        return [*found, self.config]

    def override(self, options: Mapping[str, Any]) -> Recipe:
        """Return a copy with other options for layers that no rule matches."""
        if self.quality is not None:
            require_undecided(self.quality, options)
        return dataclasses.replace(self, config=self.config.override(options))

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `convert`."""
        options = self.config.options()
        for name in () if self.quality is None else get_quality(self.quality).decides:
            del options[name]
        return self._whole(options, self.rules)

    def _whole(self, options: Mapping[str, Any], rules: Any) -> dict[str, Any]:
        found = {QUALITY: self.quality, **options, "rules": rules, KV_CACHE: self.kv_cache}
        absent = [key for key in (QUALITY, KV_CACHE) if found[key] is None]
        return {key: value for key, value in found.items() if key not in absent}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` reads, and that YAML and JSON can hold."""
        rules = [{pattern: plain(options)} for pattern, options in self.rules]
        return self._whole(plain(self.config.options()), rules)

    @staticmethod
    def read(
        path: str | os.PathLike[str], quality: str | None = None, weight_only: bool | None = None
    ) -> Recipe:
        """Read the recipe of a file: YAML, or JSON if its name ends so.

        A file may also hold a list of rules, or a recipe under the key "recipe", as fp4pass.json.

        Args:
            path: of the file.
            quality: as if the file said so.
            weight_only: the same, in rules that name a format.

        Raises:
            OptionError: with the file and the key that is wrong.
            RuleError: a rule is malformed.
        """
        data = parse_file(path_of(path, "path"))
        # Errors name the keys of the file, in a command too.
        with named_as({}):
            return _read(data, str(path), quality, weight_only)

    @staticmethod
    def from_dict(data: Mapping[str, Any] | Sequence[Any], where: str = "The recipe") -> Recipe:
        """Read plain values, as `to_dict` and fp4pass.json have them.

        Args:
            data: the values.
            where: the name of their source, for errors.
        """
        return _read(data, where)


def with_quality(config: LinearConfig, quality: str) -> LinearConfig:
    """Return a config with the fields that a quality decides."""
    recipe = get_quality(quality)
    default = LinearConfig()
    before = {name: getattr(default, name) for name in recipe.decides}
    return dataclasses.replace(
        config, **{**before, **recipe.options_for(not config.has_own_inputs)}
    )


def require_undecided(quality: str, options: Mapping[str, Any]) -> None:
    """Raise OptionError if one of some options is given beside a quality that decides it."""
    decides = get_quality(quality).decides
    given = [name for name in options if name in decides]
    if given:
        names = " and ".join(given)
        raise OptionError(
            f"{as_option('quality', quality)} and {names} are both given, and quality decides "
            f"{names}. Leave one of them out; rules can give single layers other options."
        )


def recorded(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe in fp4pass.json as `Recipe.to_dict` does, the quality as it was written."""
    name = {QUALITY: recipe[QUALITY]} if QUALITY in recipe else {}
    options = {key: value for key, value in recipe.items() if key != QUALITY}
    return {**name, **Recipe.from_dict(options).to_dict()}


def recipe_of(
    config: LinearConfig, rules: Sequence[Rule], tokens: int, before: PreparedState | None
) -> dict[str, Any]:
    """Return the recipe of a conversion for fp4pass.json; tokens: the most that a layer saw."""
    recipe = {**plain(config.options()), "rules": plain(rules), **(before.recipe if before else {})}
    if tokens:
        is_sequential = before is not None and before.recording is not None
        sequential = {"sequential": True} if is_sequential else {}
        seen = _of_all_ranks(recipe.get("calibration", {}))
        recipe["calibration"] = {**seen, "tokens": tokens, **sequential}
    return recipe


def _of_all_ranks(seen: Mapping[str, Any]) -> dict[str, Any]:
    each = ranks().gather(dict(seen))
    if len(each) == 1 or not any(each):
        return each[0]
    keys = [key for key in ("batches", "hidden") if any(key in one for one in each)]
    counts = {key: sum(one.get(key, 0) for one in each) for key in keys}
    digest = digest_of([one.get("sha256", "") for one in each])
    return {**each[0], **counts, "sha256": digest, "processes": len(each)}


def _read(
    data: Any, source: str, given: str | None = None, weight_only: bool | None = None
) -> Recipe:
    """Read plain values, of a source that errors name, as a recipe; given: a quality."""
    if isinstance(data, Mapping) and isinstance(data.get("recipe"), Mapping):
        data = data["recipe"]
    if isinstance(data, list | tuple):
        data = {"rules": data}
    names = [each.name for each in OPTIONS]
    keys = (*names, QUALITY, "rules", KV_CACHE)
    try:
        if not isinstance(data, Mapping):
            mapping = f"a mapping with {', '.join(keys)}, or a list of rules"
            raise OptionError(f"expected {mapping}, got {_shown(data)}.")
        for key in data:
            if key not in (*keys, *_FACTS):
                raise unknown_name("the key", key, keys)
        options = _with_method({name: data[name] for name in names if name in data})
        config = LinearConfig().override(options)
        rules = data.get("rules", ())
        if not isinstance(rules, list | tuple):
            raise OptionError(f"rules: expected a list of rules, got {_shown(rules)}.")
        weights = weight_only or data.get("weight_only")
        read = check_rules(list(map(_rule, rules)), weights)
        quality = data.get(QUALITY, given)
        if given not in (None, quality):
            raise OptionError(
                f"{QUALITY}: {quality!r}, and --{QUALITY} {given} is given. Leave out one of them."
            )
        meant = config if quality is None else with_quality(config, quality)
        for key in () if quality is None else get_quality(quality).decides:
            if key in data and getattr(config, key) != getattr(meant, key):
                raise OptionError(
                    f"{key}: {QUALITY} {quality!r} stands for {plain(getattr(meant, key))}, got "
                    f"{plain(getattr(config, key))}. Leave out one of them."
                )
        return Recipe(config, read, data.get(KV_CACHE), quality)
    except (Fp4PassError, TypeError) as error:
        raise OptionError(f"{source}: {error}") from error


def _with_method(options: Mapping[str, Any]) -> Mapping[str, Any]:
    method = options.get("method")
    return (
        {**options, "method": method_from_dict(method)} if isinstance(method, Mapping) else options
    )


def _rule(rule: Any) -> Any:
    """Return a rule as a pair: fp4pass.json has pairs, people write mappings."""
    if isinstance(rule, Mapping) and len(rule) == 1:
        rule = next(iter(rule.items()))
    if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[1], Mapping):
        return rule[0], _with_method(rule[1])
    return rule


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"
