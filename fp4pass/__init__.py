"""fp4pass: PyTorch models in 4-bit floating point, with provably optimal block scales."""

from . import nn
from ._version import __version__
from .api import calibrate, convert, prepare
from .checkpoint.loading import load
from .checkpoint.saving import save
from .config import LinearConfig
from .core.quant_state import CodebookState, QuantState
from .errors import Fp4PassError
from .evaluation import Evaluation, evaluate
from .graph.export import trace
from .graph.inductor import compile_report
from .methods import Gptq, Hessian, Naive, Sse
from .quantization.recipe import Recipe
from .quantization.report import Report, report
from .quantization.smooth import smooth
from .tensor import functional
from .tensor.quantizer import dequantize, quantize

__all__ = [
    "CodebookState",
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
    "trace",
]
