"""Checksums of tensors and plain values, by all of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """Return the dtype, the shape and the checksum of a tensor."""
    digest = hashlib.sha256()
    if tensor.numel():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "sha256": digest.hexdigest(),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as configs have it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def digest_of(*values: Any) -> str:
    """Return the SHA-256 of plain values and tensors, by dtype, shape and bits."""
    total = hashlib.sha256()
    for value in values:
        _add(total, value)
    return total.hexdigest()


def _add(total: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)};".encode())
        # Rows at a time, which a copy of a large weight would not be.
        for part in value.detach().reshape(-1).split(1 << 24):
            total.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            total.update(f"{key}:".encode())
            _add(total, value[key])
    elif isinstance(value, tuple | list):
        total.update(f"[{len(value)}]".encode())
        for item in value:
            _add(total, item)
    else:
        total.update(f"{value!r};".encode())
