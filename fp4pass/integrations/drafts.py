"""transformers: drafts of a small model, or of the prompt, that a model checks in one step."""

from __future__ import annotations

from typing import Any

from .._compat.transformers_drafts import compile_for_drafts as _compile_for_drafts
from ..errors import OptionError, expected


def compile_for_drafts(
    model: Any, length: int, *, tokens: int = 8, backend: str = "inductor"
) -> Any:
    """Compile a model for `generate` with `assistant_model` or `prompt_lookup_num_tokens`.

    transformers runs these with a cache that grows, which cannot be compiled well, and refuses its
    static cache. The model gets a static cache of its own, from which tokens are taken back that
    it does not accept. Forwards of few tokens are compiled, as CUDA graphs on a GPU; longer ones,
    such as of the prompt, are not. The draft model may be compiled in the same way.

    Args:
        model: a decoder of transformers, packed or not, which is changed. Its layers keep all
            tokens: no sliding windows.
        length: tokens of the longest text, prompt and answer.
        tokens: the most of a compiled forward, up to 8. A forward has one token more than a draft,
            and each number of tokens is compiled once.
        backend: of torch.compile.

    Returns:
        The model. `generate` then takes one text at a time.

    Raises:
        OptionError: a number does not fit, or the model's cache is another one.

    Example:
        >>> model = fp4pass.load(folder)
        >>> model = fp4pass.integrations.compile_for_drafts(model, 256, backend="eager")
        >>> answer = model.generate(ids, prompt_lookup_num_tokens=4, max_new_tokens=8)
    """
    for name, value, most in (("length", length, None), ("tokens", tokens, 8)):
        if not isinstance(value, int) or value < 1 or value > (most or value):
            wanted = "a positive integer" if most is None else f"an integer from 1 to {most}"
            raise OptionError(expected(f"compile_for_drafts: {name}", wanted, value))
    return _compile_for_drafts(model, backend, length, tokens)
