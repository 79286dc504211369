"""fp4pass report: one page about a quantized model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .. import float_models
from ..api import convert
from ..checkpoint.opening import is_packed, open_checkpoint
from ..core.plain_files import parse_json
from ..errors import OptionError, expected
from ..quantization.recipe import Recipe
from ..reporting.data import gather, require_rows
from ..reporting.text import size
from ..reporting.write import require_free, write_page
from . import screen, sources
from .calibrating import calibrated, one_call, read_examples, require_context
from .evaluate import measure_texts, read_texts
from .options import (
    BatchSize,
    Device,
    EachWindows,
    QualityName,
    Texts,
    TrustCode,
    flag,
    read_recipe,
    with_config_options,
)


@with_config_options
def report(
    source: Annotated[
        str,
        Argument(
            help="A folder with packed weights, or a float model (a folder or a hub id), which is "
            "converted in memory.",
            metavar="DIR|MODEL",
        ),
    ],
    output: Annotated[
        Path, Option("--output", "-o", help="The page to write.", metavar="FILE.html")
    ],
    reference: Annotated[
        str | None,
        Option(
            help="The original, to compare scales, sizes and outputs with.",
            metavar="MODEL",
            show_default="MODEL itself",
        ),
    ] = None,
    text: Texts = None,
    windows: EachWindows = None,
    length: Annotated[int, Option(help="Tokens per window.")] = 512,
    evaluation: Annotated[
        Path | None,
        Option(help="Output of fp4pass eval --json, instead of --text.", metavar="FILE"),
    ] = None,
    rules: Annotated[
        Path | None,
        Option(help="For a float model: a recipe or a list of rules; options override it."),
    ] = None,
    quality: QualityName = None,
    calib: Annotated[str | None, Option(help="Calibration data.", metavar="FILE|DATASET")] = None,
    samples: Annotated[int, Option(help="Calibration windows.")] = 128,
    batch_size: BatchSize = 8,
    device: Device = None,
    trust_remote_code: TrustCode = False,
    png: Annotated[bool, Option(help="Also write the charts as PNG files.")] = True,
    overwrite: Annotated[bool, Option(help="Replace the page and the files beside it.")] = False,
    as_json: screen.Json = False,
    *,
    config_options: dict[str, Any],
) -> None:
    """Write one page about a quantized model: sizes, errors, scales, perplexity, recipe.

    The page needs no network. Its numbers are written beside it as JSON, its charts as PNG. The
    options from --scheme to --compute, --rules, --quality and --calib are for a float model.
    """
    if batch_size < 1:
        raise OptionError(expected("--batch-size", "at least 1", batch_size))
    if text and evaluation:
        raise OptionError("Give --text or --evaluation, not both.")
    rows = [] if evaluation is None else _read_evaluation(evaluation)
    require_free(output, png, overwrite)
    chosen, packed = sources.choose_device(device), is_packed(source)
    trust = trust_remote_code
    tokenizer: Any = None
    if text:
        tokenizer = float_models.text_tokenizer(float_models.load_tokenizer(source, trust), source)
    texts = read_texts(text or (), windows, length, tokenizer)
    if packed:
        if config_options or rules or calib or quality:
            given = [flag(name) for name in config_options] + ["--quality"] * bool(quality)
            given += ["--rules"] * bool(rules) + ["--calib"] * bool(calib)
            raise OptionError(
                f"{source} is quantized already. Leave out {', '.join(given)}, for a float model."
            )
        # A damaged folder is refused before a text is read.
        open_checkpoint(Path(source))
        model: Any = sources.load_any(source, chosen, trust) if texts else source
    else:
        recipe = read_recipe(rules, quality, config_options)
        model = _convert(source, recipe, calib, samples, length, batch_size, chosen, trust)
        reference = reference or source
    # A folder is read tensor by tensor; a model that runs, or comes from a hub, is loaded.
    original: Any = reference
    if reference is not None and (texts or not Path(reference).is_dir() or is_packed(reference)):
        original = float_models.load_float(reference, "auto", chosen, trust)
    if texts:
        options = {"window": length, "windows": windows, "batch_size": batch_size}
        measured = measure_texts(model, original, tokenizer, texts, **options)
        rows = [found.row(spec, before) for spec, found, before in measured]
    data = gather(
        source if packed else model,
        name=source,
        reference=original,
        reference_name=reference or "",
        evaluations=rows,
    )
    files = write_page(data, output, png)
    if as_json:
        screen.print_json(data)
    else:
        _print(data, files)


def _read_evaluation(path: Path) -> list[dict[str, Any]]:
    """Read the texts of what `fp4pass eval --json` printed."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}.") from error
    texts = data.get("texts") if isinstance(data, Mapping) else None
    if not texts:
        raise OptionError(
            f"{path} holds no perplexity. Expected what fp4pass eval DIR --text FILE --json prints."
        )
    require_rows(path, texts)
    return texts


def _convert(
    source: str,
    recipe: Recipe,
    calib: str | None,
    samples: int,
    length: int,
    batch_size: int,
    device: str,
    trust: bool,
) -> Any:
    """Convert a float model in memory by a recipe."""
    # First, so that a name that is no model gets that error and not one about calibration.
    model_config = float_models.load_config(source, trust)
    for config in recipe.configs():
        if calib is None and config.needs:
            raise OptionError(
                f"{source} is a float model, and method {config.method_name!r} needs calibration "
                "text. Give --calib FILE, choose --method sse, or report on the folder that "
                f"fp4pass quantize {source} -o DIR writes."
            )
    read = None
    if calib is not None:
        sources.require_windows(length=length, samples=samples)
        require_context(model_config, length, "--length")
        processor = float_models.load_tokenizer(source, trust)
        float_models.text_tokenizer(processor, source)
        read = read_examples(calib, processor, model_config, samples=samples, seq_len=length)
    model = float_models.load_float(source, "auto", device, trust)
    # Wrong rules are refused before the calibration.
    call = one_call(model, recipe)
    with calibrated(call, read, batch_size) as arguments:
        convert(model, **arguments)
    call.record()
    return model


def _print(data: Mapping[str, Any], files: list[Path]) -> None:
    page = next(path for path in files if path.suffix != ".json")
    summary = data["summary"]
    print(
        f"{page}: {summary['layers']} layers at {summary['bits_per_weight']:.2f} bits, "
        f"{size(summary['bytes'])}, {summary['share']:.0%} of "
        f"{size(summary['bytes_before'])} before"
    )
    others = [path.name for path in files if path != page]
    print(f"beside it: {', '.join(others)}")
