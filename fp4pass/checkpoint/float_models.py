"""Load float models, their configs and tokenizers, from a folder or a hub id."""

from __future__ import annotations

import functools
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from .._compat.accelerate import make_later
from .._compat.transformers import config_faults
from .._compat.transformers_loading import Later, Pending, made_later, other_tensors
from ..errors import CheckpointError, Fp4PassError, UnreadError, as_option, some
from .copied_files import LISTED, files_to_copy, part_folders
from .float_source import FloatSource, open_float_source
from .kept_source import keep_weights
from .layouts import LAYOUTS
from .opening import is_packed, open_checkpoint
from .unread import require_float, unread_names

_log = logging.getLogger(__name__)

# As the hub has names: an owner, which a few old ones lack, and the name.
_HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w(?:[\w.-]*\w)?", re.ASCII)


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Make what libraries raise for a missing or broken source one error, and have them quiet."""
    try:
        with _quietly():
            yield
    except Fp4PassError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Flags that transformers tells a program to pass are options here.
        if any("trust_remote_code" in line for line in lines):
            lines = [
                f"it has code of its own, which runs with {as_option('trust_remote_code', True)} "
                "only. Read it first."
            ]
        raise CheckpointError(f"{source}: {what} cannot be loaded: {lines[0]:.300}") from error


def load_config(source: str, trust: bool = False) -> Any:
    """Return the config of the float model of a folder or a hub id; `trust` runs its own code.

    A folder in FP8 is read as a float model.
    """
    _require_there(source)
    import transformers

    with reading(source, "the config"):
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust)
        except config_faults() as error:
            raise ValueError(str(error) or type(error).__name__) from error
    declared = getattr(config, "quantization_config", None)
    if open_float_source(source) is not None:
        config.__dict__.pop("quantization_config", None)
    elif declared is not None or is_packed(source):
        facts = declared if isinstance(declared, dict | None) else declared.to_dict()
        advice = _float_advice(source, facts)
        raise CheckpointError(f"{source} is quantized already: expected a float model. {advice}")
    return config


def _float_advice(source: str, declared: Mapping[str, Any] | None) -> str:
    """Return how to get a float model of a quantized one, whose config says `declared`."""
    if declared is not None and not any(each.detect(declared) for each in LAYOUTS.values()):
        method = declared.get("quant_method", "a method that it does not name")
        return f"fp4pass does not read weights of {method}; give the model it was made of."
    if not Path(source).is_dir():
        return "If its weights are nvfp4 or mxfp4, download it for fp4pass transcode --to bf16."
    try:
        open_checkpoint(source)
    except UnreadError as error:
        return str(error)
    except CheckpointError:
        # Damaged files raise when they are converted.
        pass
    return "To get a float model, run fp4pass transcode --to bf16."


def model_class(config: Any) -> Any:
    """Return the class that a config names, or that of any causal language model."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    kind: Any = getattr(transformers, names[0], None)
    known = hasattr(kind, "from_pretrained")
    return kind if known else transformers.AutoModelForCausalLM


def load_float(
    source: str,
    dtype: torch.dtype | str,
    device: str,
    trust: bool = False,
    *,
    merge_later: bool = False,
) -> Any:
    """Return the float model of a folder or a hub id, in eval mode, of the class of its config.

    merge_later: what transformers makes of tensors of the folder, as stacks of experts, is made
    where it is needed, and not kept; all else is mapped from the files, on the CPU in their dtype.
    """
    config, held = load_config(source, trust), open_float_source(source)
    kind = model_class(config)
    reads: Any = nullcontext()
    if held is None:
        # The error that loading it raises does not say which file is cut off either.
        require_float(Path(source))
    else:
        _log.info("%s", held.sentence)
        reads = other_tensors(lambda tensors: _in_float(held, tensors, merge_later))
    merging: Any = made_later() if merge_later else nullcontext({})
    with reading(source, "the model"), reads, merging as later:
        # Missing tensors, or those of another shape, would be random weights and a warning.
        loaded: Any = kind.from_pretrained(
            source,
            **({} if held is None else {"config": config}),
            dtype=dtype,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust,
        )
    model, found = loaded
    if unread := unread_names(sorted(found["unexpected_keys"])):
        # Its config does not say so, and a hub id has no folder to look into.
        raise UnreadError(
            f"{source} is quantized: expected a float model, got {some(unread)}, which fp4pass "
            "does not read. Give the model it was made of."
        )
    wrong = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if wrong:
        raise CheckpointError(
            f"{source} lacks {some(wrong)}, or has another shape than its config says. Copy it "
            "again."
        )
    by_module: dict[str, dict[str, Later]] = {}
    for name, made in later.items():
        owner, _, last = name.rpartition(".")
        by_module.setdefault(owner, {})[last] = made
    if held is not None:
        keep_weights(model, held)
    for owner, own in by_module.items():
        make_later(model.get_submodule(owner), own)
    return model.eval()


def _in_float(held: FloatSource, tensors: dict[str, Any], later: bool) -> dict[str, Any]:
    """Return what reads the tensors of a folder in FP8 as a float model; later: when needed."""
    found = held.dense(tensors)
    for name, weight in held.weights().items() if later else ():
        made = Later(functools.partial(weight.__getitem__, ...), weight.sources)
        found[name] = Pending(made, weight.get_shape(), torch.float32)
    return found


def load_tokenizer(source: str, trust: bool = False) -> Any:
    """Return the processor or tokenizer of a folder or a hub id, None if it has none."""
    _require_there(source)
    import transformers

    with reading(source, "the tokenizer"):
        if _has(source, "processor_config.json") or _has(source, "preprocessor_config.json"):
            return transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust)
        files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
        if any(_has(source, file) for file in files):
            return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    return None


def files_beside(source: str, globs: Sequence[str] = ()) -> Path:
    """Return the folder with the files of a folder or a hub id that `save` copies.

    Files that the cache lacks are downloaded. Raises OptionError for a glob of further files that
    matches none.
    """
    _require_there(source)
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        with reading(source, "what lies beside its weights"):
            # The hub tells large letters from small ones, and this list does not.
            names = [*LISTED, *map(str.lower, LISTED), "*.py", "*config.json", *globs]
            folder = Path(snapshot_download(source, allow_patterns=names))
            if parts := part_folders(folder):
                names = [
                    f"{part}{at}{name}"
                    for part, own in parts.items()
                    for name in own
                    for at in ("/", "/*/")
                ]
                snapshot_download(source, allow_patterns=names)
    files_to_copy(folder, globs)
    return folder


def text_tokenizer(processor: Any, source: str) -> Any:
    """Return what makes tokens of text. Raises CheckpointError without."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer, which text needs. Copy one beside it.")
    return tokenizer


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what transformers and the hub print off the screen."""
    import huggingface_hub
    import transformers

    loggings: Any = (huggingface_hub.logging, transformers.logging)
    before = [each.get_verbosity() for each in loggings]
    had_bars = transformers.logging.is_progress_bar_enabled()
    for each in loggings:
        each.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        for each, verbosity in zip(loggings, before, strict=True):
            each.set_verbosity(verbosity)
        if had_bars:
            transformers.logging.enable_progress_bar()


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
    """Raise CheckpointError for no folder; what can be no hub id is not looked for there."""
    path = Path(source)
    like_a_path = path.is_absolute() or source.startswith((".", "~")) or source.endswith("/")
    is_hub_id = _HUB_ID.fullmatch(source) and not like_a_path and not path.exists()
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

    require_hub(source, isinstance(try_to_load_from_cache(source, "config.json"), str))


def require_hub(name: str, is_cached: bool) -> None:
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
