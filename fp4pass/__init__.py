"""fp4pass: PyTorch models in 4-bit floating point, with provably optimal block scales."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import integrations as integrations
from ._version import __version__
from .api import calibrate, convert, prepare, quantize_checkpoint
from .checkpoint import load, save
from .errors import Fp4PassError
from .graph.inductor import compile_report
from .methods import Gptq, Hessian, Naive, Sse
from .quantization import functional
from .quantization.functional import QuantState, quantize
from .quantization.quantize import set_compute
from .quantization.recipe import Recipe
from .quantization.replace import dequantize
from .record.config import LinearConfig
from .record.rows import Report
from .record.state import report

if TYPE_CHECKING:
    from .calibration.smoothing import smooth
    from .evaluation import Evaluation, evaluate
    from .graph.export import trace
    from .lab.allocate import allocate
    from .lab.distill import distill
    from .lab.merge import merge
    from .parallel import parallelize

# The modules of public names that few programs use: they are imported when one is asked for.
_LATER = {
    "allocate": ".lab",
    "distill": ".lab",
    "Evaluation": ".evaluation",
    "evaluate": ".evaluation",
    "merge": ".lab",
    "parallelize": ".parallel",
    "smooth": ".calibration.smoothing",
    "trace": ".graph.export",
}

__all__ = [
    "Evaluation",
    "Fp4PassError",
    "Gptq",
    "Hessian",
    "LinearConfig",
    "Naive",
    "QuantState",
    "Recipe",
    "Report",
    "Sse",
    "__version__",
    "allocate",
    "calibrate",
    "compile_report",
    "convert",
    "dequantize",
    "distill",
    "evaluate",
    "functional",
    "load",
    "merge",
    "parallelize",
    "prepare",
    "quantize",
    "quantize_checkpoint",
    "report",
    "save",
    "set_compute",
    "smooth",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import what few programs use when it is asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
