"""Load float models, their configs and tokenizers, from a folder or a hub id.

A folder in FP8 is read as the float model that it stands for: weight * scale, in float32.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .._compat.accelerate import make_later
from .._compat.transformers import config_faults
from .._compat.transformers_loading import Later, Pending, made_later, names_in_model, other_tensors
from ..core.quant_state import QuantState
from ..errors import CheckpointError, Fp4PassError, UnreadError, as_option, some
from ..nn.experts import ExpertStack, stacks_of
from ..nn.linear import INPUT_GLOBAL, PACKED, SCALE
from ..quantization.plan import KeptWeight, keep_weight
from .beside import LISTED, files_to_copy, part_folders
from .layouts import CACHE_SCALES, LAYOUTS, PackedLayer, Piece, join, join_layers
from .model_layers import stacks_in, whole_record
from .reader import CheckpointReader, is_packed, open_checkpoint, packed_problem
from .source_files import opened, require_float, unread_names

_log = logging.getLogger(__name__)

# As the hub has names: an owner, which a few old ones lack, and the name.
_HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w(?:[\w.-]*\w)?", re.ASCII)


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Make what libraries raise for a missing or broken source one error, and have them quiet."""
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
    finally:
        for each, verbosity in zip(loggings, before, strict=True):
            each.set_verbosity(verbosity)
        if had_bars:
            transformers.logging.enable_progress_bar()


def load_config(source: str, trust: bool = False) -> Any:
    """Return the config of a float model, an FP8 folder too; `trust` runs its own code."""
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
        advice = "To get a float model, run fp4pass transcode --to bf16 on its folder."
        if facts is not None and not any(each.detect(facts) for each in LAYOUTS.values()):
            method = facts.get("quant_method", "a method that it does not name")
            advice = f"fp4pass does not read weights of {method}; give the model it was made of."
        raise CheckpointError(f"{source} is quantized already: expected a float model. {advice}")
    return config


def model_class(config: Any) -> Any:
    """Return the class that a config names, or that of any causal language model."""
    import transformers

    (name, *_) = getattr(config, "architectures", None) or [""]
    kind: Any = getattr(transformers, name, None)
    return kind if hasattr(kind, "from_pretrained") else transformers.AutoModelForCausalLM


def load_float(
    source: str,
    dtype: torch.dtype | str,
    device: str,
    trust: bool = False,
    *,
    merge_later: bool = False,
) -> Any:
    """Return the float model of a folder or a hub id, in eval mode, of the class of its config."""
    # merge_later: what transformers makes of tensors of the folder, as stacks of experts, is made
    # where it is needed, and not kept; all else is mapped from the files, on the CPU in their
    # dtype.
    config, held = load_config(source, trust), open_float_source(source)
    kind = model_class(config)
    reads: Any = nullcontext()
    if held is None:
        # The error that loading it raises does not say which file is cut off either.
        require_float(Path(source))
    else:
        _log.info("%s", held.sentence)
        reads = other_tensors(lambda tensors: held.dense(tensors, merge_later))
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
    if held is not None:
        _keep_weights(model, held)
    by_module: dict[str, dict[str, Later]] = {}
    for name, made in later.items():
        owner, _, last = name.rpartition(".")
        by_module.setdefault(owner, {})[last] = made
    for owner, own in by_module.items():
        make_later(model.get_submodule(owner), own)
    return model.eval()


@dataclass(frozen=True)
class FloatSource:
    """A folder whose packed weights are all 8-bit floats, as a float model."""

    reader: CheckpointReader

    @property
    def sentence(self) -> str:
        """The line that says which layers are read, and how."""
        layers = self.reader.layers.values()
        schemes = " and ".join(sorted({layer.scheme for layer in layers}))
        return (
            f"{self.reader.folder}: {len(layers)} layers in {schemes} ({self.reader.layout.name}) "
            "are read as weight * scale in float32"
        )

    def weights(self) -> dict[str, Fp8Weight]:
        """Return each packed weight, by the name that it has in a folder of the float model."""
        return {join(name, "weight"): Fp8Weight(self.reader, name) for name in self.reader.layers}

    def dense(self, tensors: Mapping[str, Any], later: bool = False) -> dict[str, Any]:
        """Return the tensors of the float model, or what reads them; `later`, what makes them."""
        found: dict[str, Any] = {
            disk: tensors[disk]
            for name in self.reader.plain()
            if (disk := self.reader.on_disk.get(name, name)) in tensors
            and not name.endswith(CACHE_SCALES)
        }
        for name, weight in self.weights().items():
            found[name] = weight
            if later:
                made = Later(functools.partial(weight.__getitem__, ...), weight.sources)
                found[name] = Pending(made, weight.get_shape(), torch.float32)
        return found


class Fp8Weight:
    """A weight in FP8; indexed as a slice of safetensors, it is the dense weight in float32."""

    def __init__(self, reader: CheckpointReader, layer: str) -> None:
        self.reader, self.layer, self.record = reader, layer, reader.layers[layer]

    @property
    def sources(self) -> list[Tensor]:
        """The codes, mapped from the file."""
        name = self.reader.names(self.layer)[PACKED]
        with opened(self.reader.files[name]) as file:
            return [file.get_tensor(self.reader.on_disk.get(name, name))]

    def states(self) -> list[QuantState]:
        """Return codes and scales, of one matrix. Raises CheckpointError for other numbers."""
        parts = self.reader.parts(self.layer, (PACKED, SCALE))
        return _states(self.record, parts[PACKED], parts[SCALE])

    def input_scales(self) -> tuple[float, ...]:
        """Return the one scale of inputs, () where each token has its own."""
        if not self.record.static_inputs:
            return ()
        scale = self.reader.parts(self.layer, (INPUT_GLOBAL,))[INPUT_GLOBAL]
        return () if scale is None else (scale.item(),)

    def get_shape(self) -> list[int]:
        """Return the shape of the dense weight."""
        return list(self.record.shape)

    def get_dtype(self) -> str:
        """Return the dtype of what indexing returns, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self.reader.dense(self.layer, torch.float32)[index]


def open_float_source(source: str) -> FloatSource | None:
    """Return a folder whose weights are 8-bit floats as a float model, None for any other."""
    folder = Path(source)
    if not folder.is_dir() or not is_packed(folder, known=True):
        return None
    reader = open_checkpoint(folder)
    # transformers has no single layers where the float model has a stack.
    is_read = reader.layout.engines and not reader.said("whole")
    layers = reader.layers.values()
    if not is_read or not all(layer.fmt.element.native for layer in layers):
        return None
    return FloatSource(reader)


def _states(layer: PackedLayer, codes: Tensor | None, scales: Tensor | None) -> list[QuantState]:
    """Return the codes and scales of a matrix, or those of each expert."""
    assert codes is not None and scales is not None, "open_checkpoint requires both"
    bits, dtype = scales.view(layer.fmt.scale.dtype), getattr(torch, layer.weight_dtype)
    pairs = zip(codes, bits, strict=True) if layer.is_stacked else [(codes, bits)]
    return [QuantState(own, each, 1.0, layer.fmt, layer.shape[-2:], dtype) for own, each in pairs]


def _keep_weights(model: Any, source: FloatSource) -> None:
    """Have the layers and stacks of a model know the FP8 codes that their weights are made of."""
    reader, weights, modules = source.reader, source.weights(), dict(model.named_modules())
    for disk, name in names_in_model(model, weights).items():
        module, weight = modules.get(name.removesuffix(".weight")), weights[disk]
        if type(module) is nn.Linear:
            key = weight.record.fmt.key
            kept = KeptWeight(key, key, weight.states, weight.input_scales)
            keep_weight(module, "weight", kept)
    stacks = stacks_in(model, reader.layers)
    for path, owner in modules.items():
        for key, stack in stacks_of(owner).items() if stacks else ():
            if pieces := stacks.get(join(path, key)):
                kept = _kept_stack(reader, join(path, key), pieces, stack)
                keep_weight(stack.holder, stack.last, kept)


def _kept_stack(
    reader: CheckpointReader, name: str, pieces: Sequence[Piece], stack: ExpertStack
) -> KeptWeight:
    """Return what a stack is made of; one of tensor scales has a scale for each row."""
    records = {piece.name: reader.layers[piece.name] for piece in pieces}
    first, problem = records[pieces[0].name], ""
    whole = whole_record(first, stack)

    def joined(*parts: str) -> tuple[PackedLayer, dict[str, Tensor]]:
        state = {}
        for piece in records:
            names = {disk: part for part, disk in reader.names(piece).items() if part in parts}
            for disk, tensor in reader.checked(names):
                part, of = names[disk], (piece, names[disk], records[piece])
                # One that calibration never reached has no scale of inputs.
                if part != INPUT_GLOBAL or not packed_problem(part, tensor, records[piece]):
                    state[join(piece, part)] = reader.decoded(disk, tensor, of)
        return join_layers(name, pieces, records, whole, state)

    try:
        record, _ = joined()
    except UnreadError as error:
        record, problem = whole, str(error).partition(". ")[0].removeprefix(f"{name}: ")

    def states() -> list[QuantState]:
        record, parts = joined(PACKED, SCALE)
        return _states(record, parts[join(name, PACKED)], parts[join(name, SCALE)])

    def input_scales() -> tuple[float, ...]:
        record, parts = joined(INPUT_GLOBAL)
        scale = parts.get(join(name, INPUT_GLOBAL)) if record.static_inputs else None
        return () if scale is None else tuple(scale.tolist())

    return KeptWeight(first.fmt.key, record.fmt.key, states, input_scales, problem)


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
    """Return the folder of what `save` copies of a folder or a hub id, downloaded if need be."""
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
    if path.suffix == ".gguf":
        raise CheckpointError(f"{source} is GGUF. Expected a folder or a hub id of a float model.")
    if path.is_dir():
        return
    like_a_path = path.is_absolute() or source.startswith((".", "~")) or source.endswith("/")
    if like_a_path or path.exists() or not _HUB_ID.fullmatch(source):
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
