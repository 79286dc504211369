"""Identify a tensor by its dtype, shape and checksum."""

from __future__ import annotations

import hashlib
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
