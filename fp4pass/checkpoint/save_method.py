"""The `save_pretrained` of a converted model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class SaveMethod:
    """A `save_pretrained` that checks a model before its class saves it.

    Attributes:
        root: the model.
        check: called with the model, `reason` and the options of the call.
        reason: why the model cannot be saved so, "" if it can.
    """

    root: Any
    check: Callable[..., None]
    reason: str

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's own method, which pipelines look at for its options."""
        return inspect.signature(type(self.root).save_pretrained.__get__(self.root))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the model and save it."""
        self.check(self.root, self.reason, **kwargs)
        return type(self.root).save_pretrained(self.root, *args, **kwargs)
