"""Models compiled as far as Inductor's passes over graphs go, and run without generated code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from fp4pass.graph.inductor import GRAPHS


def compiled(
    model: Callable[..., Any], change: Callable[[fx.Graph], Any] | None = None, **options: Any
) -> Any:
    """The model by Inductor's last graph, run node by node; `change`: in place of our passes."""

    def run_graph(gm: fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        compile_fx.view_to_reshape(gm)
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            post_grad_passes(gm, is_inference=how.get("is_inference", False))
        # What is written in place returns nothing, and a result of it that is not read is dead.
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        hook = {} if change is None else {"post_grad_custom_pre_pass": change}
        with config.patch(hook):
            return compile_fx.compile_fx(gm, inputs, inner_compile=run_graph)

    return torch.compile(model, backend=backend, fullgraph=True, **options)


@contextmanager
def fresh() -> Iterator[None]:
    """No caches, no passes and no reports of before; all as it was after."""
    GRAPHS.clear()
    with (
        config.patch(post_grad_custom_pre_pass=None, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def calls(graph: fx.Graph) -> Counter[str]:
    """How often a graph calls each operator of fp4pass."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if name.startswith("fp4pass."))


def run_passes(
    function: Callable[..., Any], args: tuple[Any, ...], *passes: Any, **options: Any
) -> tuple[Any, list[int], Counter[str]]:
    """What a compiled function returns, the changes of two runs of the last pass, the calls left.

    The fake tensors of the operators' nodes are those that the operators give.
    """
    counts: list[int] = []
    left: list[Counter[str]] = []

    def change(graph: fx.Graph) -> None:
        for each in passes[:-1]:
            each(graph)
        counts.extend(passes[-1](graph) for _ in range(2))
        graph.lint()
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("fp4pass."):
                given = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
                pairs = zip(_several(given), _several(node.meta["val"]), strict=True)
                for a, b in pairs:
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        left.append(calls(graph))

    torch._dynamo.reset()
    found = compiled(function, change, **options)(*args)
    return found, counts, left[-1]


def _several(value: Any) -> Any:
    return [value] if isinstance(value, Tensor) else value
