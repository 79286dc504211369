"""What a trace depends on, to be compared before its graph is used again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..quantization.observer import is_observer_hook

_MODULE_CALL = nn.Module.__call__


@dataclass
class Guards:
    """What a trace has read of the modules; modules, tensors and functions compare by identity.

    objects: tensors and functions, or their absence, by module and name; versions: tensors whose
    values were looked at; plain: modules without hooks.
    """

    children: list[tuple[nn.Module, str, nn.Module, type]] = field(default_factory=list)
    containers: list[tuple[nn.Module, tuple[nn.Module | None, ...]]] = field(default_factory=list)
    objects: list[tuple[nn.Module, str, object]] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    constants: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    forwards: list[tuple[Any, Any]] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    plain: list[nn.Module] = field(default_factory=list)

    def hold(self) -> bool:
        """Whether another trace would read the same."""
        return (
            all(getattr(p, n, None) is m and type(m) is t for p, n, m, t in self.children)
            and all(tuple(m._modules.values()) == members for m, members in self.containers)
            and all(getattr(m, n, None) is value for m, n, value in self.objects)
            and all(tensor._version == version for tensor, version in self.versions)
            and all(_same(getattr(m, n, None), value) for m, n, value in self.constants)
            and all(cls.forward is function for cls, function in self.forwards)
            and all(scope.get(n) is value for scope, n, value in self.names)
            and not any(is_hooked(m) for m in self.plain)
        )

    def extend(self, other: Guards) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))


def traced_class(module: nn.Module) -> type[nn.Module]:
    """The class whose forward the user wrote: below the one that a region puts on top."""
    cls = type(module)
    return cls.__mro__[2] if cls.__dict__.get("fp4pass_region") else cls


def _same(a: object, b: object) -> bool:
    """Whether two constants are the same, unlike `==` also for NaN, -0.0 and partial functions."""
    return type(a) is type(b) and repr(a) == repr(b)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward and our own observing."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or type(module).__call__ is not _MODULE_CALL
        or (
            module._forward_pre_hooks
            and not all(is_observer_hook(hook) for hook in module._forward_pre_hooks.values())
        )
    )
