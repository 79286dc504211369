"""fp4pass: PyTorch models in 4-bit floating point, with provably optimal block scales."""

from typing import TYPE_CHECKING

from . import nn
from ._later import __getattr__ as __getattr__
from ._version import __version__
from .api import calibrate, convert, prepare
from .checkpoint import load, save
from .config import LinearConfig
from .errors import Fp4PassError
from .from_disk import quantize_checkpoint
from .graph.inductor import compile_report
from .methods import Gptq, Hessian, Naive, Sse
from .quantization.compute import set_compute
from .quantization.recipe import Recipe
from .quantization.report import Report, report
from .tensor import CodebookState, QuantState, dequantize, functional, quantize

if TYPE_CHECKING:
    from .evaluation import Evaluation, evaluate
    from .graph.export import trace
    from .parallel import parallelize
    from .quantization.learning import Refine
    from .quantization.refine import refine
    from .quantization.smooth import smooth

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
    "Refine",
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
    "parallelize",
    "prepare",
    "quantize",
    "quantize_checkpoint",
    "refine",
    "report",
    "save",
    "set_compute",
    "smooth",
    "trace",
]
