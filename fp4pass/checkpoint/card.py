"""Write README.md of a folder: the model, its making, its errors, and how to load it."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.huggingface_hub import require_hub_library
from .._compat.torch import model_class
from .._version import __version__
from ..errors import OptionError, expected
from ..nn.kv_cache import KV_CACHE
from ..record.rows import Row, groups
from ..record.state import ModelState
from .source_files import MANIFEST

_log = logging.getLogger(__name__)

_NAME = "README.md"

# Keys of the float model's card that hold for the packed one, too.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")

# The commands by which each program that may read the folder loads or serves it.
_COMMANDS = {
    "vLLM": "vllm serve {name}",
    "SGLang": "python -m sglang.launch_server --model-path {name}",
}


@dataclass(frozen=True)
class Contents:
    """The facts of a folder that its card shows.

    Attributes:
        layout: the name of its layout.
        formats: the names of its formats.
        dense_bytes: what the packed weights took in the float model.
        readers: the programs that read it.
        read_by: words that say so, and why others do not.
    """

    layout: str
    formats: Sequence[str]
    dense_bytes: int
    readers: Sequence[str]
    read_by: str


@dataclass(frozen=True)
class Card:
    """The facts of a model that its card shows beside the report.

    Attributes:
        name: of its repository on a hub, or "".
        kind: the name of its class.
        source: the folder that it was made of, None if there is none.
        origin: the hub id of what it was made of, or "".
        evaluations: by the name of the text, as `fp4pass.evaluate` returned them.
        is_transformers: whether it is a model of transformers.
    """

    name: str
    kind: str
    source: Path | None
    origin: str
    evaluations: Mapping[str, Any]
    is_transformers: bool

    @staticmethod
    def of(
        root: nn.Module, given: object, source: Path | None, name: str, is_transformers: bool
    ) -> Card | None:
        """Return the card of a model as `save(card=)` asks for it, None without.

        Raises:
            OptionError: `given` is neither True, False nor evaluations by their texts.
            VersionError: huggingface_hub, which writes the header, is not installed.
        """
        if given is False:
            return None
        evaluations = {} if given is True else given
        if not isinstance(evaluations, Mapping) or not all(
            isinstance(getattr(each, "perplexity", None), float) for each in evaluations.values()
        ):
            wanted = 'True, False or evaluations as {"WikiText-2": fp4pass.evaluate(...)}'
            raise OptionError(expected("card", wanted, f"{given!r:.60}"))
        require_hub_library()
        kind = (model_class(root) if is_transformers else type(root)).__name__
        origin = _hub_id(str(getattr(root, "name_or_path", "") or ""))
        return Card(name, kind, source, origin, evaluations, is_transformers)

    def write(self, folder: Path, state: ModelState, contents: Contents) -> None:
        """Write the card of a folder that is complete but for it."""
        from huggingface_hub import ModelCard, ModelCardData

        there = self._header_of_source()
        base = self.origin
        if self.source is not None and (self.source / MANIFEST).is_file():
            # Packed already, of a model that its own card names.
            base = there.get("base_model") or ""
        inherited = {key: there[key] for key in _INHERITED if there.get(key)}
        if self.kind.endswith("ForCausalLM"):
            inherited.setdefault("pipeline_tag", "text-generation")
        header = ModelCardData(
            **inherited,
            base_model=base or None,
            base_model_relation="quantized" if base else None,
            library_name="transformers" if self.is_transformers else "fp4pass",
            tags=["fp4pass", *contents.formats, contents.layout],
            quantized_by="fp4pass",
        )
        body = "\n".join(self._body(folder, state, contents, base))
        if (folder / _NAME).is_file():
            _log.info("%s: the model card replaces that of %s", _NAME, base or self.source)
        card = ModelCard(f"---\n{header.to_yaml()}\n---\n\n{body}\n")
        (folder / _NAME).write_text(str(card), encoding="utf-8")

    def _header_of_source(self) -> dict[str, Any]:
        """Return what the card of the float model declares, {} if it has none that can be read."""
        if self.source is None or not (self.source / _NAME).is_file():
            return {}
        import yaml
        from huggingface_hub import ModelCard

        try:
            text = (self.source / _NAME).read_text(encoding="utf-8")
            if not text.startswith("---"):
                return {}
            return dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            _log.warning("%s: its header cannot be read: %s", self.source / _NAME, error)
            return {}

    def _body(
        self, folder: Path, state: ModelState, contents: Contents, base: str | Sequence[str]
    ) -> Iterator[str]:
        """Yield the lines below the header."""
        rows, skipped = state.report.converted, state.report.skipped
        names = [base] if isinstance(base, str) else [*base]
        made_of = ", ".join(f"[{one}](https://huggingface.co/{one})" for one in names if one)
        if not made_of:
            made_of = f"`{self.source.name}`" if self.source is not None else f"A {self.kind}"
        title = self.name.rpartition("/")[2]
        if not title:
            # Not the name of the folder, which may be given another one.
            whole = names[0] or (self.kind if self.source is None else self.source.name)
            title = f"{whole.rpartition('/')[2]} in {' and '.join(contents.formats)}"
        yield f"# {title}\n"
        counts = f"{len(rows)} of {len(rows) + len(skipped)} weights"
        yield f"{made_of} in 4-bit floating point. fp4pass packed {counts}."
        if any(names):
            yield "\nSee the card of the base model for its uses and limits."
        yield "\n## How it was made\n"
        yield from _table(("", ""), _facts(state, contents.layout))
        yield "\n## Measured\n"
        yield from _table(
            ("scheme", "method", "weights", "bits each", "weight error", "output error"),
            map(_group, groups(rows)),
        )
        yield (
            "\nErrors are means over the weights: |W - Q| / |W|, and |(W - Q) x| / |W x| on the "
            "calibration inputs."
        )
        yield f"\n{_sizes(folder, rows, contents.dense_bytes)}"
        if self.evaluations:
            yield ""
            yield from _table(
                ("text", "tokens", "perplexity", "KL to the original", "same top token"),
                (
                    (
                        name,
                        f"{found.tokens:,}",
                        f"{found.perplexity:.2f}",
                        "-" if found.kl is None else f"{found.kl:.4f} nats a token",
                        "-" if found.top1 is None else f"{100 * found.top1:.1f} %",
                    )
                    for name, found in self.evaluations.items()
                ),
            )
        if skipped:
            reasons = Counter(row.skip_reason for row in skipped)
            yield "\nNot packed:\n"
            yield from _table(
                ("weights", "reason"), ((str(n), why) for why, n in reasons.most_common())
            )
        yield f"\n## Load and serve\n\nThe folder is {contents.read_by}.\n"
        yield from self._usage(contents.readers)

    def _usage(self, readers: Sequence[str]) -> Iterator[str]:
        """Yield how to load the folder in each program that reads it."""
        name = self.name or "path/to/this/folder"
        where = f'snapshot_download("{name}")' if self.name else f'"{name}"'
        model = "" if self.is_transformers else f", model=model)  # a float {self.kind}"
        yield "```python\nimport fp4pass"
        if self.name:
            yield "from huggingface_hub import snapshot_download"
        yield f"\nmodel = fp4pass.load({where}{model or ')'}"
        if "transformers" in readers:
            yield (
                "\n# Or, dequantized, with transformers and compressed-tensors:\n"
                f"import transformers\n\nmodel = transformers.{self.kind}.from_pretrained("
                f'"{name}")'
            )
        yield "```"
        commands = [line for reader, line in _COMMANDS.items() if reader in readers]
        if commands:
            yield "\n```sh\nfp4pass serve path/to/this/folder"
            yield from (line.format(name=name) for line in commands)
            yield "```"


def _hub_id(name: str) -> str:
    """Return the id of a repository that a model was read from, "" for a folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    parts = Path(name).parts
    if "snapshots" in parts:
        # A folder of the cache: models--user--name/snapshots/commit.
        stored = parts[parts.index("snapshots") - 1]
        return stored.removeprefix("models--").replace("--", "/") if "--" in stored else ""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return ""
    return "" if Path(name).exists() or "/" not in name else name


def _facts(state: ModelState, layout: str) -> Iterator[tuple[str, str]]:
    """Yield how a model was quantized, as rows of a table."""
    recipe = state.recipe
    configs = [row.config for row in state.report.converted if row.config is not None]
    if "quality" in recipe:
        yield "quality", _words(recipe["quality"])
    yield "scheme", "; ".join(sorted({f"{c.label}, a scale for {c.format.tile}" for c in configs}))
    yield "method", ", ".join(sorted({config.method_name for config in configs}))
    if seen := recipe.get("calibration"):
        count = seen.get("batches")
        batches = f" in {count} batch{'es' * (count > 1)}" if count else ""
        order = ", one layer after the other" if seen.get("sequential") else ""
        yield "calibration", f"{seen.get('tokens', 0):,} tokens{batches}{order}"
    else:
        yield "calibration", "none"
    if recipe.get("rules"):
        yield "rules", _words(recipe["rules"])
    if recipe.get(KV_CACHE):
        yield "key-value cache", str(recipe[KV_CACHE])
    yield "layout", layout
    versions = f"fp4pass {__version__}, torch {torch.__version__}"
    with suppress(PackageNotFoundError):
        versions += f", transformers {version('transformers')}"
    yield "versions", versions


def _words(value: object) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value)}`"


def _group(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return weights with equal options as a row of a table."""
    config = rows[0].config
    if config is None:
        return ("",) * 6
    sizes = [math.prod(row.shape) for row in rows]
    bits = sum(row.bits * n for row, n in zip(rows, sizes, strict=True)) / sum(sizes)
    errors = ([row.weight_error for row in rows], [row.output_error for row in rows])
    shown = (config.label, config.method_name)
    return (*shown, str(len(rows)), f"{bits:.2f}", *map(_percent, errors))


def _percent(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f} %" if len(known) == len(values) else "-"


def _sizes(folder: Path, rows: Sequence[Row], dense: int) -> str:
    """Return the sentence of how much smaller the weights are."""
    after = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    packed = sum(row.bits * math.prod(row.shape) / 8 for row in rows)
    before = after - packed + dense
    return (
        f"Weights take {after / 1e6:,.1f} MB, {after / before:.0%} of the {before / 1e6:,.1f} MB "
        "of the float model."
    )


def _table(header: Sequence[str], rows: Iterator[Sequence[str]] | Any) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
