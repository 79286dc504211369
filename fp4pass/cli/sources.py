"""Models, tokenizers and texts by what a command line calls them."""

from __future__ import annotations

import itertools
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .._compat.transformers import config_faults
from ..checkpoint.layouts import LAYOUTS
from ..checkpoint.loading import load
from ..checkpoint.reader import is_packed
from ..checkpoint.safetensors_io import opened
from ..core.devices import require_device
from ..errors import CheckpointError, Fp4PassError, OptionError, expected
from ..evaluation import token_windows
from ..evaluation.computing import IN_FLOAT32, is_slow
from .screen import note, some

# A dataset is read until it has this many characters for each token that is wanted: four or five
# are usual, and windows are spread over what is left.
_CHARACTERS = 16

_DOCUMENT_LINE = "\n<|doc|>\n"


_SPLITS = ("train", "validation", "test")

# Files of rows, by what `datasets` calls their reader.
_TABLES = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Make what transformers and datasets raise for a missing or broken source one error."""
    try:
        yield
    except Fp4PassError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # What transformers tells a program to pass is an option here.
        if any("trust_remote_code" in line for line in lines):
            lines = ["it has code of its own, which runs with --trust-remote-code only. Read it."]
        raise CheckpointError(f"{source}: {what} cannot be loaded: {lines[0]:.300}") from error


def choose_device(name: str | None) -> str:
    """A device that is there: "auto" spreads a model over all, None is a GPU if there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "auto":
        require_device(name, "--device ")
    return name


def choose_dtype(name: str) -> torch.dtype | str:
    """A float dtype by its name, or "auto"."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in known:
        raise OptionError(f"--dtype {name} does not exist. Known: auto, {', '.join(known)}.")
    return known.get(name, name)


def load_config(source: str, trust: bool = False) -> Any:
    """The config of the float model of a folder or a hub id; `trust` lets its own code run."""
    _require_there(source)
    import transformers

    quiet()
    with reading(source, "the config"):
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust)
        except config_faults() as error:
            raise ValueError(str(error) or type(error).__name__) from error
    declared = getattr(config, "quantization_config", None)
    if declared is not None or is_packed(source):
        facts = declared if isinstance(declared, dict | None) else declared.to_dict()
        advice = "Make one of it with fp4pass convert --to bf16."
        if facts is not None and not any(each.detect(facts) for each in LAYOUTS.values()):
            method = facts.get("quant_method", "a method that it does not name")
            advice = f"fp4pass does not read weights of {method}; give the model it was made of."
        raise CheckpointError(f"{source} is quantized already: expected a float model. {advice}")
    return config


def model_class(config: Any) -> Any:
    """The class that a config names, or that of any causal language model."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    kind: Any = getattr(transformers, names[0], None)
    known = hasattr(kind, "from_pretrained")
    return kind if known else transformers.AutoModelForCausalLM


def load_float(source: str, dtype: torch.dtype | str, device: str, trust: bool = False) -> Any:
    """The float model of a folder or a hub id, in eval mode, by the class its config names."""
    kind = model_class(load_config(source, trust))
    for path in sorted(Path(source).glob("*.safetensors")):
        # The error that loading it raises does not say which file is cut off.
        with opened(path):
            pass
    with reading(source, "the model"):
        # What is missing or of another shape would only be a warning, with random weights there.
        loaded: Any = kind.from_pretrained(
            source,
            dtype=dtype,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust,
        )
    model, found = loaded
    wrong = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if wrong:
        raise CheckpointError(
            f"{source} lacks {some(wrong)}, or has another shape than its config says. Copy it "
            "again."
        )
    return model.eval()


def load_any(source: str, device: str, trust: bool = False) -> nn.Module:
    """The model of a folder with packed weights, or a float model."""
    if is_packed(source):
        quiet()
        with reading(source, "the model"):
            return load(source, device_map=device)
    return load_float(source, "auto", device, trust)


def note_dtype(what: str, *models: nn.Module | None) -> None:
    """Say so if one of the models computes in another dtype than that of its weights."""
    if any(model is not None and is_slow(model) for model in models):
        note(f"{what} {IN_FLOAT32}")


def load_tokenizer(source: str, trust: bool = False) -> Any:
    """The processor or tokenizer of a folder or a hub id, None if it has none."""
    _require_there(source)
    import transformers

    quiet()
    with reading(source, "the tokenizer"):
        if _has(source, "processor_config.json") or _has(source, "preprocessor_config.json"):
            return transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust)
        files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
        if any(_has(source, file) for file in files):
            return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    return None


def text_tokenizer(processor: Any, source: str) -> Any:
    """What makes tokens of text. Raises CheckpointError without."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer, which text needs. Copy one beside it.")
    return tokenizer


def quiet() -> None:
    """Keep what transformers and the hub print off the screen."""
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _has(source: str, file: str) -> bool:
    from transformers.utils import cached_file

    found = cached_file(
        source,
        file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found is not None


def _require_there(source: str) -> None:
    """A path is a folder; what can be no hub id is not looked for there."""
    path = Path(source)
    like_a_path = path.is_absolute() or source.startswith((".", "~")) or source.endswith("/")
    # A few old hub ids have no owner.
    is_hub_id = source and source.count("/") <= 1 and not like_a_path and not path.exists()
    is_gguf = path.suffix == ".gguf" or (
        not (path / "config.json").exists() and any(path.glob("*.gguf"))
    )
    if path.is_dir() and not is_gguf:
        return
    if is_gguf:
        raise CheckpointError(
            f"{source} is GGUF. Expected a folder or a hub id of a float model in the "
            "format of transformers."
        )
    if not is_hub_id:
        raise CheckpointError(f"{source} is not a folder. Expected a folder or a hub id.")
    from huggingface_hub import try_to_load_from_cache

    _require_hub(source, isinstance(try_to_load_from_cache(source, "config.json"), str))


def _require_hub(name: str, is_cached: bool) -> None:
    """Raise CheckpointError where a name that is no path cannot be asked for, without a wait."""
    from huggingface_hub import constants

    # Libraries would try for half a minute, once for each file. A proxy has its own ways.
    if is_cached or urllib.request.getproxies():
        return
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        port = hub.port or {"http": 80}.get(hub.scheme, 443)
        socket.create_connection((hub.hostname, port), timeout=5).close()
    except OSError as error:
        raise CheckpointError(
            f"{name}: there is no such file or folder here, and {constants.ENDPOINT} cannot be "
            f"asked for it: {error}. Correct the path, or connect to the network."
        ) from error


def read_text(spec: str, tokens: int | None = None) -> str:
    """The text of a file, or of `name[:config][:split]` of `datasets`.

    A file is plain text, in which a line `<|doc|>` separates documents, .jsonl with a "text" in
    each line, or a table that `datasets` reads. tokens: how many are wanted, None for all; only
    what `datasets` reads is read no further.
    """
    path = Path(spec)
    if path.is_file() and path.suffix not in _TABLES:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{spec} is not text in UTF-8: {error}. Write it in UTF-8, as with iconv -f "
                "ENCODING -t UTF-8; tables are read from .csv, .json and .parquet."
            ) from error
        return _DOCUMENT_LINE.join(_json_lines(spec, text)) if path.suffix == ".jsonl" else text
    like_a_file = path.suffix in (".txt", ".jsonl", ".md", *_TABLES)
    if not path.is_file() and (like_a_file or path.is_absolute() or spec.startswith(".")):
        if not Path(spec.partition(":")[0]).is_dir():
            raise OptionError(f"{spec} does not exist. Expected a file or the name of a dataset.")
    return _DOCUMENT_LINE.join(_dataset_texts(spec, tokens))


def _json_lines(spec: str, text: str) -> Iterator[str]:
    # Not splitlines: what else Unicode calls the end of a line may stand in a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            if not isinstance(document, str | None):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f'{spec}, line {number}: no JSON with a "text", as {{"text": "..."}}.'
            ) from error
        if document is not None:
            yield document


def _dataset_texts(spec: str, tokens: int | None) -> Iterator[str]:
    """The text of the rows of a dataset, streamed."""
    try:
        import datasets
    except ImportError as error:
        raise OptionError(
            f"{spec} is no file, and datasets are read by datasets: pip install 'fp4pass[cli]'."
        ) from error
    is_table = Path(spec).is_file()
    name, *rest = [spec] if is_table else spec.split(":")
    # One word after the name is a split if it is one of the usual.
    is_split = bool(rest) and (len(rest) > 1 or rest[0].partition("[")[0] in _SPLITS)
    split = rest.pop() if is_split else _SPLITS[0]
    if len(rest) > 1:
        raise OptionError(f"{spec}: a dataset is name[:config][:split].")
    options: dict[str, Any] = {"split": split, "streaming": True}
    if is_table:
        options["data_files"], name = name, _TABLES[Path(spec).suffix]
    elif not Path(name).exists():
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        _require_hub(name, (cache / name.replace("/", "___")).exists())
    datasets.disable_progress_bars()
    with reading(spec, "the dataset"):
        rows = iter(datasets.load_dataset(name, *rest, **options))
        first = next(rows, None)
        if first is None:
            raise OptionError(f"{spec} has no rows.")
        columns = [column for column, value in first.items() if isinstance(value, str)]
        if not columns:
            raise OptionError(f"{spec} has no column of text, only {', '.join(first)}.")
        column = "text" if "text" in columns else columns[0]
        if len(columns) > 1 and column != "text":
            note(f"{spec} has no column 'text': {column!r} is read, of {', '.join(columns)}.")
        characters = 0
        for row in itertools.chain([first], rows):
            text = str(row[column] or "")
            yield text
            characters += len(text)
            if tokens is not None and characters >= _CHARACTERS * tokens:
                return


def require_windows(**options: int) -> None:
    """Raise OptionError for tokens of a window and, after them, windows that are too few."""
    for (name, value), least in zip(options.items(), (2, 1), strict=True):
        if value < least:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(expected(flag, f"at least {least}", value))


def choose_windows(
    tokenizer: Any, spec: str, *, window: int, windows: int, seed: int | None = None
) -> Tensor:
    """Windows [windows, window] of a text, spread evenly or, with a seed, drawn at random."""
    ids = token_windows(tokenizer, read_text(spec, window * windows), window=window)
    if len(ids) < windows:
        note(f"{spec} has {len(ids)} windows of {window} tokens, {windows} were asked for.")
    if seed is None:
        return token_windows(tokenizer, ids, windows=windows)
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randperm(len(ids), generator=generator)[:windows]]
