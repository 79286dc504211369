"""What the passes make of models of transformers, traced as for a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import zoo
from post_grad import calls, compiled
from torch import Tensor, fx

import fp4pass
from fp4pass.graph.inductor.fusions import fuse_quantizers
from fp4pass.graph.inductor.merge import group_linears, share_calls
from fp4pass.graph.inductor.products import fuse_gates, fuse_norms, fuse_residuals

pytestmark = [pytest.mark.usefixtures("fresh_graphs"), pytest.mark.slow]

# The calls of two layers: with inputs in 4 bits, for several rows, and for one.
WEIGHTS_AND_INPUTS = {
    "llama": {"quantize": 2, "norm_quantize": 4, "activate_quantize": 2},
    # Gate and up are halves of one tensor.
    "phi3": {"quantize": 2, "norm_quantize": 4, "activate_quantize": 2},
    "gpt2": {"quantize": 2, "norm_quantize": 4, "activate_quantize": 2},
    # Norms multiply by 1 + weight in float32.
    "gemma3": {"quantize": 6, "activate_quantize": 2},
    # A norm is the next residual too.
    "bert": {"quantize": 6, "activate_quantize": 2},
}
ROWS = {
    "llama": {"linear_group": 4, "linear": 4, "rms_norm": 1, "add_rms_norm": 3},
    "phi3": {"linear_group": 2, "linear": 6, "rms_norm": 1, "add_rms_norm": 3},
    "gemma3": {"linear": 4, "linear_group": 4},
    "gpt2": {"linear": 8},
}
# The first norm is of no sum, and the head is a dense product.
ROW = {"llama": {"linear_group": 7, "linear": 1, "rms_norm": 1}}
CASES = [
    (name, fmt, rows, expected)
    for fmt, rows, table in (("mxfp4", 9, WEIGHTS_AND_INPUTS), ("nvfp4a16", 7, ROWS))
    for name, expected in table.items()
] + [(name, "nvfp4a16", 1, expected) for name, expected in ROW.items()]


@pytest.mark.parametrize(("name", "fmt", "rows", "expected"), CASES, ids=str)
def test_calls_of_a_model(name: str, fmt: str, rows: int, expected: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in zoo.CASES if case.name == name)
    model = fp4pass.convert(case.build().bfloat16(), fmt, "naive")
    if name != "bert":
        model.config.use_cache = False
    left: list[Counter[str]] = []

    def change(graph: fx.Graph) -> None:
        share_calls(graph)
        if fmt == "mxfp4":
            fuse_quantizers(graph, lambda node: True)
        else:
            fuse_gates(graph, lambda node: True)
            group_linears(graph)
            fuse_residuals(graph, lambda node, normed: True)
            fuse_norms(graph, lambda node: True)
        left.append(calls(graph))

    def function(ids: Tensor) -> Tensor:
        return zoo.tensor_of(model(input_ids=ids))

    ids = torch.arange(2, 2 + rows).view(1, rows)
    found, eager = compiled(function, change)(ids).float(), function(ids).float()
    assert {key: left[0][key] for key in expected} == expected
    assert (found - eager).norm() <= (0.1 if fmt == "mxfp4" else 0.02) * eager.norm()
