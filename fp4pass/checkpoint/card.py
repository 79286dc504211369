"""The model card of a folder."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .._compat import require
from .._compat.torch import model_class
from .._version import __version__
from ..errors import OptionError, expected
from ..record.state import ModelState
from .model_layers import is_transformers
from .readers import Readers
from .source_files import MANIFEST

_log = logging.getLogger(__name__)

_NAME = "README.md"

# Keys of the float model's card that hold for the packed one, too.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")


def check_card(given: Any) -> Mapping[str, Any] | None:
    """Return the evaluations of the card that is asked for, None for none. Raises OptionError."""
    if given is False:
        return None
    require("huggingface_hub")
    found: Any = {} if given is True else given
    if isinstance(found, Mapping) and all(hasattr(x, "perplexity") for x in found.values()):
        return found
    wanted = 'True, False or evaluations as {"WikiText-2": fp4pass.evaluate(...)}'
    raise OptionError(expected("card", wanted, f"{given!r:.60}"))


def write_card(
    folder: Path,
    root: nn.Module,
    state: ModelState,
    layout: str,
    readers: Readers,
    evaluations: Mapping[str, Any],
    source: Path | None,
) -> None:
    """Write the card of a folder, complete but for it."""
    from huggingface_hub import ModelCard, ModelCardData

    report, kind = state.report, model_class(root).__name__
    there, base = _header_of(source), _hub_id(root)
    if source is not None and (source / MANIFEST).is_file():
        # Packed already, of a model that its own card names.
        base = there.get("base_model") or ""
    inherited = {key: there[key] for key in _INHERITED if there.get(key)}
    if kind.endswith("ForCausalLM"):
        inherited.setdefault("pipeline_tag", "text-generation")
    formats = sorted({row.config.fmt for row in report.converted if row.config})
    header = ModelCardData(
        **inherited,
        base_model=base or None,
        base_model_relation="quantized" if base else None,
        library_name="transformers" if is_transformers(root) else "fp4pass",
        tags=["fp4pass", *formats, layout],
        quantized_by="fp4pass",
    )
    whole = base or (kind if source is None else source.name)
    made_of = f"[{base}](https://huggingface.co/{base})" if base else f"`{whole}`"
    title = f"{whole.rpartition('/')[2]} in {' and '.join(formats)}"
    kinds = Counter((x.config.label, x.config.method_name) for x in report.converted if x.config)
    counts = f"{len(report.converted)} of {len(report.rows)} weights"
    recipe = {k: each for k, each in state.recipe.items() if each not in (None, [], {})}
    means = [
        f"{what} {100 * sum(known) / len(known):.2f} %"
        for what, values in (
            ("weight error", [row.weight_error for row in report.converted]),
            ("output error", [row.output_error for row in report.converted]),
        )
        if (known := [value for value in values if value is not None])
    ]
    where = "path/to/this/folder"
    model = ")" if is_transformers(root) else f", model=model)  # a float {kind}"
    commands = readers.commands(where)
    lines = [
        f"# {title}\n",
        f"{made_of} in 4-bit floating point. fp4pass {__version__} packed {counts}.\n",
        *(f"- {n} in {label}, by {method}" for (label, method), n in kinds.items()),
        *(f"- {n} not: {why}" for why, n in Counter(r.skip_reason for r in report.skipped).items()),
        *([f"- means over layers: {', '.join(means)}"] if means else []),
        *(f"- {text}: {_evaluation(found)}" for text, found in evaluations.items()),
        f"\n```json\n{json.dumps(recipe, indent=1)}\n```\n",
        f"The layout is {layout}, {readers}.\n",
        f'```python\nimport fp4pass\n\nmodel = fp4pass.load("{where}"{model}\n```',
        *(["\n```sh", *commands, "```"] if commands else []),
    ]
    if (folder / _NAME).is_file():
        _log.info("%s: the model card replaces that of %s", _NAME, base or source)
    text = "\n".join(lines)
    card = ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}\n")
    (folder / _NAME).write_text(str(card), encoding="utf-8")


def _hub_id(root: nn.Module) -> str:
    """Return the id of the repository that a model was read from, "" for a folder."""
    path = Path(str(getattr(root, "name_or_path", "") or ""))
    if "snapshots" in path.parts:
        # A folder of the cache: models--user--name/snapshots/commit.
        stored = path.parts[path.parts.index("snapshots") - 1]
        return stored.removeprefix("models--").replace("--", "/")
    return "" if path.exists() or len(path.parts) != 2 else path.as_posix()


def _header_of(source: Path | None) -> dict[str, Any]:
    """Return what the card of the float model declares, {} if it has none that can be read."""
    if source is None or not (source / _NAME).is_file():
        return {}
    import yaml
    from huggingface_hub import ModelCard

    try:
        text = (source / _NAME).read_text(encoding="utf-8")
        card = ModelCard(text, ignore_metadata_errors=True)
        return dict(card.data.to_dict()) if text.startswith("---") else {}
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        _log.warning("%s: its header cannot be read: %s", source / _NAME, error)
        return {}


def _evaluation(found: Any) -> str:
    kl = "" if found.kl is None else f", KL to the original {found.kl:.4f} nats a token"
    top = "" if found.top1 is None else f", same top token {100 * found.top1:.1f} %"
    return f"perplexity {found.perplexity:.2f} of {found.tokens:,} tokens{kl}{top}"
