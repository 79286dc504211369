"""Passes that run inside torch.compile, on graphs with operators of fp4pass.

- `install_passes` chains them into Inductor, as `convert` and `load` do;
- `compile_report` says what they did to which graph.

The matcher is in pattern.py, the table of fusions in fusions.py; docs/graphs.md says how to add
one.
"""

from .install import install_passes
from .report import CompiledGraph, CompileReport, compile_report

__all__ = ["CompileReport", "CompiledGraph", "compile_report", "install_passes"]
