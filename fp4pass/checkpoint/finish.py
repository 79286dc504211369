"""Complete a model whose linear layers are packed: its state, saving, compiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._compat.transformers import own_config, untie
from ..graph.inductor import install_passes
from ..quantization.replace import use_slow_paths
from ..quantization.report import Report, Row
from ..quantization.state import ModelState, set_state
from .pretrained import enable_save_pretrained


def finish(root: nn.Module, recipe: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Complete a converted or loaded model in place; `rows` are those of its report."""
    use_slow_paths(root)
    own_config(root)
    untie(root)
    set_state(root, ModelState("converted", recipe, Report(tuple(rows))))
    enable_save_pretrained(root)
    install_passes()
