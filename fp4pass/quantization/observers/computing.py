"""Compute in the dtype that the CPU is fast in, whatever that of the weights is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from ..._compat.torch import cpu_has_bfloat16, is_compiled
from ...record.state import unwrap

_log = logging.getLogger(__name__)

# The note for another dtype than that of the weights.
IN_FLOAT32 = "in float32: this CPU has no instructions for products in bfloat16"


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
    kept = {id(tensor): (tensor, tensor.data) for model in models for tensor in halves(model)}
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
    return on_cpu and not exported and any(True for _ in halves(root)) and not cpu_has_bfloat16()


def halves(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model that are in bfloat16 or float16."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            yield tensor
