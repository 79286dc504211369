"""Private APIs of transformers: a static cache whose last tokens are taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from .transformers import require_transformers
from .transformers_cache import PREPARE, cache_module, generated_name, given_cache, is_decoder


def compile_for_drafts(model: Any, backend: str, length: int, tokens: int) -> Any:
    """Have `generate` of a model check drafts in compiled forwards of a static cache.

    Args:
        model: the model, which is changed.
        backend: of torch.compile.
        length: tokens of the cache.
        tokens: the most of a compiled forward.
    """
    require_transformers()
    name = type(model).__name__
    if not is_decoder(model):
        raise OptionError(f"compile_for_drafts: expected a decoder of transformers, got {name}.")
    if PREPARE in model.__dict__:
        raise OptionError(
            f"compile_for_drafts: expected a model with a plain cache, got {name} that was "
            "converted with kv_cache, or is compiled for drafts. Load it again, without kv_cache."
        )
    cache = _rollback_class()(config=model.config, max_cache_len=length)
    other = {type(each).__name__ for each in cache.layers} - {"StaticLayer"}
    if other:
        raise OptionError(
            f"compile_for_drafts: expected layers that keep all tokens, got {min(other)} in "
            f"{name}: what a window drops cannot be taken back. Without compile_for_drafts, "
            "`generate` uses a dynamic cache."
        )
    model.__dict__[PREPARE] = _PrepareCache(cache)
    model.forward = _compiled_forward(model.forward, backend, tokens)
    return model


class _PrepareCache:
    """Gives `generate` of one model its cache, empty."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        # The forward is compiled already.
        generation_config.disable_compile = True
        if model_kwargs.get(generated_name()) is not None:
            return
        most = self.cache.layers[0].max_cache_len
        if batch_size != 1 or max_cache_length > most:
            raise OptionError(
                f"generate: expected one text of at most {most} tokens with its answer, as "
                f"compile_for_drafts was told, got {batch_size} of {max_cache_length}. Give it a "
                "larger length."
            )
        self.cache.reset()
        model_kwargs[generated_name()] = self.cache


@functools.cache
def _rollback_class() -> Any:
    static: Any = cache_module().StaticCache

    # transformers refuses StaticCache itself for drafts.
    class RollbackCache(static):
        """A static cache whose last tokens can be taken back."""

        def crop(self, tokens_to_remove: int | Tensor) -> None:
            # They are written over.
            for layer in self.layers:
                layer.cumulative_length.sub_(abs(tokens_to_remove))

    return RollbackCache


def _compiled_forward(forward: Any, backend: str, tokens: int) -> Callable[..., Any]:
    """Return a forward that is compiled for each number of tokens up to `tokens`."""
    # A CUDA graph has fixed shapes; on other devices the mode changes nothing.
    mode = "reduce-overhead" if backend == "inductor" else None
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend, mode=mode)

    # `generate` reads the signature.
    @functools.wraps(forward)
    def run(input_ids: Tensor | None = None, **given: Any) -> Any:
        few = input_ids is not None and input_ids.shape[1] <= tokens
        # A prompt also makes the tensors of the cache, which are no part of a graph.
        cache = given_cache(given.values())
        if not few or torch.compiler.is_compiling() or not getattr(cache, "is_initialized", False):
            return forward(input_ids=input_ids, **given)
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(input_ids=input_ids, **given)

    return run
