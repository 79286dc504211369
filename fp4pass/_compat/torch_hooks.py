"""Private APIs of PyTorch: hooks of modules, and what its compiler makes of them."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import expect, part


@part(
    "torch",
    "hooks that torch.compile does not look into",
    "A prepared model that is compiled is compiled again for each kind of mask.",
)
def _skips_functions() -> None:
    def nothing() -> None: ...

    _skip(nothing)


def runs_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile not look into a function that is called outside of its graphs.

    Inside of one it is traced. So hooks of a model that is compiled run as in eager mode, and those
    of its parts are in its graph.
    """
    _skips_functions.attempt(_skip, function)


def _skip(function: Callable[..., Any]) -> None:
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(
        inspect.unwrap(function).__code__, dynamo._FrameExecStrategy(skip, skip)
    )


@part(
    "torch",
    "observers in a model that is already compiled",
    "Call torch.compiler.reset() after prepare, or its graphs run without the observers.",
)
def _sees_new_hooks() -> None:
    # Dynamo sees the hooks of modules without parameters anyway.
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.zeros(1))
    seen: list[object] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module))
    _change_dictionaries(model[0])
    compiled(torch.zeros(1))
    expect(len(seen) == 1, "Dynamo to compile a module again whose dictionaries are other ones")


def recompile_hooked(model: nn.Module) -> None:
    """Have code that torch.compile made of a model compiled again where modules have hooks.

    Dynamo guards the classes of modules, but not whether they got hooks since. It guards the type
    of the dictionaries that hold their parameters and children, which may be either of two. Code of
    other models stays.
    """
    if "torch._dynamo" not in sys.modules:
        return
    hooked = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    # Where nothing was compiled, nothing needs the self-test, which compiles.
    if hooked and sys.modules["torch._dynamo"].utils.counters["frames"]:
        _sees_new_hooks.works()
    for module in hooked:
        _change_dictionaries(module)


def _change_dictionaries(module: nn.Module) -> None:
    for name in ("_parameters", "_modules"):
        old = module.__dict__[name]
        module.__dict__[name] = (dict if type(old) is OrderedDict else OrderedDict)(old)


def add_forward_hooks(
    module: nn.Module,
    name: str,
    before: Callable[..., None],
    after: Callable[..., None],
    with_kwargs: bool = False,
) -> None:
    """Call functions before and after each forward of a module, also after one that fails.

    The hooks are known by a name. A number, as torch gives one, is that of another hook once the
    module is unpickled in another process. with_kwargs: `before` takes keyword arguments, too.
    """
    remove_forward_hooks(module, name)
    known: Any = module
    known._forward_pre_hooks[name] = before
    if with_kwargs:
        known._forward_pre_hooks_with_kwargs[name] = True
    known._forward_hooks[name] = after
    known._forward_hooks_always_called[name] = True


def remove_forward_hooks(module: nn.Module, name: str) -> None:
    """Undo `add_forward_hooks`."""
    known: Any = module
    for hooks in (
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        *("_forward_hooks", "_forward_hooks_always_called"),
    ):
        getattr(known, hooks).pop(name, None)


def hook_before(module: nn.Module, name: str) -> Any:
    """Return the first function of `add_forward_hooks`, None without one of this name."""
    known: Any = module
    return known._forward_pre_hooks.get(name)
