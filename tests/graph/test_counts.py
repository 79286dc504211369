"""The passes change as much in a table of models under every version of torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import zoo
from post_grad import compiled, fresh

import fp4pass

pytest.importorskip("transformers")

# Found with torch 2.13 and transformers 5.23: products before and after, their groups, quantized
# inputs before and after, and the changes of share_calls and group_linears.
COUNTS = {
    "llama": (14, 4, 4, 14, 8, 12, 6),
    "qwen3": (14, 4, 4, 14, 8, 12, 6),
    "phi3": (8, 8, 0, 8, 8, 0, 0),
    "gpt2": (8, 8, 0, 8, 8, 0, 0),
    "qwen3_moe": (8, 2, 2, 12, 8, 8, 4),
    "gpt_oss": (8, 2, 2, 12, 8, 8, 4),
    "mamba2": (4, 4, 0, 4, 4, 0, 0),
    "bert": (12, 6, 2, 12, 8, 8, 4),
    "t5": (36, 12, 9, 36, 21, 30, 15),
    "mlp": (3, 3, 0, 3, 3, 0, 0),
    "used_twice": (2, 2, 0, 2, 2, 0, 0),
    "shared_weight": (2, 2, 0, 2, 2, 0, 0),
    "transformer_encoder_padded": (4, 4, 0, 4, 4, 0, 0),
}
CASES = {case.name: case for case in zoo.CASES}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", COUNTS)
def test_the_passes_find_what_they_found(name: str) -> None:
    case = CASES[name]
    for package in case.requires:
        pytest.importorskip(package)
    model = fp4pass.convert(case.build(), "nvfp4", "naive")
    fp4pass.graph.inductor.install_passes()
    case.run(compiled(model), 0)
    (graph,) = fp4pass.compile_report().graphs
    counted = [
        graph.before["linear_quantized"],
        graph.after["linear_quantized"],
        graph.after.get("linear_quantized_group", 0),
        graph.before["quantize"],
        graph.after["quantize"],
        graph.changes["share_calls"],
        graph.changes["group_linears"],
    ]
    assert tuple(counted) == COUNTS[name], str(graph)
