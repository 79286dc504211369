"""Passes that run inside torch.compile, on graphs with operators of fp4pass.

The matcher is in pattern.py, the table of fusions in fusions.py. docs/graphs.md explains them.
"""

from .install import CompiledGraph, CompileReport, compile_report, install_passes

__all__ = ["CompileReport", "CompiledGraph", "compile_report", "install_passes"]
