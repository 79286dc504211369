"""The options --budget and --schemes of fp4pass quantize."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..calibration.to_batches import Example, batches, collate
from ..core.files import parse_file
from ..engine.one_call import OwnText
from ..errors import OptionError, expected
from ..lab import SCHEMES, Allocation, allocate
from ..quantization.recipe import Recipe
from ..record.schemes import schemes as known_schemes
from .options import flag

Budget = Annotated[
    str | None,
    Option(
        "--budget",
        help="Choose the scheme of each layer by measuring: 5.0bits for the best model with that "
        "many bits per weight, 0.02kl for the smallest model within that KL. --method is then sse "
        "by default.",
        metavar="NUMBERbits|NUMBERkl",
        show_default=False,
    ),
]
Schemes = Annotated[
    str | None,
    Option(
        "--schemes",
        help="Schemes for --budget, separated by commas; bf16 leaves layers unchanged.",
        metavar="NAMES",
        show_default=",".join(SCHEMES),
    ),
]

_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(?:e-?\d+)?")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A budget as it was typed.

    Attributes:
        limit: {"bits": ...} or {"kl": ...}.
        schemes: to choose from.
    """

    limit: dict[str, float]
    schemes: tuple[str, ...]

    @staticmethod
    def read(
        budget: str | None,
        schemes: str | None,
        options: dict[str, Any],
        by_layers: str,
        processes: int,
    ) -> Asked | None:
        """Read the options, None without a budget.

        Args:
            budget: of --budget.
            schemes: of --schemes.
            options: fields of `LinearConfig` that are given.
            by_layers: the option that calibrates one layer after the other, "" for none.
            processes: that run the command.

        Raises:
            OptionError: an option is malformed, or does not go with another.
        """
        if budget is None:
            if schemes is not None:
                raise OptionError("--schemes is for --budget. Give one, or use --scheme.")
            return None
        for name in ("fmt", "weight_only", "block"):
            if name in options:
                raise OptionError(
                    f"--budget decides {flag(name)}. Leave it out, and give --schemes."
                )
        if by_layers:
            raise OptionError(f"--budget does not go with {by_layers}, which runs parts of models.")
        if processes > 1:
            raise OptionError(
                f"--budget runs in one process, not {processes}. Run it in one, and the recipe "
                "that it writes in all."
            )
        limit = next(
            (
                {unit: float(budget.removesuffix(unit))}
                for unit in ("bits", "kl")
                if budget.endswith(unit) and _NUMBER.fullmatch(budget.removesuffix(unit))
            ),
            None,
        )
        if limit is None:
            raise OptionError(expected("--budget", "a number as in 5.0bits or 0.02kl", budget))
        names = SCHEMES if schemes is None else tuple(filter(None, schemes.split(",")))
        return Asked(limit, names)

    def with_method(self, recipe: Recipe, path: Path | None, options: Mapping[str, Any]) -> Recipe:
        """Return a recipe with the method of `allocate`, unless something says another one.

        Args:
            recipe: as it was read.
            path: of its file.
            options: fields of `LinearConfig` that are given.
        """
        data = {} if path is None else parse_file(path)
        data = data.get("recipe", data) if isinstance(data, Mapping) else {}
        says = "method" in options or "method" in data or recipe.quality is not None
        return recipe if says else recipe.override({"method": "sse"})

    def recipes(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe of a whole model in each scheme that quantizes."""
        known = [name for name in self.schemes if name.partition(":")[0] in known_schemes()]
        return [recipe.override({"fmt": name}) for name in known] or [recipe]

    def allocate(
        self,
        model: Any,
        recipe: Recipe,
        found: Sequence[Example] | None,
        tokenizer: Any,
        text: OwnText,
    ) -> Allocation:
        """Return the choice for a model.

        found: the windows of the data; None to have it write `text`.
        """
        data = None if found is None else collate(found, 1, config=model.config)
        if found is None and text != OwnText():
            numbers = {**vars(text), "samples": text.samples or 128}
            data = batches(None, tokenizer, model=model, batch_size=1, **numbers)
        given = recipe.arguments()
        for name in ("fmt", "weight_only", "block", "kv_cache"):
            given.pop(name, None)
        given |= {**self.limit, "schemes": self.schemes}
        return allocate(model, data=data, tokenizer=tokenizer, **given)
