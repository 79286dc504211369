"""Searches that need not be done again, and what data a model was calibrated on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ._version import __version__
from .errors import OptionError
from .formats import Format
from .packing import QuantState


def digest_of(*values: Any) -> str:
    """The SHA-256 of plain values and tensors, by dtype, shape and bits."""
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


class Finished:
    """A folder of weights that have been searched, each under a name that its data decide.

    The name is a digest of the weight, its statistics, the format, the method and the version of
    fp4pass, so that what is found is what a search would give. Each is written whole or not at all.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(f"resume is {self.folder}, a file; a folder is wanted.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found = 0

    def key(self, *parts: Any) -> str:
        """The name of a search, by everything that decides its result."""
        return digest_of(__version__, *parts)

    def get(self, key: str, fmt: Format) -> QuantState | None:
        """A search that is finished, None if it is not."""
        path = self.folder / f"{key}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["state"])
                packed, scale = file.get_tensor("packed"), file.get_tensor("scale")
        except (OSError, SafetensorError, KeyError, ValueError):
            # A disk that was full, a copy that was cut off: search it again.
            path.unlink()
            return None
        self.found += 1
        shape = (int(facts["shape"][0]), int(facts["shape"][1]))
        return QuantState(packed, scale, float(facts["global_scale"]), fmt, shape)

    def put(self, key: str, state: QuantState) -> None:
        """Keep a finished search."""
        facts = {"global_scale": state.global_scale, "shape": list(state.shape)}
        tensors = {"packed": state.packed.cpu().contiguous(), "scale": state.scale.cpu()}
        partial = self.folder / f".{key}.{os.getpid()}"
        save_file(tensors, partial, metadata={"state": json.dumps(facts)})
        partial.rename(self.folder / f"{key}.safetensors")
