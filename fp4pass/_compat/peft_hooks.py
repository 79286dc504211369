"""Hooks that PEFT calls before it puts adapters into a model, imported or not yet."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# By this attribute of a model `peft.prepare_model_for_kbit_training` knows that its weights are
# quantized. Others that it looks at say "bitsandbytes" to transformers.
QUANTIZED_MARK = "hqq_quantized"

# Runs around a call that puts an adapter into a model: its tuner, the model, the adapter's name.
Around = Callable[[Any, Any, str], AbstractContextManager[None]]


def around_adapters(around: Around, before_merge: Callable[[Any], None]) -> None:
    """Have PEFT put adapters into models within a context, once it is imported."""
    # PEFT has a registry of classes of layers for each config, and none for all configs. Its own
    # merge asks one layer after the other, so `before_merge` is called with its tuner before.

    def wrap(module: ModuleType) -> None:
        tuner = module.BaseTuner
        inject, unload = tuner.inject_adapter, tuner.merge_and_unload

        @functools.wraps(inject)
        def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kw: Any) -> Any:
            with around(self, model, adapter_name):
                return inject(self, model, adapter_name, *args, **kw)

        @functools.wraps(unload)
        def merge_and_unload(self: Any, *args: Any, **kw: Any) -> Any:
            before_merge(self)
            return unload(self, *args, **kw)

        tuner.inject_adapter, tuner.merge_and_unload = inject_adapter, merge_and_unload

    after_import("peft.tuners.tuners_utils", wrap)


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module when that is imported, at once if it is already."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, call))
    else:
        call(module)


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do; its loader calls a function at the end, once."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, None for others."""
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            run, own = loader.exec_module, vars(loader)

            def exec_module(module: ModuleType) -> None:
                run(module)
                if module.__name__ == self.name and self in sys.meta_path:
                    # Nothing of this stays in the process.
                    sys.meta_path.remove(self)
                    own.pop("exec_module", None)
                    self.call(module)

            own["exec_module"] = exec_module
        return spec
