"""Checksums of tensors and plain values, and the identity of all that decides a result."""

from __future__ import annotations

import contextvars
import dataclasses
import hashlib
import logging
import marshal
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

# Of these only the class counts: they decide nothing.
_SILENT = (
    contextvars.ContextVar,
    logging.Logger,
    torch.device,
    types.ModuleType,
    weakref.ref,
    type(threading.Lock()),
    type(threading.RLock()),
)

# Attributes of every module, but for the hooks of its forward, whose keys a process gives.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"}
_OF_MODULES -= {"training", "_parameters", "_buffers", "_modules"}

# Raised by pickle for objects that do not tell what they are made of.
_FAULTS = (pickle.PicklingError, TypeError, ValueError, AttributeError, RuntimeError)


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


class Unknown(Exception):
    """Something whose bytes nobody knows decides a result."""


def identity_of(*values: Any) -> str:
    """Return a digest of values as pickle takes them apart, equal for equal ones in any process."""
    # Tensors count by dtype, shape and bits, wherever and however they lie; code of libraries by
    # their versions, and other code by itself. Raises Unknown for what pickle cannot keep.
    total = hashlib.sha256()
    pickler = _Pickler(types.SimpleNamespace(write=total.update), protocol=4)
    try:
        pickler.dump(values)
    except _FAULTS as error:
        raise Unknown(str(error).partition("\n")[0]) from error
    tensors = [tensor.detach() for tensor in pickler.tensors.values()]
    if any(type(x) is not Tensor or x.is_meta or x.layout is not torch.strided for x in tensors):
        raise Unknown("a tensor that is not in memory, or is of a class of its own")
    # A core hashes half a gigabyte in a second, less than a disk reads.
    with ThreadPoolExecutor() as pool:
        for digest in pool.map(digest_of, tensors):
            total.update(digest.encode())
    return total.hexdigest()


class _Pickler(pickle.Pickler):
    """A pickler that leaves out what differs by process, and keeps the tensors."""

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a value, None for one that is taken apart."""
        if type(value) is str:
            # Whether equal ones are one object is up to the interpreter.
            return sys.intern(value)
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            return "tensor", self._numbers.setdefault(id(value), len(self._numbers))
        if isinstance(value, set | frozenset):
            return type(value).__name__, sorted(map(repr, value))
        if isinstance(value, _SILENT):
            return "silent", type(value).__name__
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what a module, a class or a function is made of."""
        if isinstance(value, nn.Module):
            facts = vars(value)
            hooks = [[*facts[key].values()] for key in _HOOKS]
            own = {key: facts[key] for key in sorted(facts.keys() - _OF_MODULES)}
            # A state, not arguments: modules may lead back to themselves.
            return str, (type(value),), (hooks, own)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # Not what it has computed of them.
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return str, (type(value),), (fields,)
        if not isinstance(value, type | types.FunctionType) or value.__module__ == "builtins":
            return NotImplemented
        name = f"{value.__module__}.{value.__qualname__}"
        package = (value.__module__ or "").partition(".")[0]
        version = str(getattr(sys.modules.get(package), "__version__", ""))
        is_known = bool(version) or package in sys.stdlib_module_names
        if isinstance(value, types.FunctionType):
            code = version if is_known else _code(value)
            cells = [each.cell_contents for each in value.__closure__ or ()]
            return str, (name, code, value.__defaults__, value.__kwdefaults__, cells)
        members = {} if is_known else vars(value)
        inner = {
            key: getattr(each, "__func__", getattr(each, "fget", each))
            for key, each in sorted(members.items())
        }
        codes = {k: _code(f) for k, f in inner.items() if isinstance(f, types.FunctionType)}
        return str, (name, version, () if is_known else value.__bases__, codes)


def _code(function: types.FunctionType) -> bytes:
    """Return what a function does, wherever it stands."""
    code = function.__code__.replace(co_filename="", co_firstlineno=0, co_linetable=b"")
    return marshal.dumps(code, 2)
