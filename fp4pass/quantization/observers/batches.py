"""Run calibration batches through a prepared model."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..._compat.accelerate import offloaded_tensors
from ..._compat.torch import cpu_has_bfloat16, is_compiled
from ...core.fingerprint import digest_of
from ...core.progress import current
from ...distributed import require_initialized
from ...errors import CalibrationError, StateError, expected
from ...record.state import PreparedState, set_state, unwrap
from .visible_tokens import count_tokens

_log = logging.getLogger(__name__)

# The note for another dtype than that of the weights.
IN_FLOAT32 = "in float32: this CPU has no instructions for products in bfloat16"


def device_of(model: nn.Module) -> torch.device | None:
    """Return where the weights of a model are, None for one without any that are loaded."""
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if t.device.type != "meta"), None)


def require_batches(batches: object) -> None:
    """Raise CalibrationError unless the argument is an iterable of batches, and not one batch."""
    if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{expected('batches', 'an iterable of batches', type(batches).__name__)} Put a single "
            "batch into a list: calibrate(model, [batch])."
        )


def size_of(batch: Any) -> int:
    """Return the numbers in the first tensor of a batch: its tokens."""
    args, kwargs = call_arguments(batch, None)
    return next((x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), 1)


def require_loaded(root: nn.Module) -> None:
    """Raise StateError for weights without values that no hook brings."""
    empty = [name for name, each in root.named_parameters() if each.is_meta]
    missing = next((name for name in empty if name not in offloaded_tensors(root)), None)
    if missing is not None:
        raise StateError(
            f"{missing}: it is on the meta device, without values. Load the weights before "
            "calibrating, with accelerate's offloading if they do not fit."
        )


def run_batches(model: nn.Module, batches: Iterable[Any], state: PreparedState) -> None:
    """Run a prepared model on each batch, or the part that is recorded; note digest and number."""
    if model.training:
        warnings.warn(
            "The model is in training mode: dropout is on while it is calibrated. Call "
            "model.eval() first.",
            stacklevel=3,
        )
    require_batches(batches)
    require_initialized()
    root, device = unwrap(model), device_of(model)
    require_loaded(root)
    seen: dict[str, Any] = dict(state.recipe.get("calibration", {}))
    total = hidden = 0
    before = dict(seen)
    for i, batch in enumerate(current().each(batches, "batches")):
        require_tokens(model, batch, f"batch {i}")
        args, kwargs = call_arguments(batch, device)
        tokens, masked = count_tokens(root, args, kwargs)
        with torch.no_grad():
            if state.recording is not None:
                state.recording.run(root, args, kwargs)
            else:
                model(*args, **kwargs)
        seen["sha256"] = digest_of(seen.get("sha256", ""), args, kwargs)
        seen["batches"] = seen.get("batches", 0) + 1
        total, hidden = total + tokens, hidden + masked
        if masked:
            seen["hidden"] = seen.get("hidden", 0) + masked
        recipe = {**state.recipe, "calibration": dict(seen)}
        set_state(root, dataclasses.replace(state, recipe=recipe))
    if seen == before:
        raise CalibrationError("There are no batches to calibrate on: the iterable is empty.")
    if hidden:
        share = f"{hidden:,} of {total:,} tokens ({100 * hidden / total:.1f} %)"
        _log.info("calibrate: attention_mask hides %s, which enter no statistic.", share)


# Arguments beside token ids that leave them what they are; images replace some.
_BESIDE_TOKENS = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "labels"}


def require_tokens(model: nn.Module, batch: Any, name: str) -> None:
    """Raise CalibrationError for a batch of no tokens, or with one beyond the vocabulary."""
    args, kwargs = call_arguments(batch, None)
    ids = kwargs.get("input_ids", args[0] if len(args) == 1 else None)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return
    if not ids.numel():
        raise CalibrationError(f"{expected(name, 'tokens', f'{list(ids.shape)}')} Leave it out.")
    size = _vocabulary(model)
    if size is None or ids.is_meta or not kwargs.keys() <= _BESIDE_TOKENS:
        return
    low, high = (int(each) for each in ids.aminmax())
    if low < 0 or high >= size:
        wanted = f"tokens from 0 to {size - 1}, the vocabulary of the model"
        raise CalibrationError(
            f"{expected(name, wanted, low if low < 0 else high)} Give tokens of its own tokenizer."
        )


def _vocabulary(model: nn.Module) -> int | None:
    """Return how many rows the table of a model's tokens has, None where that is not known."""
    find: Any = getattr(unwrap(model), "get_input_embeddings", lambda: None)
    try:
        table = find()
    except (AttributeError, NotImplementedError):
        return None
    # One with modules of its own has further rows there.
    is_whole = isinstance(table, nn.Embedding) and not table._modules
    return table.num_embeddings if is_whole else None


def call_arguments(
    batch: Any, device: torch.device | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the arguments of a call, moved to `device`; one row of ids is a batch."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and device is not None else value

    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), {key: move(value) for key, value in batch.items()}
    if isinstance(batch, Tensor):
        is_row = batch.ndim == 1 and not batch.is_floating_point()
        return (move(batch[None] if is_row else batch),), {}
    if not isinstance(batch, tuple | list):
        kinds = "a mapping from names of arguments, a tuple, a list or a tensor"
        raise CalibrationError(expected("A batch", kinds, f"{batch!r:.60}"))
    return tuple(map(move, batch)), {}


@contextmanager
def fast_dtype(*models: nn.Module) -> Iterator[None]:
    """Have models compute in float32 where their CPU is slow in bfloat16 and float16.

    On return they are as they were, each tensor in its own memory; until then they take 4 bytes
    more for each number. See `is_slow` for the models that this is for.

    Args:
        *models: any modules.

    Example:
        >>> model = fp4pass.prepare(model)
        >>> with fp4pass.evaluation.fast_dtype(model):
        ...     model = fp4pass.calibrate(model, batches, progress=False)
    """
    slow = list(filter(is_slow, models))
    for model in slow:
        _log.info("%s computes %s", type(unwrap(model)).__name__, IN_FLOAT32)
    with in_float32(*slow):
        yield


@contextmanager
def in_float32(*models: nn.Module) -> Iterator[None]:
    """Have models compute in float32; on return they are as they were, as for `fast_dtype`."""
    kept = {id(tensor): (tensor, tensor.data) for model in models for tensor in _halves(model)}
    try:
        for tensor, data in kept.values():
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept.values():
            tensor.data = data


def is_slow(model: nn.Module) -> bool:
    """Return whether `fast_dtype` has a model compute in float32.

    It has weights in bfloat16 or float16, all of them on a CPU without instructions for products in
    bfloat16, and is a model of transformers, which computes in the dtype of its weights. Compiled
    and exported models keep their dtype.
    """
    root = unwrap(model)
    if not isinstance(getattr(root, "dtype", None), torch.dtype) or is_compiled(model):
        return False
    exported = any(isinstance(module, fx.GraphModule) for module in root.modules())
    on_cpu = all(tensor.is_cpu for tensor in (*root.parameters(), *root.buffers()))
    return on_cpu and not exported and bool(_halves(root)) and not cpu_has_bfloat16()


def _halves(model: nn.Module) -> list[Tensor]:
    tensors = (*model.parameters(), *model.buffers())
    return [each for each in tensors if each.dtype in (torch.bfloat16, torch.float16)]
