"""Measure models: perplexity, KL divergence, agreement and output errors, with intervals.

`evaluate` runs a causal language model on a text and returns an `Evaluation`; two of them on the
same tokens have a `Difference`, whose fields are `Change`s. `output_errors` measures the converted
linear layers one by one. `token_windows` and `cut_windows` cut a text into windows of tokens.
"""

from .intervals import Change
from .layer_errors import output_errors
from .measure import evaluate
from .results import Difference, Evaluation
from .windows import cut_windows, token_windows

__all__ = [
    "Change",
    "Difference",
    "Evaluation",
    "cut_windows",
    "evaluate",
    "output_errors",
    "token_windows",
]
