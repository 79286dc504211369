"""sentence-transformers, which calls the forward of transformers' models by itself."""

from __future__ import annotations

import inspect
import sys


def loads_model() -> bool:
    """Return whether sentence-transformers is what is loading a model of transformers.

    It passes by the hook in which compressed-tensors makes its weights dense.
    """
    if "sentence_transformers" not in sys.modules:
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("sentence_transformers."):
            return True
        frame = frame.f_back
    return False
