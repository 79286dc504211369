"""fp4pass: PyTorch models in 4-bit floating point, with provably optimal block scales."""

from . import functional, nn
from ._version import __version__
from .api import calibrate, convert, prepare
from .checkpoint import save
from .errors import Fp4PassError
from .evaluate import Evaluation, evaluate
from .graph.install import compile_report
from .loading import load
from .methods import Gptq, Hessian, Naive, Sse
from .packing import QuantState
from .report import Report, report
from .smoothing import smooth
from .tensors import dequantize, quantize

__all__ = [
    "Evaluation",
    "Fp4PassError",
    "Gptq",
    "Hessian",
    "Naive",
    "QuantState",
    "Report",
    "Sse",
    "__version__",
    "calibrate",
    "compile_report",
    "convert",
    "dequantize",
    "evaluate",
    "functional",
    "load",
    "nn",
    "prepare",
    "quantize",
    "report",
    "save",
    "smooth",
]
