"""Digest all that decides a result: plain values, tensors, modules and their code."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from pickle import PickleError
from typing import Any

import torch
from torch import Tensor, nn

from .tensor_digest import digest_tensors

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    range,
    slice,
)

# Of these only the class is told: they decide nothing.
_SILENT = (
    contextvars.ContextVar,
    logging.Logger,
    torch.device,
    types.ModuleType,
    weakref.ref,
    type(threading.Lock()),
    type(threading.RLock()),
)

# The origin of a config, and the call that torch.compile made.
_NAMES = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_compiled_call_impl"})

# Attributes of every module, but for the hooks of its forward.
_OF_MODULES = frozenset(nn.Module().__dict__) - {"training", "_forward_hooks", "_forward_pre_hooks"}


class Unknown(Exception):
    """Something whose bytes nobody knows decides a result."""


class Description:
    """Takes in what decides a result. Its digest is equal for equal things, in every process."""

    def __init__(self) -> None:
        self._text = hashlib.sha256()
        self._tensors: dict[str, Tensor] = {}
        # The number of each thing that has an identity, and itself, so that it stays its own.
        self._known: dict[int, tuple[int, object]] = {}

    def digest(self) -> str:
        """Return the digest of all that was added. Raises Unknown for tensors without bytes."""
        tensors = digest_tensors(self._tensors)
        if tensors is None:
            raise Unknown("a tensor that is not in memory, or is of a class of its own")
        return hashlib.sha256(f"{self._text.hexdigest()} {tensors}".encode()).hexdigest()

    def add(self, value: Any) -> None:
        """Add a value. Raises Unknown for an object that does not tell what it is made of."""
        if isinstance(value, enum.Enum):
            self._say(f"{_name_of(type(value))}.{value.name}")
        elif type(value) in _PLAIN:
            self._say(f"{type(value).__name__} {value!r}")
        elif isinstance(value, _SILENT):
            self._say(type(value).__name__)
        elif type(value) is tuple:
            # Whether equal ones are one object is up to the interpreter.
            self._add_object(value)
        elif id(value) in self._known:
            self._say(f"again {self._known[id(value)][0]}")
        else:
            self._known[id(value)] = len(self._known), value
            self._add_object(value)

    def _say(self, text: str) -> None:
        # With its length, so that no two lists of texts are one.
        self._text.update(f"{len(text)} {text};".encode())

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            name = str(len(self._tensors))
            self._tensors[name] = value
            self._say(f"tensor {name}")
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, type):
            self._say(_class_text(value))
        elif isinstance(value, Mapping):
            self._say(f"{_name_of(kind)} of {len(value)}")
            for key in value:
                self.add(key)
                self.add(value[key])
        elif isinstance(value, tuple | list):
            self._say(f"{_name_of(kind)} of {len(value)}")
            for each in value:
                self.add(each)
        elif isinstance(value, set | frozenset):
            self._say(f"{_name_of(kind)} {sorted(map(repr, value))}")
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            self.add([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif inspect.isbuiltin(value) or isinstance(value, types.MethodWrapperType):
            self._say(f"{kind.__name__} {value.__qualname__}")
        elif dataclasses.is_dataclass(value):
            self.add(kind)
            for field in dataclasses.fields(value):
                self.add(getattr(value, field.name))
        else:
            self._add_other(value)

    def _add_other(self, value: Any) -> None:
        """Add an object by what pickle would keep of it."""
        try:
            reduced = value.__reduce_ex__(2)
        except (TypeError, ValueError, AttributeError, RuntimeError, PickleError) as error:
            raise Unknown(f"a {_name_of(type(value))}") from error
        # A name, or what makes it, its state, and the items of a list and a dictionary.
        made, arguments, state, *items = (
            (reduced, None, None) if isinstance(reduced, str) else (*reduced, None)
        )
        self.add([made, arguments])
        if type(state) is dict:
            self._add_attributes(state)
        else:
            self.add(state)
        self.add([list(each) for each in items if each is not None])

    def _add_module(self, module: nn.Module) -> None:
        if "_orig_mod" in module._modules:
            # The module that torch.compile wraps.
            self.add(module._modules["_orig_mod"])
            return
        self.add(type(module))
        own = {k: v for k, v in module.__dict__.items() if k not in _OF_MODULES}
        for key in ("_forward_pre_hooks", "_forward_hooks"):
            # Their keys are numbers that a process gives.
            own[key] = list(own[key].values())
        self._add_attributes(own)
        for named in (module._parameters, module._buffers, module._modules):
            self._add_attributes(named)

    def _add_attributes(self, named: Mapping[str, Any]) -> None:
        for name in sorted(set(named) - _NAMES):
            self._say(name)
            self.add(named[name])

    def _add_function(self, function: types.FunctionType) -> None:
        self._say(_function_text(function))
        self.add([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self._say("an empty cell")


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_of_torch(value: Any) -> bool:
    package = (value.__module__ or "").partition(".")[0]
    return package in ("torch", "builtins", "abc", "typing", "collections", "functools")


def _class_text(kind: type) -> str:
    """Return a class and what it is derived from, with versions and the code of methods."""
    found = []
    for each in kind.__mro__:
        version = getattr(sys.modules.get(each.__module__.partition(".")[0]), "__version__", "")
        found.append(f"{_name_of(each)} {version}")
        for name, value in () if _is_of_torch(each) else sorted(vars(each).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType):
                found.append(f"{name}: {_function_text(function)}")
    return "\n".join(found)


def _function_text(function: types.FunctionType) -> str:
    """Return the name and the code of a function, and of what it wraps."""
    text = f"{function.__module__}.{function.__qualname__}"
    if _is_of_torch(function):
        return f"{text} {torch.__version__}"
    wrapped = inspect.unwrap(function)
    code = (function, wrapped) if isinstance(wrapped, types.FunctionType) else (function,)
    return " ".join([text, *(_code_text(each.__code__) for each in code)])


def _code_text(code: types.CodeType) -> str:
    """Return what code does, wherever it stands."""

    def text(value: object) -> str:
        if isinstance(value, types.CodeType):
            return _code_text(value)
        if isinstance(value, frozenset):
            return str(sorted(map(repr, value)))
        if isinstance(value, tuple):
            return f"({', '.join(map(text, value))})"
        return repr(value)

    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {text(code.co_consts)}"
