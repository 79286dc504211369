"""Hooks that PEFT calls before it puts adapters into a model, imported or not yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from .after_import import after_import

# By this attribute of a model `peft.prepare_model_for_kbit_training` knows that its weights are
# quantized. Others that it looks at say "bitsandbytes" to transformers.
QUANTIZED_MARK = "hqq_quantized"

# Runs around a call that puts an adapter into a model: its tuner, the model, the adapter's name.
Around = Callable[[Any, Any, str], AbstractContextManager[None]]


def around_adapters(around: Around) -> None:
    """Have PEFT put adapters into models within a context, once it is imported.

    PEFT has a registry of classes of layers for each config, and none for all configs.
    """

    def wrap(module: ModuleType) -> None:
        tuner: Any = module.BaseTuner
        inject = tuner.inject_adapter

        @functools.wraps(inject)
        def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kw: Any) -> Any:
            with around(self, model, adapter_name):
                return inject(self, model, adapter_name, *args, **kw)

        tuner.inject_adapter = inject_adapter

    after_import("peft.tuners.tuners_utils", wrap)
