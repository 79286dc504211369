"""Write the model card of a folder, and upload the folder to Hugging Face."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._compat.huggingface_hub import hub_faults, require_hub_library
from .._compat.torch import model_class
from .._version import __version__
from ..errors import CheckpointError, OptionError, as_option, expected
from ..record.rows import Row, groups
from ..record.state import ModelState
from .model_layers import is_transformers
from .readers import Readers
from .source_files import MANIFEST

_log = logging.getLogger(__name__)

_NAME = "README.md"

# Keys of the float model's card that hold for the packed one, too.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")

# The commands by which each program that may read the folder serves it.
_COMMANDS = {
    "vLLM": "vllm serve {name}",
    "SGLang": "python -m sglang.launch_server --model-path {name}",
}


@dataclass(frozen=True)
class Card:
    """The facts of a model that its card shows beside the report.

    Attributes:
        name: of its repository on the hub, or "".
        kind: the name of its class.
        library: the library of its class, "transformers" or "fp4pass".
        source: the folder that it was made of, None if there is none.
        origin: the hub id of what it was made of, or "".
        evaluations: by the name of the text, as `fp4pass.evaluate` returned them.
    """

    name: str
    kind: str
    library: str
    source: Path | None
    origin: str
    evaluations: Mapping[str, Any]

    @staticmethod
    def of(root: nn.Module, given: Any, source: Path | None, name: str) -> Card | None:
        """Return the card that `save(card=)` asks for. Raises OptionError for what is none."""
        if given is False:
            return None
        evaluations = {} if given is True else given
        if not isinstance(evaluations, Mapping) or not all(
            hasattr(each, "perplexity") for each in evaluations.values()
        ):
            wanted = 'True, False or evaluations as {"WikiText-2": fp4pass.evaluate(...)}'
            raise OptionError(expected("card", wanted, f"{given!r:.60}"))
        require_hub_library()
        path = Path(str(getattr(root, "name_or_path", "") or ""))
        origin = "" if path.exists() or len(path.parts) != 2 else path.as_posix()
        if "snapshots" in path.parts:
            # A folder of the cache: models--user--name/snapshots/commit.
            stored = path.parts[path.parts.index("snapshots") - 1]
            origin = stored.removeprefix("models--").replace("--", "/")
        library = "transformers" if is_transformers(root) else "fp4pass"
        kind = model_class(root).__name__
        return Card(name, kind, library, source, origin, evaluations)

    def write(self, folder: Path, state: ModelState, layout: str, readers: Readers) -> None:
        """Write the card of a folder that is complete but for it."""
        from huggingface_hub import ModelCard, ModelCardData

        there, base = self._header_of_source(), self.origin
        if self.source is not None and (self.source / MANIFEST).is_file():
            # Packed already, of a model that its own card names.
            base = there.get("base_model") or ""
        inherited = {key: there[key] for key in _INHERITED if there.get(key)}
        if self.kind.endswith("ForCausalLM"):
            inherited.setdefault("pipeline_tag", "text-generation")
        formats = sorted({row.config.fmt for row in state.report.converted if row.config})
        header = ModelCardData(
            **inherited,
            base_model=base or None,
            base_model_relation="quantized" if base else None,
            library_name=self.library,
            tags=["fp4pass", *formats, layout],
            quantized_by="fp4pass",
        )
        whole = base or (self.kind if self.source is None else self.source.name)
        made_of = f"[{base}](https://huggingface.co/{base})" if base else f"`{whole}`"
        # Not the name of the folder, which may be given another one.
        title = f"{whole.rpartition('/')[2]} in {' and '.join(formats)}"
        lines = [f"# {self.name.rpartition('/')[2] or title}", "", *self._body(made_of, state)]
        lines += ["", f"The layout is {layout}, {readers}.", "", *self._usage(readers.names)]
        if (folder / _NAME).is_file():
            _log.info("%s: the model card replaces that of %s", _NAME, base or self.source)
        card = ModelCard(f"---\n{header.to_yaml()}\n---\n\n{chr(10).join(lines)}\n")
        (folder / _NAME).write_text(str(card), encoding="utf-8")

    def _header_of_source(self) -> dict[str, Any]:
        """Return what the card of the float model declares, {} if it has none that can be read."""
        if self.source is None or not (self.source / _NAME).is_file():
            return {}
        import yaml
        from huggingface_hub import ModelCard

        try:
            text = (self.source / _NAME).read_text(encoding="utf-8")
            card = ModelCard(text, ignore_metadata_errors=True)
            return dict(card.data.to_dict()) if text.startswith("---") else {}
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            _log.warning("%s: its header cannot be read: %s", self.source / _NAME, error)
            return {}

    def _body(self, made_of: str, state: ModelState) -> Iterator[str]:
        """Yield how the model was made, and what was measured."""
        rows, skipped = state.report.converted, state.report.skipped
        counts = f"{len(rows)} of {len(rows) + len(skipped)} weights"
        yield f"{made_of} in 4-bit floating point. fp4pass {__version__} packed {counts}."
        facts = {key: each for key, each in state.recipe.items() if each not in (None, [], {})}
        yield from ("", "```json", json.dumps(facts, indent=1), "```", "")
        yield from _table(
            ("scheme", "method", "weights", "bits each", "weight error", "output error"),
            map(_group, groups(rows)),
        )
        yield "\nErrors are means of |W - Q| / |W|, and of |(W - Q) x| / |W x| on the calibration."
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
            yield ""
            yield from _table(("not packed", "reason"), ((str(n), w) for w, n in reasons.items()))

    def _usage(self, readers: Sequence[str]) -> Iterator[str]:
        """Yield how to load the folder in each program that reads it."""
        name = self.name or "path/to/this/folder"
        yield "```python\nimport fp4pass"
        if self.name:
            yield "from huggingface_hub import snapshot_download"
        where = f'snapshot_download("{name}")' if self.name else f'"{name}"'
        model = ")" if self.library == "transformers" else f", model=model)  # a float {self.kind}"
        yield f"\nmodel = fp4pass.load({where}{model}\n```"
        commands = [
            line.format(name=name) for reader, line in _COMMANDS.items() if reader in readers
        ]
        if commands:
            yield from ("", "```sh", *commands, "```")


def _group(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return weights with equal options as a row of a table."""
    config, sizes = rows[0].config, [math.prod(row.shape) for row in rows]
    bits = sum(row.bits * n for row, n in zip(rows, sizes, strict=True)) / sum(sizes)
    errors = ([row.weight_error for row in rows], [row.output_error for row in rows])
    shown = ("", "") if config is None else (config.label, config.method_name)
    return (*shown, str(len(rows)), f"{bits:.2f}", *map(_percent, errors))


def _percent(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f} %" if len(known) == len(values) else "-"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def require_repository(name: str, token: str | None = None) -> None:
    """Raise an error unless the hub can be asked for a repository, by somebody who is known there.

    Raises:
        OptionError: `name` is not that of a repository.
        CheckpointError: the hub cannot be reached, or does not know who asks.
    """
    require_hub_library()
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        wanted = 'the name of a repository, as "user/name"'
        raise OptionError(expected("push_to_hub", wanted, name)) from error
    if token is None and get_token() is None:
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: there is no token of Hugging Face here. Run `hf "
            "auth login`, or set HF_TOKEN. Nothing was written."
        )
    with _asking(name, "Nothing was written. Leave push_to_hub out to write the folder alone."):
        HfApi(token=token).whoami()


def upload(folder: Path, name: str, private: bool | None, token: str | None) -> None:
    """Upload a folder; a repository that does not exist is made. Raises CheckpointError."""
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="fp4pass", library_version=__version__)
    with _asking(name, f"The folder is whole: upload it with `hf upload {name} {folder}`."):
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=os.fspath(folder),
            commit_message=f"Upload a model that fp4pass {__version__} quantized",
        )


@contextmanager
def _asking(name: str, remedy: str) -> Iterator[None]:
    """Make what the hub and its library raise a CheckpointError that says what to do."""
    try:
        yield
    except hub_faults() as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: Hugging Face refuses or cannot be reached: "
            f"{lines[0].rstrip('.'):.300}. {remedy}"
        ) from error
