"""What few programs use of the API, imported when it is asked for."""

from importlib import import_module
from typing import Any

_MODULES = {
    "Evaluation": "evaluation",
    "Refine": "quantization.learning",
    "evaluate": "evaluation",
    "parallelize": "parallel",
    "refine": "quantization.refine",
    "smooth": "quantization.smooth",
    "trace": "graph.export",
}


def __getattr__(name: str) -> Any:
    """Return an attribute of fp4pass that it does not have yet: its `__getattr__`."""
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __package__), name)
    raise AttributeError(f"module {__package__!r} has no attribute {name!r}")
