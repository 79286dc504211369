"""Passes that run inside torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .install import CompileReport


def compile_report() -> CompileReport:
    """Return what the passes did to the graphs that torch.compile made in this process.

    It prints as one line for each graph: how often it calls each operator of fp4pass, before and
    after, and what each pass changed. TORCH_LOGS="fp4pass.graph.inductor" logs it as it happens.
    """
    # Importing Inductor takes a second.
    from .install import report

    return report()
